"""Weights that a graph gathers, tensor parallelism, and experts whose rows come from other ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.expert_blocks import Experts, ExpertShape
from te_inductor import recipes
from te_inductor.distributed.fsdp import casts
from te_inductor.ops.gathered_weight import GatheredWeight
from tests.offline.cases.common import Case, Mlp


def _gathered(recipe: str) -> Case:
    """Weights as FSDP2 gathered them in FP8."""
    model, made = Mlp(4096, 14336), recipes.resolve(recipe)
    for layer in (model.gate, model.up, model.down):
        shape = layer.weight.shape
        values = torch.empty(shape, device="cuda", dtype=torch.float8_e4m3fn)
        scale_inv = torch.empty(made.slots().weight.granularity.scale_shape(*shape), device="cuda")
        layer.weight = nn.Parameter(GatheredWeight(values, scale_inv, shape, torch.bfloat16, made))
    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return torch.compile(model, backend="te", fullgraph=True, options={"recipe": recipe, "fallback": "error"}), (x,)


def gathered_mlp() -> Case:
    return _gathered("current")


def gathered_mlp_block() -> Case:
    return _gathered("block")


def shard_casts() -> Case:
    """The casts of two weights' rows, fp32, that FSDP would gather in bf16: one with one scale, one with those of
    blocks."""
    rows = [torch.empty(2048, 4096, device="cuda"), torch.empty(7168, 4096, device="cuda")]
    scales = [torch.empty((), device="cuda"), torch.empty((112, 32), device="cuda")]
    whole, blocks = ((first, torch.bfloat16, block, 448.0, torch.float8_e4m3fn) for first, block in _SHARDS)
    compiled = torch.compile(lambda *all: casts._casts(all[:2], all[2:], [whole, blocks]), options=casts.EXACT)
    return compiled, (*rows, *scales)


_SHARDS = ((2048, (0, 0)), (7168, (128, 128)))


def _async_tp(recipe: str, batch: int = 1, bias: bool = False, **options: Any) -> Case:
    """Rank 0 of two, sequence parallel, of a process group that sends nothing."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed import _symmetric_memory
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # type: ignore[no-untyped-call]
    dist.is_nccl_available = lambda: True
    _symmetric_memory._is_test_mode = True  # the group is taken for one with symmetric memory
    with unset_fake_temporarily():
        mesh = init_device_mesh("cuda", (2,))
    model = nn.Sequential(Mlp(4096, 14336, bias))
    into, out = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    plan = {"norm": SequenceParallel(), "gate": into, "up": into, "down": out}
    parallelize_module(model[0], mesh, plan)  # type: ignore[arg-type]
    x = torch.randn(batch, 4096, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return torch.compile(model, backend="te", fullgraph=True, options={"recipe": recipe, **options}), (x,)


def graph_fsdp() -> Case:
    """Rank 0 of two, which gather weights of which each has half of the rows."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tests.simple_fsdp import simple_fsdp

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # type: ignore[no-untyped-call]
    with unset_fake_temporarily():
        mesh = init_device_mesh("cuda", (2,))
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16))
    simple_fsdp(model, mesh, [Shard(0)])
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return torch.compile(model, backend="te", fullgraph=True, options={"recipe": "current"}), (x,)


def tp_delayed() -> Case:
    return _async_tp("delayed")


def async_tp_delayed() -> Case:
    return _async_tp("delayed", _micro_pipeline_tp=True)


def async_tp_bias() -> Case:
    """Async TP by Inductor's own setting; two sequences, of which each rank has a part."""
    torch._inductor.config._micro_pipeline_tp = True
    return _async_tp("current", 2, bias=True)


DIM, TOKENS = 2048, 8192  # Qwen3-30B-A3B's, with a choice of eight experts a token


class ExchangedExperts(nn.Module):
    """A norm in front, a residual around."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.RMSNorm(DIM), Experts(ExpertShape(dim=DIM), world=2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.norm(x))


def _exchanged(recipe: str) -> Case:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch._dynamo.config.capture_scalar_outputs = True
    torch.set_default_dtype(torch.bfloat16)  # a module of fake tensors cannot be cast
    with torch.device("cuda"):
        layer, x = ExchangedExperts(), torch.randn(TOKENS, DIM, requires_grad=True)
    torch.set_default_dtype(torch.float32)
    options = {"policy": {"*router": "none", "*": recipe}, "amax_group": dist.group.WORLD}
    return torch.compile(layer, backend="te", fullgraph=True, options=options), (x,)


def exchanged_delayed() -> Case:
    return _exchanged("delayed")


def exchanged_current() -> Case:
    return _exchanged("current")
