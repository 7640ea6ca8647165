"""A small training program, run in processes of its own:

    python -m tests.backend.program '<options as JSON>' [load|save FILE]

FILE has the artifacts of torch's caches, as programs carry them to another machine.

Prints one line of JSON: the losses, the compile caches' counters, what was imported on the way, and delayed scaling's
state."""

import json
import sys
import warnings
from pathlib import Path


def main(options: str, what: str = "", artifacts: str = "") -> None:
    import torch
    from torch._dynamo.utils import counters

    import te_inductor
    from te_inductor.errors import FallbackWarning

    warnings.simplefilter("error", FallbackWarning)
    if what == "load":
        torch.compiler.load_cache_artifacts(Path(artifacts).read_bytes())
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.ReLU())
    compiled = torch.compile(model, backend="te", options=json.loads(options), fullgraph=True)
    x = torch.randn(16, 32)
    for _ in range(2):
        loss = compiled(x).square().mean()
        loss.backward()
    if what == "save":
        saved = torch.compiler.save_cache_artifacts()
        Path(artifacts).write_bytes(saved[0] if saved else b"")
    found = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass")}
    found |= {
        f"autograd_{name}": counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass")
    }
    quantizes = "te_inductor.ops" in sys.modules
    state = {key: value.flatten()[-2:].tolist() for key, value in te_inductor.state_dict(compiled).items()}
    print(json.dumps({"loss": loss.item(), "caches": found, "quantizes": quantizes, "state": state}))


if __name__ == "__main__":
    main(*sys.argv[1:])
