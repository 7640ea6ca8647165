"""One rank of a run whose ranks differ: `python -m tests.backend.unequal_ranks RANK WORLD FILE KINDS`, one process
group for all KINDS. Prints one line of JSON: by kind, the warnings and the newest amaxes of the inputs, by layer.

Ranks see data of magnitude 1 + rank.
"""

import json
import sys
import warnings
from typing import Any
from unittest import mock


def main(rank: int, world: int, file: str, kinds: list[str]) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    import te_inductor
    from te_inductor import compat
    from te_inductor.distributed import agreement
    from te_inductor.recipes import DelayedScaling
    from tests import uncompiled

    recipe = DelayedScaling(amax_history_len=4)
    found: dict[str, Any] = {}

    def layers(number: int) -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(32, 32) for _ in range(number)))

    def te(model: nn.Module) -> Any:
        return torch.compile(model, backend="te", options={"recipe": recipe, "amax_group": dist.group.WORLD})

    def step(run: Any, x: Any = None) -> Any:
        y = run(torch.full((8, 32), 1.0 + rank) if x is None else x)
        y.sum().backward()
        return y.detach()

    def amaxes(model: nn.Module) -> dict[str, float]:
        state = te_inductor.state_dict(model)
        return {key: round(value[-1].item(), 4) for key, value in state.items() if key.endswith("input.amax_history")}

    def failing_once(compile: Any) -> Any:
        failures = [RuntimeError("Inductor failed")]

        def failing(*args: Any) -> Any:
            if failures:
                raise failures.pop()
            return compile(*args)

        return failing

    for kind in kinds:
        dist.init_process_group("gloo", init_method=f"file://{file}-{kind}", rank=rank, world_size=world)
        torch.manual_seed(0)
        torch._dynamo.reset()
        agreement.PATIENCE = 0.5 if kind in ("more graphs", "pipeline") else 60.0
        fails = kind == "no compile" and rank == 1
        compile = failing_once(uncompiled.compile_fx) if fails else uncompiled.compile_fx
        compiles = mock.patch.object(compat, "compile_fx", compile)
        with warnings.catch_warnings(record=True) as caught, compiles:
            warnings.simplefilter("always")
            model, other = layers(2 + rank if kind == "unequal" else 2), layers(3)
            run, extra = te(model), te(other)
            for _ in range(2):
                if kind == "pipeline":  # equal stages, one after another
                    x = torch.empty(8, 32)
                    if rank:
                        dist.recv(x, 0)
                    y = step(run, x if rank else None)
                    if not rank:
                        dist.send(y, 1)
                    continue
                if kind == "other order" and rank:
                    step(extra)
                step(run)
                if kind in ("more graphs", "other order") and not rank:
                    step(extra)
        said = [str(one.message) for one in caught if "amaxes" in str(one.message)]
        found[kind] = {"said": said, "model": amaxes(model), "other": amaxes(other)}
        dist.barrier()
        dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4].split(","))
