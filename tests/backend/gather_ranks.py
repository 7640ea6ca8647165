"""Cases of a model whose weights FSDP2 gathers in FP8, for test_low_precision_gather.py. Most train a model twice on data
of their own, as FSDP2 gathers it and in low precision, and tell whether losses and parameters are equal bit for bit."""

import copy
import io
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import te_inductor
from te_inductor import compat
from te_inductor.distributed import low_precision_all_gather
from te_inductor.distributed.fsdp import casts, rounds
from te_inductor.ops.gathered_weight import GatheredWeight
from te_inductor.recipes import DelayedScaling, Float8BlockScaling
from tests.ranks import how
from tests.support.gathered_models import (
    RECIPES,
    Block,
    Checkpointed,
    K,
    N,
    Rank,
    Skipping,
    of_a_recipe,
    refused,
    same,
    whole,
)


@of_a_recipe
def blocks(rank: Rank, recipe: Any) -> Any:
    return rank.equal(recipe)


@of_a_recipe
def whole_model(rank: Rank, recipe: Any) -> Any:
    return rank.equal(recipe, compiled="whole", reshard_after_forward=False)


@of_a_recipe
def stays_gathered(rank: Rank, recipe: Any) -> Any:
    return rank.equal(recipe, reshard_after_forward=False)


@of_a_recipe
def uneven(rank: Rank, recipe: Any) -> Any:
    """Shards of rows that no block of 128 divides, the last one shorter where there are three ranks."""
    return rank.equal(recipe, lambda: nn.Sequential(Block(256 + 128), Block(128)))


@of_a_recipe
def mixed_precision(rank: Rank, recipe: Any) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return rank.equal(recipe, mp_policy=policy)


@of_a_recipe
def accumulates(rank: Rank, recipe: Any) -> Any:
    """Two microbatches, of which the first does not reduce its gradients."""
    return rank.equal(recipe, batches=2)


@of_a_recipe
def frozen(rank: Rank, recipe: Any) -> Any:
    def make() -> nn.Module:
        model = nn.Sequential(Block(), Block())
        model[0].up.weight.requires_grad_(False)
        model[1].requires_grad_(False)
        return model

    return rank.equal(recipe, make)


@of_a_recipe
def checkpointed(rank: Rank, recipe: Any) -> Any:
    return rank.equal(recipe, lambda: nn.Sequential(Checkpointed(), Checkpointed()))


@of_a_recipe
def hsdp(rank: Rank, recipe: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, rank.world // 2), mesh_dim_names=("replicate", "shard"))
    return rank.equal(recipe, mesh=mesh)


@of_a_recipe
def tensor_parallel(rank: Rank, recipe: Any) -> Any:
    """Each rank of two shards of two parts of each weight."""
    grid = init_device_mesh("cpu", (2, rank.world // 2), mesh_dim_names=("dp", "tp"))
    rank.replica = grid["dp"].get_local_rank()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def make() -> nn.Module:
        return nn.Sequential(parallelize_module(Block(512), grid["tp"], plan))

    try:
        return rank.equal(recipe, make, mesh=grid["dp"])
    finally:
        rank.replica = rank.rank


@of_a_recipe
def not_finite(rank: Rank, recipe: Any) -> Any:
    """A NaN and an infinity in some shards, in the second step."""

    def change(model: nn.Module, step: int) -> None:
        if step == 1:
            local = model[1].up.weight.to_local()
            local[0, 0], local[1, 1] = (torch.nan, 1.0) if rank.rank else (1.0, torch.inf)

    return rank.equal(recipe, change=change)


@of_a_recipe
def skipped(rank: Rank, recipe: Any) -> Any:
    """A block that a step leaves out has other values when it is called again, and other scales."""

    def change(model: nn.Module, step: int) -> None:
        if step == 2:
            model.blocks[1].up.weight.to_local().mul_(64)

    return rank.equal(recipe, Skipping, change=change)


def parts(rank: Rank) -> Any:
    """Blocks are called one by one, behind changes that no optimizer made."""
    found = []
    for low in (None, "current"):
        model = rank.compiled(rank.sharded(low), "current")
        model(torch.ones(32, K))  # the first call is the whole model's
        told = []
        for step in range(3):
            torch.manual_seed(step)
            y = model[1](model[0](torch.randn(32, K)))
            y.sum().backward()
            told.append(y.detach())
            with torch.no_grad():
                model[0].up.weight.to_local().mul_(3.0)
        found.append(([], told))
    return same(*found)


class Counting(DefaultAllGather):
    """Bytes that each all-gather brings of other ranks."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.bytes.append((output_tensor.numel() - input_tensor.numel()) * input_tensor.element_size())
        return super().__call__(output_tensor, input_tensor, group, async_op)


@contextmanager
def counted(module: Any, name: str) -> Iterator[list[Any]]:
    """The arguments of each call of a function."""
    calls: list[Any] = []
    original = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    with mock.patch.object(module, name, call):
        yield calls


@of_a_recipe
def traffic(rank: Rank, recipe: Any) -> Any:
    """The traffic of two steps: bytes of each all-gather in bf16 and in FP8, weights that were cast, and reductions of
    our own."""
    policy, told = MixedPrecisionPolicy(param_dtype=torch.bfloat16), {}
    for low in (None, recipe):
        model = rank.sharded(low, mp_policy=policy)
        counting = Counting()
        for block in model:
            block.set_custom_all_gather(counting)
        with counted(rounds, "cast_rows") as cast, counted(rounds.dist, "all_reduce") as reductions:
            rank.train(model, rank.compiled(model, recipe), 2)
        told["bf16" if low is None else "fp8"] = counting.bytes
        told["casts"] = sum(len(call[0]) for call in cast)
        told["reductions"] = len(reductions)
    return told


@of_a_recipe
def checkpoints(rank: Rank, recipe: Any) -> Any:
    """Keys, kinds of tensors, torch.save, DCP, and loading between the two ways to gather."""

    def sharded(recipe: Any = None) -> nn.Module:
        torch.manual_seed(0)
        return rank.sharded(recipe, nn.Sequential(Block()))

    plain, low = sharded(), sharded(recipe)
    run = rank.compiled(low, recipe)
    rank.train(low, run, 1)
    told: dict[str, Any] = {}
    told["keys"] = list(low.state_dict()) == list(plain.state_dict())
    told["plain"] = all(type(p) is DTensor and vars(p.to_local()) == {} for p in low.state_dict().values())
    state = {key: value.clone() for key, value in low.state_dict().items()}
    file = io.BytesIO()
    torch.save({key: value.to_local() for key, value in low.state_dict().items()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    told["saved"] = all(torch.equal(saved[key], state[key].to_local()) for key in state)
    local = low[0].up.weight._local_tensor  # with FSDP's hooks; `to_local` returns it in some releases
    told["pickled"] = "expected a tensor of model.state_dict()" in refused(lambda: torch.save(local, io.BytesIO()))
    told["copied"] = torch.equal(copy.deepcopy(local.detach()), local)
    folder = f"{rank.folder}/dcp-{recipe if isinstance(recipe, str) else recipe.name}"
    dcp.save({"model": get_model_state_dict(low)}, checkpoint_id=folder)
    loaded = {"model": plain.state_dict()}
    dcp.load(loaded, checkpoint_id=folder)
    told["dcp"] = equal_states(loaded["model"], state)
    plain.load_state_dict(loaded["model"])
    scaling = te_inductor.state_dict(low)
    told["scaling"] = bool(scaling) == isinstance(recipe, DelayedScaling)
    after = sharded(recipe)
    models = {"before a call": sharded(recipe), "assigned": sharded(recipe), "after calls": after}
    rank.train(after, rank.compiled(after, recipe), 2)
    for name, model in models.items():
        model.load_state_dict({key: value.clone() for key, value in state.items()}, assign=name == "assigned")
        te_inductor.load_state_dict(model, scaling)
    continued = rank.train(low, run, 2)
    for name, model in models.items():
        again = rank.train(model, model if model is after else rank.compiled(model, recipe), 2)
        states = te_inductor.state_dict(low), te_inductor.state_dict(model)
        told[name] = same(continued, again) and equal_states(*states)
    after.load_state_dict({key: value.clone() for key, value in state.items()}, assign=True)
    te_inductor.load_state_dict(after, scaling)
    told["assigned after calls"] = same(continued, rank.train(after, after, 2))
    return told


def equal_states(a: Any, b: Any) -> bool:
    return list(a) == list(b) and all(torch.equal(whole(a[key]), whole(b[key])) for key in a)


@of_a_recipe
def compiled_casts(rank: Rank, recipe: Any) -> Any:
    """The casts as on a GPU, where Inductor compiles them: of fp32 shards that would be gathered in bf16, whose blocks
    other ranks hold too."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch._dynamo.reset()
    counters.clear()
    with mock.patch.object(casts, "COMPILED_ON", ["cpu"]):
        equal = rank.equal(recipe, lambda: nn.Sequential(Block(256 + 128), Block(128)), mp_policy=policy)
    inductor = counters["inductor"]  # nothing else runs it here
    return equal and not casts._failed and inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_hit"] > 0


@of_a_recipe
def saves(rank: Rank, recipe: Any) -> Any:
    """How many tensors of a weight's size graphs keep for the backward, and how many of those are no gathered ones."""
    model = rank.sharded(recipe, reshard_after_forward=False)
    run = rank.compiled(model, recipe)
    for _ in range(2):  # the second is no first step
        kept: list[int] = []

        def pack(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            if tuple(tensor.shape) in ((K, N), (N, K)):
                kept.append(tensor.untyped_storage().data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = run(torch.randn(32, K))
        weights = [p for p in model.parameters() if isinstance(p, GatheredWeight)]
        places = {p.values_.untyped_storage().data_ptr() for p in weights}
        y.sum().backward()
    return [len(kept), len(set(kept) - places)]


@of_a_recipe
def meta(rank: Rank, recipe: Any) -> Any:
    """A model that gets its memory behind the call."""
    start = {key: whole(value) for key, value in rank.sharded().state_dict().items()}
    found = []
    for low in (None, recipe):
        with torch.device("meta"):
            model = nn.Sequential(Block(), Block())
        rank.sharded(low, model)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(torch.distributed.tensor.distribute_tensor(start[name], rank.mesh))
        run = rank.compiled(model, recipe)
        found.append(rank.train(model, run))
        kinds = {type(one.whole) is GatheredWeight for one in compat.gathered() if one.whole is not None}
        assert (True in kinds) == (low is not None) or low is None
    return same(*found)


@of_a_recipe
def without_gradients(rank: Rank, recipe: Any) -> Any:
    """Evaluation in between changes nothing, and neither does inference mode."""
    found = []
    for evaluates in (False, True):
        model = rank.sharded(recipe)
        run = rank.compiled(model, recipe)

        def change(model: nn.Module, step: int, evaluates: bool = evaluates, run: Any = run) -> None:
            if evaluates and step:
                run(torch.ones(32, K))
                with torch.inference_mode():
                    run(torch.ones(32, K))

        found.append(rank.train(model, run, change=change))
    return same(*found)


@of_a_recipe
def eager(rank: Rank, recipe: Any) -> Any:
    """A gathered weight is, outside of the backend, what it stands for, its gradient too, and nothing changes it."""
    model = rank.sharded(recipe)
    x = torch.randn(8, K, requires_grad=True)
    told: dict[str, Any] = {}
    model[0].unshard()
    weight = model[0].up.weight
    told["type"] = type(weight).__name__
    values = weight.dequantize()
    told["error"] = (values - whole(rank.sharded()[0].up.weight)).abs().max().item() / values.abs().max().item()
    y = nn.functional.linear(x, weight)
    told["linear"] = torch.equal(y, x @ values.t())
    y.sum().backward()
    told["dx"] = torch.equal(x.grad, torch.ones(8, N) @ values)
    told["dw"] = torch.equal(weight.grad, torch.ones(N, 8) @ x.detach())
    told["sum"] = torch.equal(weight.sum(), values.sum()) and torch.equal(weight.detach() + 0, values)
    told["changed"] = refused(lambda: weight.data.mul_(2))
    told["pickled"] = refused(lambda: torch.save(weight.detach(), io.BytesIO()))
    weight.grad = None
    other = torch.compile(lambda x, w: nn.functional.linear(x, w), backend="aot_eager", fullgraph=True)
    told["another backend"] = torch.allclose(other(x, weight), x @ values.t())
    return told


def mismatch(rank: Rank) -> Any:
    """The model is compiled with another recipe than weights are gathered for, or with none."""
    told = {}
    for name, options in {
        "another": {"recipe": "delayed"},
        "none": {"recipe": "none"},
        "policy": {"recipe": "current", "policy": {"*up": "none"}},
    }.items():
        model = rank.sharded("current")
        for block in model:
            block.compile(backend="te", options=options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = model(torch.randn(32, K)).square().mean()
            loss.backward()
        told[name] = [str(one.message) for one in caught if "gathered" in str(one.message)][:1]
    return told


def refusals(rank: Rank) -> Any:
    def of(recipe: Any = "current", **how: Any) -> str:
        return refused(lambda: rank.sharded(recipe, **how))

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(64, K), nn.Linear(K, 64, bias=False)
            self.head.weight = self.embed.weight

    def ran() -> None:
        model = rank.sharded()
        model(torch.ones(8, K))
        low_precision_all_gather(model)

    told = {
        "rowwise": of("rowwise"),
        "mxfp8": of("mxfp8"),
        "rows of blocks": of(Float8BlockScaling(w_block_scaling_dim=1)),
        "own amaxes": of(DelayedScaling(reduce_amax=False)),
        "unknown": of("fp8"),
        "offload": of(offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "columns": of(shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None),
        "sizes": of("block", model=nn.Sequential(Block(N - 16))),
        "vocabulary": of(model=nn.Sequential(nn.Linear(K, 250))),
        "tied": of(model=Tied()),
        "not sharded": refused(lambda: low_precision_all_gather(nn.Linear(16, 16))),
        "no model": refused(lambda: low_precision_all_gather(7)),
        "twice": refused(lambda: low_precision_all_gather(rank.sharded("current"))),
        "ran": refused(ran),
        "policy": refused(lambda: low_precision_all_gather(rank.sharded(), "current", {"nobody": "none"}, "error")),
    }
    if rank.world == 4:
        told["int"] = of(reshard_after_forward=2)
    return told


def policy(rank: Rank) -> Any:
    """What a policy leaves is gathered as before, and what it names has its own recipe."""
    model = low_precision_all_gather(rank.sharded(), "current", {"0.up": "none", "1.*": RECIPES["delayed"]})
    model(torch.ones(8, K))
    for block in model:
        block.unshard()
    found = {name: p for name, p in model.named_parameters() if p.dim() == 2}
    return {name: p.recipe.name if isinstance(p, GatheredWeight) else "plain" for name, p in found.items()}


def other_weights(rank: Rank) -> Any:
    """A rank gathers one weight less."""
    entry = {"0.up": "none"} if rank.rank else {}
    return refused(lambda: low_precision_all_gather(rank.sharded(), "current", entry))


@how(patience=2, loses_group=True)
def absent(rank: Rank) -> Any:
    """A rank does not call: the others' wait ends with the timeout of the process group."""
    model = rank.sharded()
    dist.barrier()
    started = time.monotonic()
    if rank.rank:
        time.sleep(4)
        return "absent"
    try:
        low_precision_all_gather(model)
    except RuntimeError:
        return time.monotonic() - started
    return "nothing"


def other_state(rank: Rank) -> Any:
    """State of delayed scaling that one rank loads alone."""
    recipe = RECIPES["delayed"]
    model = rank.sharded(recipe)
    if rank.rank:
        state = {"scale": torch.tensor(8.0), "amax_history": torch.ones(4)}
        te_inductor.load_state_dict(model, {f"0.up.weight.{key}": value for key, value in state.items()})
    return refused(lambda: model(torch.ones(8, K)))
