"""One rank of a training run: `python -m tests.backend.ranks RANK WORLD FILE '<recipe fields as JSON>' KIND`.

Ranks see data of different magnitude, one of them a NaN in the second step. Prints one line of JSON: after each step,
what the rank's tensors held and the state. KIND is "plain", one layer, which names the group of all ranks, "ddp" or
"split ddp", of two layers, or "uncompiled KIND" (tests/uncompiled.py)."""

import gc
import json
import sys
import warnings
from typing import Any


def main(rank: int, world: int, file: str, fields: dict[str, Any], kind: str) -> None:
    import torch
    import torch.distributed as dist

    import te_inductor
    from te_inductor.diagnostics import CUT_BY_DDP
    from te_inductor.recipes import DelayedScaling
    from tests import uncompiled

    without_codegen = uncompiled.patched(kind.startswith("uncompiled"))
    kind = kind.removeprefix("uncompiled ")

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    torch.manual_seed(0)

    class Model(torch.nn.Module):  # under DDP Dynamo compiles the frames of user code alone
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = torch.nn.Linear(32, 48), torch.nn.Linear(48, 48)

        def forward(self, x):
            with torch.no_grad():  # as rotary embeddings have it
                one = x.new_ones(()).cos().acos()
            y = self.layer(x * one)
            return y if kind == "plain" else y + 0 * self.other(y).nan_to_num()

    inner = Model()
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1
    # DDP's own compiler pass splits the graph where buckets of gradients end, here at each parameter.
    model = torch.nn.parallel.DistributedDataParallel(inner, bucket_cap_mb=1e-6) if kind != "plain" else inner
    options = {"recipe": DelayedScaling(amax_history_len=4, **fields), "fallback": "error"}
    if kind == "plain" and not fields:
        options["amax_group"] = dist.group.WORLD
    cut = kind == "split ddp"
    with torch._dynamo.config.patch(optimize_ddp=cut), without_codegen, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = torch.compile(model, backend="te", options=options)
        steps = []
        for step in range(3):
            x, dy = torch.full((8, 32), 1.0 + rank + 10.0 * step), torch.full((8, 48), 2.0**-rank * (step + 1))
            if step == 1 and rank == world - 1:
                x[0, 0] = torch.nan
            run(x).backward(dy)
            state = {key: value.tolist() for key, value in te_inductor.state_dict(inner.layer).items()}
            steps.append({"input": x.max().item(), "grad_output": dy.max().item(), "state": state})
    assert [str(one.message) for one in said if "bucket_cap_mb" in str(one.message)] == [CUT_BY_DDP] * cut
    print(json.dumps(steps))
    # DDP's reducer goes first: the last to hold a gloo group waits for its threads, and they for the interpreter's lock.
    del model, run
    torch._dynamo.reset()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]), sys.argv[5])
