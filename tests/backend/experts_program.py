"""A step of a small mixture of experts, run in processes of its own:

    python -m tests.backend.experts_program RECIPE

Prints one line of JSON: the loss, and the counters of AOTAutograd's cache."""

import json
import sys


def main(recipe: str) -> None:
    import torch
    from torch._dynamo.utils import counters

    import te_inductor  # noqa: F401
    from tests.experts import HIDDEN, TOKENS, MoE

    torch.manual_seed(0)
    model = MoE("torchtitan", split=True).bfloat16()
    options = {"recipe": recipe, "policy": {"gate": "none"}, "fallback": "error"}
    compiled = torch.compile(model, backend="te", options=options, fullgraph=True)
    for _ in range(2):
        loss = compiled(torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
    found = {name: counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass")}
    print(json.dumps({"loss": loss.item(), **found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
