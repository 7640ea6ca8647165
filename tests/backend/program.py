"""A small training program, run in processes of its own: `python -m tests.backend.program '<options as JSON>'`.

Prints one line of JSON: the loss, the compile caches' counters, and what was imported on the way.
"""

import json
import sys
import warnings


def main(options: str) -> None:
    import torch
    from torch._dynamo.utils import counters

    from te_inductor.errors import FallbackWarning

    warnings.simplefilter("error", FallbackWarning)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    compiled = torch.compile(model, backend="te", options=json.loads(options), fullgraph=True)
    x = torch.randn(16, 32)
    loss = compiled(x).square().mean()
    loss.backward()
    with torch.no_grad():
        compiled(x)
    found = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass")}
    found |= {
        f"autograd_{name}": counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass")
    }
    print(json.dumps({"loss": loss.item(), "caches": found, "quantizes": "te_inductor.ops" in sys.modules}))


if __name__ == "__main__":
    main(sys.argv[1])
