"""Cases of tensor-parallel ranks that have to do alike, for test_parallel_alike.py: run the graph of a first step together,
interpret it, decide about layers; and of ranks that do not."""

import copy
import functools
import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import te_inductor
from te_inductor import compat, ops
from te_inductor.distributed import agreement, amax_groups, decisions
from te_inductor.errors import StateError
from te_inductor.recipes import DelayedScaling
from te_inductor.runtime.state import state_inputs
from te_inductor.runtime.state.state_inputs import StateInputs
from tests import uncompiled
from tests.backend.parallel_ranks import Rank, off
from tests.ranks import how
from tests.support.parallel_layers import (
    BATCH,
    HIDDEN,
    LENGTH,
    OWN_AND_SHARED,
    SEQUENCE,
    WIDTH,
    Mlp,
    Outer,
    OwnAndShared,
)


class Pair(nn.Module):
    """Two layers, for cases that compile them often."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


PAIR = {name: SEQUENCE[name] for name in ("up", "down")}


def masked(rank: Rank) -> Any:
    """All tokens of the last rank are left out of the loss in the first steps: there the layer of its own has no
    gradient, and no history. That rank also compiles anew, alone, before all have history and behind that. How far each
    step is from high precision, and collectives of each graph."""
    model = OwnAndShared()
    exact = copy.deepcopy(model)
    for which in (model, exact):
        parallelize_module(which, rank.mesh, OWN_AND_SHARED)
    recipe = DelayedScaling(amax_history_len=4)
    run, each = rank.te(model, recipe=recipe, fallback="silent", dynamic=False), []
    last = rank.rank == rank.world - 1
    for step in range(6):
        torch.manual_seed(step * rank.world + rank.rank)
        rows = torch.randn(16 * (1 + last * (step > 0) + last * (step > 4)), WIDTH)
        x, dy = torch.randn(LENGTH, WIDTH), torch.randn(LENGTH, WIDTH) * 1e-7 * (step > 2 or not last)
        found, known = (rank.step(functools.partial(f, rows=rows), m, x, dy) for f, m in ((run, model), (exact, exact)))
        each.append(max(off(*pair) for pair in zip(found, known, strict=True) if pair[1].any()))
    return {"off": each, "wire": [len(graph) for graph in rank.graphs]}


def first_step(rank: Rank, *may: str) -> Any:
    """A first step under delayed scaling, which the last rank may or may not interpret: how many graphs were interpreted
    and how many compiled in it, and what it and the next step gave."""
    from te_inductor import lowerings
    from te_inductor.passes.graph import interpreted

    model = Pair()
    parallelize_module(model, rank.mesh, PAIR)
    x, dy = (rank.part(torch.randn(BATCH, LENGTH, WIDTH), 1) for _ in range(2))
    run, graphs = rank.te(model, recipe=DelayedScaling(amax_history_len=4)), {"interpreted": 0, "compiled": 0}

    def counted(kind: str, function: Any) -> Any:
        def run(*given: Any, **more: Any) -> Any:
            graphs[kind] += 1
            return function(*given, **more)

        return run

    def compile_fx(gm: Any, inputs: Any, patches: Any, name: Any, around: Any) -> Any:
        return uncompiled.compile_fx(gm, inputs, patches, around=lambda inner: around(counted("compiled", inner)))

    with (
        mock.patch.object(compat, "compile_fx", compile_fx),
        mock.patch.object(lowerings, "install", lambda *_, **__: lambda inner: inner),  # of generated code
        mock.patch.object(interpreted, "Interpreted", counted("interpreted", interpreted.Interpreted)),
        mock.patch.object(interpreted, "fits", lambda _: may == ("may",) or rank.rank < rank.world - 1),
    ):
        found = [rank.step(run, model, x, dy) for _ in range(2)]
    return {"graphs": graphs, "found": [one.flatten().tolist() for step in found for one in step]}


def cached_first_step(rank: Rank) -> Any:
    """First steps of models alike, the first of which fills AOTAutograd's cache: the last rank then finds the graph too,
    has no cache, or may not interpret what it finds. How many graphs each found there and interpreted anew, and what it
    gave, but for the last, whose code does nothing."""
    from torch._dynamo.utils import counters
    from torch._functorch import config
    from torch._inductor.async_compile import AsyncCompile

    from te_inductor.passes.graph import interpreted

    is_last, make = rank.rank == rank.world - 1, interpreted.Interpreted.__init__
    x, dy = (rank.part(torch.randn(BATCH, LENGTH, WIDTH), 1) for _ in range(2))
    found: list[Any] = []
    for last in ("fills", "finds", "without a cache", "must not"):
        torch._dynamo.reset()
        counters.clear()
        world = agreement.current()
        assert world is not None
        world.interpreted.clear()  # as in a new process
        torch.manual_seed(0)
        model = Pair()
        parallelize_module(model, rank.mesh, PAIR)
        run = rank.te(model, recipe=DelayedScaling(amax_history_len=4))
        with (
            mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": f"{rank.folder}/caches{rank.rank}"}),
            config.patch(enable_autograd_cache=not (is_last and last == "without a cache")),
            mock.patch.object(interpreted, "fits", lambda _, may=last != "must not" or not is_last: may),
            mock.patch.object(interpreted.Interpreted, "__init__", autospec=True, side_effect=make) as anew,
            # Code is written and does nothing: of later steps, and of the first where one rank must not interpret it.
            mock.patch.object(AsyncCompile, "cpp_pybinding", lambda *_: lambda *tensors: None),
        ):
            gave = [one.flatten().tolist() for one in rank.step(run, model, x, dy)]
        hits = counters["aot_autograd"]["autograd_cache_hit"]
        found.append({"hits": hits, "anew": anew.call_count, "gave": gave})
    return found


def agree(rank: Rank) -> Any:
    """Whether ranks interpret first steps of layers that the last one could not compile, and of others."""
    groups = [amax_groups.of_process_group(dist.group.WORLD)]
    if rank.rank == rank.world - 1:
        decisions.interpret_none("layers", groups)
    return [decisions.all_interpret(layers, groups, True) for layers in ("layers", "others", "layers")]


def many_first_steps(rank: Rank) -> Any:
    """Forwards without a backward, which leave gradients without history. The last rank compiles anew, alone, before first
    steps are many. Of each compile, whether they were."""
    model, found = OwnAndShared(), list[bool]()
    parallelize_module(model, rank.mesh, OWN_AND_SHARED)
    run = rank.te(model, recipe="delayed", fallback="silent", dynamic=False)
    count = StateInputs.count_first_steps

    def counting(self: StateInputs, graph: Any, first: Any, many: bool) -> Any:
        found.append(many)
        return count(self, graph, first, many)

    last = rank.rank == rank.world - 1
    with mock.patch.object(StateInputs, "count_first_steps", counting):
        for step in range(state_inputs.FEW_CALLS + 3):
            run(torch.randn(LENGTH, WIDTH), torch.randn(16 * (1 + last * (step > 2)), WIDTH))
    return found


@how(patience=10, loses_group=True)
def loads(rank: Rank) -> Any:
    """The last rank alone loads state, without history."""
    model, x = OwnAndShared(), torch.randn(LENGTH, WIDTH)
    parallelize_module(model, rank.mesh, OWN_AND_SHARED)
    run = rank.te(model, recipe="delayed", fallback="silent")
    empty = te_inductor.state_dict(model)
    for _ in range(3):
        run(x, x).sum().backward()
        empty = empty or {
            name: torch.ones_like(t) * name.endswith("scale") for name, t in te_inductor.state_dict(model).items()
        }
    if rank.rank == rank.world - 1:
        te_inductor.load_state_dict(model, empty)
    return _failed(lambda: run(x, x))


@how(patience=10, loses_group=True)
def other_length(rank: Rank, recipe: str) -> Any:
    """One rank has another sequence length, in a graph of its own."""
    model = Outer(Mlp())
    parallelize_module(model.layers[0], rank.mesh, SEQUENCE)
    return _failed(
        lambda: (
            rank.te(model, recipe=recipe, dynamic=False)(torch.randn(BATCH, 8 * (1 + rank.rank), WIDTH))
            .sum()
            .backward()
        )
    )


@how(patience=10, loses_group=True)
def raises(rank: Rank, recipe: str) -> Any:
    """One rank's backward raises before the layers'."""
    model = Outer(Mlp())
    parallelize_module(model.layers[0], rank.mesh, SEQUENCE)
    y = rank.te(model, recipe=recipe)(torch.randn(BATCH, 8, WIDTH))

    def backward() -> None:
        if rank.rank:
            raise ValueError("of the user")
        y.sum().backward()

    return _failed(backward)


def decides(rank: Rank) -> Any:
    """The second rank has other options than the first. Nothing runs behind the compile."""

    def ran(*_: Any) -> Any:
        raise ValueError("ran")

    told = []
    for recipes in (("current", "current"), ("current", "delayed"), ("none", "current")):
        torch._dynamo.reset()
        model = Outer(Mlp())
        parallelize_module(model.layers[0], rank.mesh, SEQUENCE)
        if rank.rank:
            dist.barrier()
        with mock.patch.object(compat, "compile_fx", lambda *_: ran):
            try:
                rank.te(model, recipe=recipes[rank.rank], fallback="silent")(torch.randn(BATCH, 16, WIDTH))
            except Exception as error:
                told.append(f"{type(error).__name__}: {error}")
        if not rank.rank:
            dist.barrier()
    return told


class Breaks(Mlp):
    breaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.gate(self.norm(x)).relu()
        if self.breaks:
            torch._dynamo.graph_break()
        return self.down(x)


@how(traced=False)
def breaks(rank: Rank, alone: str) -> Any:
    """What ranks are told that break a graph under delayed scaling: all of them, or the first one "alone"."""
    model = Breaks()
    parallelize_module(model, rank.mesh, {"gate": ColwiseParallel(), "down": RowwiseParallel()})
    options = {"recipe": "delayed", "fallback": "silent", "policy": {"*": "delayed"}}
    run, x = torch.compile(model, backend="te", options=options), torch.randn(BATCH, 16, WIDTH)
    run(x).sum().backward()
    if alone and rank.rank:
        dist.barrier()
        return ""
    model.breaks = True
    try:
        with mock.patch.object(agreement, "PATIENCE", 0.5 if alone else 60.0):
            run(x).sum().backward()
        return ""
    except Exception as error:
        return str(error)
    finally:
        if alone:
            dist.barrier()


@how(traced=False)
def changes(rank: Rank, alone: str) -> Any:
    """What ranks are told that come to run their layers in high precision, behind some in low precision: all of them, or
    the first one "alone"."""
    model = Outer(Mlp())
    parallelize_module(model.layers[0], rank.mesh, SEQUENCE)
    run, x = rank.te(model, recipe="current", fallback="silent"), torch.randn(BATCH, 16, WIDTH)
    run(x)
    if alone and rank.rank:
        dist.barrier()
        return ""
    try:
        with mock.patch.object(agreement, "PATIENCE", 0.5), te_inductor.autocast(enabled=False):
            run(x)
        return ""
    except Exception as error:
        return str(error)
    finally:
        if alone:
            dist.barrier()


@how(traced=False)
def loads_other(rank: Rank) -> Any:
    """What ranks are told that have loaded other scales than each other."""
    model, x = OwnAndShared(), torch.randn(LENGTH, WIDTH)
    parallelize_module(model, rank.mesh, OWN_AND_SHARED)
    run = rank.te(model, recipe=DelayedScaling(amax_history_len=4), fallback="silent")
    for _ in range(2):
        run(x, x).sum().backward()
    state = te_inductor.state_dict(model)
    te_inductor.load_state_dict(model, state)  # which differs where layers are each rank's own
    run(x, x).sum().backward()
    factor = 1.0 + rank.rank
    te_inductor.load_state_dict(model, {key: value * factor for key, value in state.items()})
    try:
        run(x, x)
    except StateError as error:
        return str(error)


def fails(rank: Rank) -> Any:
    """A compile that fails on all ranks, and on the last one alone. Nothing runs behind the compile but the graph as the
    user wrote it."""
    told = []
    for alone in (False, True):
        torch._dynamo.reset()
        model, x = Outer(Mlp()), torch.randn(BATCH, 16, WIDTH)
        parallelize_module(model.layers[0], rank.mesh, SEQUENCE)

        def compile_fx(gm: fx.GraphModule, *_: Any, alone: bool = alone) -> Any:
            rewritten = bool(gm.graph.find_nodes(op="call_function", target=ops.layers))
            if rewritten and not (alone and rank.rank == 0):
                raise ValueError("of the test")
            return (lambda *_: _ran()) if rewritten else gm.forward

        if alone and rank.rank:
            dist.barrier()
        with mock.patch.object(compat, "compile_fx", compile_fx):
            try:
                rank.te(model, recipe="current", fallback="silent")(x)
                told.append("")
            except Exception as error:
                told.append(f"{type(error).__name__}: {error}")
        if alone and not rank.rank:
            dist.barrier()
    return told


def _ran() -> Any:
    raise ValueError("ran")


def _failed(run: Callable[[], None]) -> Any:
    """What is raised, and how long it took."""
    begun = time.monotonic()
    try:
        run()
    except Exception as error:
        return [type(error).__name__, time.monotonic() - begun]
    return ["", time.monotonic() - begun]
