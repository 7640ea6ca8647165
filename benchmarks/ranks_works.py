"""How a model is spread over ranks: the works of `benchmarks.ranks`, one record each in `WORKS`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from benchmarks import expert_blocks, harness, llama_blocks
from benchmarks.ranks_job import Job

BF16 = torch.bfloat16
WIDE = 4096  # features, to which the sizes of weights are fit
HIGH = "inductor"  # the backend of arms that are not ours


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Spread:
    """A model on one rank, compiled at its first call."""

    model: Callable[[Tensor], Tensor]
    blocks: nn.Module  # which hold its parameters
    replica: int = 0  # whose data this rank has
    part: tuple[int, int] = (0, 1)  # which of how many parts of a sequence
    before: Callable[[], None] = _nothing  # called in front of each forward
    behind: Callable[[], None] = _nothing  # and behind each backward
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)  # whose communicators a step needs


@dataclass(frozen=True)
class Work:
    title: str
    arms: tuple[str, ...]
    spread: Callable[[Job, int], Spread]  # of one rank


def place(job: Job, rank: int) -> str:
    return f"cuda:{rank}" if job.device == "cuda" else "cpu"


def mesh_of(job: Job) -> DeviceMesh:
    """Replicas (or shards) by ranks of one model's layers."""
    return init_device_mesh(job.device, (job.replicas, job.tp), mesh_dim_names=("dp", "tp"))


def compiled(module: nn.Module, job: Job, **options: Any) -> None:
    """Compiles in place: bf16 and torchao by Inductor, others by the backend with the arm's recipe. Of a small model,
    and of experts, the policy names the layers."""
    if job.async_tp:
        options["_micro_pipeline_tp"] = True
    if job.name in ("bf16", "torchao"):
        options.pop("amax_group", None)
        module.compile(backend=HIGH, fullgraph=True, dynamic=False, options=options or None)
        return
    if job.model == "tiny" or job.work == "ep":
        options["policy"] = {"*router": "none", "*": job.recipe} if job.work == "ep" else {"*": job.recipe}
    options = {"recipe": job.recipe, "fallback": "error" if job.model == "tiny" else "warn", **options}
    module.compile(backend=harness.te_backend(), fullgraph=True, dynamic=False, options=options)


def built(job: Job, rank: int) -> nn.Module:
    """Plain blocks, the same in all arms. What they add to their input is smaller in deep models, as GPT-2 initializes
    it: else the first block's input is lost in what 32 blocks add. Weights are larger in narrow models, so that a layer
    computes values as large at any width, and small models train like wide ones."""
    where = place(job, rank)
    if job.work == "ep":
        blocks: nn.Module = expert_blocks.build(job.shape, BF16, where, rank, job.world)
    else:
        blocks = llama_blocks.build(job.shape, BF16, where)
    with torch.no_grad():
        for name, parameter in blocks.named_parameters():
            if "norm" not in name:
                added = name.removesuffix(".weight").endswith((".o", ".down"))
                parameter.mul_((WIDE / job.shape.dim / (2 * job.shape.layers if added else 1)) ** 0.5)
    return blocks


def each(blocks: nn.Module, job: Job, **options: Any) -> nn.Module:
    """Blocks, compiled one by one, or as one graph."""
    for module in [blocks] if job.whole else blocks.blocks:  # type: ignore[union-attr, list-item]
        compiled(module, job, **options)
    return blocks


def plan() -> dict[str, ParallelStyle]:
    """The plan of one block whose input is a plain tensor, this rank's part of the sequence."""
    into, out = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    styles: dict[str, ParallelStyle] = {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
    styles |= {f"attention.{name}": into for name in ("q", "k", "v")} | {"mlp.gate": into, "mlp.up": into}
    return styles | {"attention.o": out, "mlp.down": out}


def parallelized(blocks: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Plain blocks, sharded over the ranks of a mesh in place."""
    for block in blocks.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, plan())
    return blocks


def _torchao(blocks: nn.Module, job: Job, gathers: bool = False) -> Callable[[], None]:
    """torchao's tensorwise recipe; with `gathers`, FSDP2 gathers FP8. Returns what has to run in front of a forward."""
    if job.name != "torchao":
        return _nothing
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers, emulate=job.device == "cpu")
    convert_to_float8_training(blocks, config=config)
    return (lambda: precompute_float8_dynamic_scale_for_fsdp(blocks)) if gathers else _nothing


def _sharded(blocks: nn.Module, job: Job, mesh: DeviceMesh) -> None:
    """FSDP2: each block is gathered for its forward and again for its backward."""
    from torch.distributed.fsdp import fully_shard

    for block in blocks.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(blocks, mesh=mesh)
    if job.name == "gather":
        from te_inductor.distributed import low_precision_all_gather

        low_precision_all_gather(blocks, job.recipe, fallback="error")


def _fsdp(job: Job, rank: int) -> Spread:
    blocks = built(job, rank)
    before = _torchao(blocks, job, gathers=True)
    mesh = mesh_of(job)["dp"]
    _sharded(blocks, job, mesh)
    each(blocks, job)
    return Spread(blocks, blocks, rank, before=before, groups={"dp": mesh.get_group()})


def _tp(job: Job, rank: int) -> Spread:
    """Tensor and sequence parallelism, and FSDP2 over what it leaves."""
    blocks = built(job, rank)
    mesh = mesh_of(job)
    groups = {"tp": mesh["tp"].get_group()}
    parallelized(blocks, mesh["tp"])
    if job.async_tp:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(groups["tp"].group_name)
    if job.work == "fsdp_tp":
        groups["dp"] = mesh["dp"].get_group()
        _sharded(blocks, job, mesh["dp"])
    each(blocks, job)
    return Spread(blocks, blocks, rank // job.tp, (rank % job.tp, job.tp), groups=groups)


def _ddp(job: Job, rank: int) -> Spread:
    from torch.nn.parallel import DistributedDataParallel

    torch._dynamo.config.optimize_ddp = not job.uncut
    blocks = built(job, rank)
    _torchao(blocks, job)
    each(blocks, job)
    devices = [rank] if job.device == "cuda" else None
    return Spread(DistributedDataParallel(blocks, devices, gradient_as_bucket_view=True), blocks, rank)


def _ep(job: Job, rank: int) -> Spread:
    """Experts are sharded over all ranks; what is no expert each rank has, and its gradients are summed in one piece."""
    torch._dynamo.config.capture_scalar_outputs = True  # splits of the exchange are counted on the device
    blocks = built(job, rank)
    each(blocks, job, amax_group=dist.group.WORLD)
    shared = [parameter for parameter in blocks.parameters() if parameter.dim() < 3]

    def summed() -> None:
        grads = [parameter.grad for parameter in shared if parameter.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        for grad, whole in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(whole.view_as(grad))

    return Spread(blocks, blocks, rank, behind=summed if job.world > 1 else _nothing)


_OURS = ("te:delayed", "te:current")
_GATHERS = ("te:delayed", "gather:delayed", "te:current", "gather:current")

WORKS = {
    "fsdp": Work("FSDP2", ("bf16", *_GATHERS, "torchao"), _fsdp),
    "tp": Work("tensor and sequence parallelism", ("bf16", *_OURS), _tp),
    "fsdp_tp": Work("FSDP2 and tensor parallelism", ("bf16", *_GATHERS), _tp),
    "ep": Work("expert parallelism", ("bf16", *_OURS), _ep),
    "ddp": Work("DistributedDataParallel", ("bf16", *_OURS, "torchao"), _ddp),
}
