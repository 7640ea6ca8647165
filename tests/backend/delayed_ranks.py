"""Cases of delayed scaling on two ranks, for test_ranks.py: amaxes of equal ranks, ranks that differ, state under FSDP2.
Ranks see data of different magnitude."""

import contextlib
import copy
import itertools
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import te_inductor
from te_inductor import compat
from te_inductor.diagnostics import CUT_BY_DDP, Refusal
from te_inductor.distributed import agreement
from te_inductor.errors import StateError
from te_inductor.passes.graph import interpreted
from te_inductor.passes.pre_grad.decide import size_rule
from te_inductor.recipes import DelayedScaling
from tests.ranks import Rank, how


class Model(nn.Module):  # under DDP Dynamo compiles the frames of user code alone
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 48)
        self.other = nn.Linear(48, 48) if layers > 1 else None

    def forward(self, x):
        with torch.no_grad():  # as rotary embeddings have it
            one = x.new_ones(()).cos().acos()
        y = self.layer(x * one)
        return y if self.other is None else y + 0 * self.other(y).nan_to_num()


def trains(rank: Rank, kind: str) -> Any:
    """What the tensors held and the state, after each step; a rank's data has a NaN in the second step. The kind is
    "plain", one layer, which names the group of all ranks, "own", without reduction, "ddp" or "split", of two layers."""
    alone = kind in ("plain", "own")
    inner = Model(1 if alone else 2)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1
    # DDP's own compiler pass splits the graph where buckets of gradients end, here at each parameter.
    model = inner if alone else DistributedDataParallel(inner, bucket_cap_mb=1e-6)
    recipe = DelayedScaling(amax_history_len=4, reduce_amax=kind != "own")
    options = {"recipe": recipe, "fallback": "error", **({"amax_group": dist.group.WORLD} if kind == "plain" else {})}
    with torch._dynamo.config.patch(optimize_ddp=kind == "split"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = torch.compile(model, backend="te", options=options)
        steps = []
        for step in range(3):
            x = torch.full((8, 32), 1.0 + rank.rank + 10.0 * step)
            dy = torch.full((8, 48), 2.0**-rank.rank * (step + 1))
            if step == 1 and rank.rank == rank.world - 1:
                x[0, 0] = torch.nan
            run(x).backward(dy)
            steps.append({key: value.tolist() for key, value in te_inductor.state_dict(inner.layer).items()})
    assert [str(one.message) for one in said if "bucket_cap_mb" in str(one.message)] == [CUT_BY_DDP] * (kind == "split")
    return steps


def interprets(rank: Rank, kind: str, ranks: str) -> Any:
    """What `trains` tells, where the first step is interpreted on "all" ranks, or has code on the "last"; and how many
    graphs were interpreted."""
    count = mock.patch.object(interpreted, "Interpreted", side_effect=interpreted.Interpreted)
    fits = mock.patch.object(interpreted, "fits", lambda gm: ranks == "all" or rank.rank == 0)
    with count as run, fits, functorch.patch(enable_autograd_cache=False):
        return {"steps": trains(rank, kind), "interpreted": run.call_count}


def differ(rank: Rank, kind: str) -> Any:
    """Warnings about amaxes, and the newest amaxes of the inputs, by layer, where one rank does something else."""
    recipe = DelayedScaling(amax_history_len=4)
    first = rank.rank == 0
    layers = [2 + rank.rank if kind == "unequal" else 2, 3]
    model, other = (nn.Sequential(*(nn.Linear(32, 32) for _ in range(number))) for number in layers)
    options = {"recipe": recipe, "amax_group": dist.group.WORLD}
    run, extra = (torch.compile(one, backend="te", options=options) for one in (model, other))

    def step(run: Any, x: Any = None) -> Tensor:
        y = run(torch.full((8, 32), 1.0 + rank.rank) if x is None else x)
        y.sum().backward()
        return y.detach()

    compile_fx, failures = compat.compile_fx, [RuntimeError("Inductor failed")] * (kind == "no_compile" and not first)

    def failing(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return compile_fx(*args)

    patience = mock.patch.object(agreement, "PATIENCE", 0.5 if kind in ("more_graphs", "pipeline") else 60.0)
    with warnings.catch_warnings(record=True) as caught, patience, mock.patch.object(compat, "compile_fx", failing):
        warnings.simplefilter("always")
        for _ in range(2):
            if kind == "pipeline":  # equal stages, one after another
                x = torch.empty(8, 32)
                if not first:
                    dist.recv(x, 0)
                y = step(run, None if first else x)
                if first:
                    dist.send(y, 1)
                continue
            if kind == "other_order" and not first:
                step(extra)
            step(run)
            if kind in ("more_graphs", "other_order") and first:
                step(extra)
    said = [str(one.message) for one in caught if "amaxes" in str(one.message)]
    return {"said": said, "model": _amaxes(model), "other": _amaxes(other)}


def _amaxes(model: nn.Module) -> dict[str, float]:
    state = te_inductor.state_dict(model)
    return {key: round(value[-1].item(), 4) for key, value in state.items() if key.endswith("input.amax_history")}


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x, first):
        return self.first(x) if first else self.second(x)


def apart(rank: Rank, kind: str) -> Any:
    """The newest amaxes of the inputs, by layer, in a DDP whose ranks run another layer each in the last step ("unused"),
    or of which the second one has a step more ("join")."""
    unused = kind == "unused"
    model = Either() if unused else Model(1)
    ddp = DistributedDataParallel(model, find_unused_parameters=unused)
    run = torch.compile(ddp, backend="te", options={"recipe": DelayedScaling(amax_history_len=4)})
    with contextlib.nullcontext() if unused else ddp.join():
        for step in range(3 if unused else 3 + rank.rank):
            which = [step == 0 or (step == 2 and rank.rank == 0)] if unused else []
            run(torch.full((8, 32), 1.0 + rank.rank + 10.0 * step), *which).sum().backward()
    return _amaxes(model)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Model(1), Model(1)

    def forward(self, x, swapped):
        blocks = [self.first, self.second]
        return sum(block(x) for block in (reversed(blocks) if swapped else blocks))


def other_calls(rank: Rank, kind: str) -> Any:
    """What ranks are told, of which the second one runs compiled blocks in another "order" in the last step, or has
    "loaded" state before it; each in DDP."""
    model = Both()
    for block in (model.first, model.second):
        block.compile(backend="te", options={"recipe": DelayedScaling(amax_history_len=4)})
    ddp = DistributedDataParallel(model)
    for _ in range(2):
        ddp(torch.ones(8, 32), False).sum().backward()
    if rank.rank and kind == "loaded":
        te_inductor.load_state_dict(model, te_inductor.state_dict(model))
    try:
        ddp(torch.ones(8, 32), rank.rank == 1 and kind == "order")
    except StateError as error:
        for _ in model.children():  # so that the other rank does not wait for the amaxes of each block
            dist.all_reduce(torch.zeros(2), dist.ReduceOp.MAX)
        return str(error)
    return ""


@how(traced=True)
def unwrapped(rank: Rank, which: str) -> Any:
    """What ranks are told, of which the second one runs compiled blocks in another order from the first step on, or their
    backwards. No wrapper names the blocks, which are of one class."""
    torch.manual_seed(0)
    options = {"recipe": DelayedScaling(amax_history_len=4), "amax_group": dist.group.WORLD}
    blocks = [torch.compile(Model(1), backend="te", options=options) for _ in range(2)]
    other, sums = rank.rank == 1, list[Tensor]()
    try:
        for block in reversed(blocks) if other and which == "forwards" else blocks:
            sums.append(block(torch.ones(8, 32)).sum())
        if which == "backwards":
            for one in reversed(sums) if other else sums:
                one.backward()
    except StateError as error:
        for _ in blocks if which == "backwards" else [None]:  # for which the other rank waits
            dist.all_reduce(torch.zeros(1 if which == "backwards" else 2), dist.ReduceOp.MAX)
        return str(error)
    return ""


def other_rows(rank: Rank, kind: str) -> Any:
    """The newest amaxes of the first layer's input, where the second rank's last batch is "empty", or where it weighs
    layers otherwise by then: it leaves the first one in high precision ("less"), or has both in low precision, which
    both ranks had not ("more")."""
    rules = {"less": [[], ["layer"]], "more": [["layer"], []], "empty": [[], []]}[kind]
    model, left = Model(2), list[str]()

    def weigh(plan: Any) -> None:
        for site in plan.candidates:
            if site.low and not site.by_policy and site.fqn.rpartition(".")[2] in left:
                site.refusal = Refusal("too small for FP8 to pay")

    run = torch.compile(
        DistributedDataParallel(model), backend="te", options={"recipe": DelayedScaling(amax_history_len=4)}
    )
    with mock.patch.object(size_rule, "weigh", weigh), torch._dynamo.config.patch(optimize_ddp=False):
        for step in range(3):
            other = step == 2 and rank.rank == 1
            left[:] = rules[other]
            x = torch.full((0 if kind == "empty" else 16, 32) if other else (8, 32), 1.0 + rank.rank + 10.0 * step)
            run(x).sum().backward()
    return _amaxes(model)


def microbatches(rank: Rank, kind: str) -> Any:
    """The history of the input and of the gradient behind two steps, in which the second rank has a microbatch more than
    the first; none but the last of a step reduces gradients, in a model under "ddp" or "fsdp". And how many graphs were
    compiled."""
    model = Model(1)
    wrapped: Any = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model, reshard_after_forward=False)
    run = torch.compile(wrapped, backend="te", options={"recipe": DelayedScaling(amax_history_len=4)})
    number = 2 + rank.rank
    for step, microbatch in itertools.product(range(2), range(number)):
        last = microbatch == number - 1
        if kind == "fsdp":
            wrapped.set_requires_gradient_sync(last)
            wrapped.set_reshard_after_backward(last)
        with wrapped.no_sync() if kind == "ddp" and not last else contextlib.nullcontext():
            y = run(torch.full((8, 32), 1.0 + rank.rank + 10.0 * microbatch + 100.0 * step))
            y.backward(torch.full((8, 48), 2.0 ** -(rank.rank + microbatch) * (step + 1)))
    state = te_inductor.state_dict(model)
    found = [state[f"layer.{slot}.amax_history"].tolist() for slot in ("input", "grad_output")]
    return found, counters["stats"]["unique_graphs"]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(32, 48), nn.Linear(48, 48)

    def forward(self, x):
        return self.other(self.layer(x))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.out = Pair(), nn.Linear(48, 1)

    def forward(self, x):
        return self.out(checkpoint(self.model, x, use_reentrant=False))


@how(traced=True)
def checkpointed(rank: Rank) -> Any:
    """How far the gradient of a compiled block in a checkpoint, in a DistributedDataParallel that cuts the block's graph, is
    from that of the block in high precision. Its backward runs the block again, outside of DistributedDataParallel's
    forward, where no graph is cut."""
    model = Checkpointed()
    exact = copy.deepcopy(model)
    model.model.compile(backend="te", options={"recipe": DelayedScaling(amax_history_len=4)})
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1
    for each in (DistributedDataParallel(model, bucket_cap_mb=1e-6), DistributedDataParallel(exact)):
        for _ in range(3):
            each.zero_grad()
            each(torch.ones(8, 32) + rank.rank).sum().backward()
    found, known = (one.model.layer.weight.grad for one in (model, exact))
    return ((found - known).norm() / known.norm()).item()


class Reentrant(Checkpointed):
    def forward(self, x):
        return self.out(checkpoint(self.model, x.requires_grad_(), use_reentrant=True))


def reentrant(rank: Rank) -> Any:
    """The histories of the inputs of compiled blocks in a checkpoint with reentry, in a DistributedDataParallel."""
    model = Reentrant()
    model.model.compile(backend="te", options={"recipe": DelayedScaling(amax_history_len=4)})
    ddp = DistributedDataParallel(model)
    for step in range(3):
        ddp(torch.full((8, 32), 1.0 + rank.rank + step)).sum().backward()
    return [value.tolist() for key, value in te_inductor.state_dict(model).items() if "input.amax_history" in key]


@how(patience=10, loses_group=True)
def left_alone(rank: Rank) -> Any:
    """What the first rank is told, which has a forward more than the second one."""
    model = Model(1)
    run = torch.compile(DistributedDataParallel(model), backend="te", options={"recipe": DelayedScaling()})
    for _ in range(2):  # DistributedDataParallel's forward waits for the other rank in the second step, too
        run(torch.ones(8, 32)).sum().backward()
    told = Path(rank.folder, "told")
    if rank.rank == 0:
        with pytest.raises(StateError) as error:
            run(torch.ones(8, 32))
        told.touch()
        return str(error.value)
    while not told.exists():
        time.sleep(0.1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Head(nn.Module):  # of the root's group
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 32)

    def forward(self, x):
        return self.proj(x)


def _sharded(rank: Rank, compiled: str) -> tuple[nn.Module, Any]:
    how: Any = {"backend": "te", "options": {"recipe": DelayedScaling(amax_history_len=4), "fallback": "error"}}
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Head())
    for block in model if compiled == "blocks" else ():
        block.compile(**how)
    for block in model[:2]:
        fully_shard(block, mesh=rank.mesh)
    fully_shard(model, mesh=rank.mesh)
    return model, model if compiled == "blocks" else torch.compile(model, **how)


def _losses(run: Any, steps: int, seed: int) -> list[float]:
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = run(torch.randn(8, 32)).square().sum()
        loss.backward()
        losses.append(loss.item())
    return losses


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


def sharded(rank: Rank, compiled: str) -> Any:
    """The keys of the state under FSDP2, and what came of loading it; the model is compiled "whole" or by "blocks"."""
    model, run = _sharded(rank, compiled)
    _losses(run, 2, seed=rank.rank)
    state = te_inductor.state_dict(model)
    told: dict[str, Any] = {"keys": [key for key in state if key.endswith("scale")]}
    told["of a part"] = list(te_inductor.state_dict(model[0].up))
    told["trained"] = all(value != 1 for key, value in state.items() if key.endswith("scale"))

    before, run_before = _sharded(rank, compiled)  # no call yet
    told["loaded"] = list(te_inductor.load_state_dict(before, state))
    told["waits"] = _same(te_inductor.state_dict(before), state)
    after, run_after = _sharded(rank, compiled)
    _losses(run_after, 1, seed=7)
    te_inductor.load_state_dict(after, state)
    told["in place"] = _same(te_inductor.state_dict(after), state)
    losses = [_losses(one, 2, seed=rank.rank + 9) for one in (run, run_before, run_after)]
    told["losses"] = losses[0] == losses[1] == losses[2]
    states = [te_inductor.state_dict(one) for one in (model, before, after)]
    told["states"] = _same(states[0], states[1]) and _same(states[0], states[2])
    told["moved on"] = not _same(states[0], state)

    resumed, run_resumed = _sharded(rank, compiled)  # with an optimizer's state, and without ours
    optimizer = torch.optim.SGD(resumed.parameters(), lr=0.1, momentum=0.9)
    for parameter in resumed.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            _losses(run_resumed, 1, seed=rank.rank)
            optimizer.step()
    told["lost state is said"] = sum("trained before" in str(one.message) for one in caught) == 1
    return told


def lost(rank: Rank) -> Any:
    """A sharded parameter that FSDP does not gather."""
    model = _sharded(rank, "blocks")[0]
    model.extra = nn.Parameter(distribute_tensor(torch.randn(8, 8), rank.mesh))
    try:
        te_inductor.state_dict(model)
    except StateError as error:
        return str(error)
