"""`te_inductor.autocast` in programs: bodies of graphs, graph breaks, exceptions, threads, tasks, generators."""

import asyncio
import threading

import pytest
import torch
from torch import nn
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from te_inductor import autocast, explain
from te_inductor.backend import parse, run_passes
from te_inductor.errors import FallbackWarning, RecipeError
from te_inductor.passes.pre_grad import DECIDE
from te_inductor.passes.pre_grad.plan import Plan
from te_inductor.recipes import regions
from tests.backend.autocast_programs import Checkpointed, Within, X, chosen, compiles, layer, same, step, te
from tests.recipes import every_stateless_recipe, strict

pytestmark = pytest.mark.usefixtures("without_tracing")


@pytest.fixture(autouse=True)
def no_compiles_yet():
    counters.clear()


@pytest.mark.quick("current", "nvfp4")
@every_stateless_recipe  # delayed scaling records once more: test_delayed_backward.py
def test_checkpoints(name):
    """A region in the body of a checkpoint, and around it: recomputed as it was."""
    model, x = layer(), torch.randn(X)
    allowed = {"fallback": strict(name)}
    expected = step(model, x, recipe=name, **allowed)
    assert same(step(Checkpointed(Within(model, recipe=name)), x, recipe="none", **allowed), expected)
    assert same(step(Within(Checkpointed(model), recipe=name), x, recipe="none", **allowed), expected)
    nested = Within(Checkpointed(Within(Checkpointed(model), recipe=name)), enabled=False)
    assert same(step(nested, x, recipe="none", **allowed), expected)


def test_one_body_in_two_regions_is_refused():
    model = layer()

    @torch.compiler.nested_compile_region
    def body(x):
        return model(x)

    def function(x):
        with autocast(enabled=False):
            y = body(x)
        with autocast(recipe="rowwise"):
            return y + body(x)

    sites = explain(function, torch.randn(X)).sites
    assert {site.kernel for site in sites} == {"high_precision"}
    assert "one body is called under 2 different autocasts" in sites[0].reason


def test_a_graph_cut_in_pieces():
    """The graph is cut as DistributedDataParallel does it, between its buckets: here each layer is a bucket, and a
    piece."""
    found = []

    def backend(gm, inputs):
        plan = Plan(gm, parse(None, {}), inputs)
        found.append([site.recipe for site in run_passes(plan, DECIDE).sites if site.gemm == "fprop"])
        return gm.forward

    inner = Within(
        nn.Sequential(layer(), Within(nn.Sequential(layer(), layer()), enabled=False), layer()), recipe="block"
    )
    cut = DDPOptimizer(1, backend, first_bucket_cap=1).compile_fn
    torch.compile(nn.Sequential(layer(), inner, layer()), backend=cut, fullgraph=True)(torch.randn(X))
    assert found == [["current"], ["block"], ["none"], ["none"], ["block"], ["current"]]


def test_a_checkpoint_that_nobody_compiles():
    """torch runs the function again when the backward calls, where the region around it is gone: one inside is not."""
    model, x = layer(), torch.randn(X)
    expected = step(model, x, recipe="rowwise")
    run = te(model)

    def function(x):
        with autocast(recipe="rowwise"):
            return run(x)

    x.requires_grad_()
    y = checkpoint(function, x, use_reentrant=False)
    assert same([y.detach(), *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))], expected)


def test_graph_breaks_inside_a_compiled_function():
    """All graphs of a function have the region around it."""
    model = layer()

    def function(x):
        x = model(x)
        torch._dynamo.graph_break()
        return model(x)

    expected = te(function, fullgraph=False, recipe="rowwise")(x := torch.randn(X))
    with autocast(recipe="rowwise"):
        assert chosen(function, x) == ["rowwise", "rowwise"]
        assert torch.equal(te(function, fullgraph=False)(x), expected)


def test_a_graph_break_inside_a_region():
    """torch gives up the function, and compiles what it calls; that is told, and the pieces have their region."""
    model = layer()

    def piece(x):
        return model(x) * 2

    def function(x):
        with autocast(recipe="rowwise"):
            x = piece(x)
            torch._dynamo.graph_break()
            return piece(x)

    x = torch.randn(X)
    with pytest.warns(FallbackWarning, match="because of a graph break inside the `with`"):
        y = te(function, fullgraph=False)(x)
    compiled = te(piece, recipe="rowwise")
    assert torch.equal(y, compiled(compiled(x)))
    assert regions.active() == regions.Region()


def test_exceptions_leave_regions():
    model, x = layer(), torch.randn(X)
    with pytest.raises(KeyError), autocast(recipe="block"), autocast(enabled=False):
        raise KeyError
    assert regions.active() == regions.Region()

    def function(x, fails):
        try:
            with autocast(recipe="block"):
                x = model(x)
                if fails:
                    raise ValueError
                x = model(x)
        except ValueError:
            x = model(x)
        return model(x)

    assert chosen(function, x, False) == ["block", "block", "current"]
    assert chosen(function, x, True) == ["block", "current", "current"]


def test_threads():
    """Each has its own region, for functions that others compiled too."""
    # torch 2.11's fullgraph, from several threads, leaves Dynamo with half of a program that has graph breaks.
    run, x = te(layer(), fullgraph=False), torch.randn(X)
    names, barrier, turn = ["current", "rowwise", "block", "none"], threading.Barrier(4, timeout=60), threading.Lock()
    outside, expected = run(x), {}
    for name in names:
        with autocast(recipe=name):
            expected[name] = run(x)
    assert compiles() == 5
    wrong = []

    def check(name, y, want):
        if not torch.equal(y, want):
            wrong.append(name)

    def at_once(name):
        with autocast(recipe=name):
            for _ in range(20):
                barrier.wait()
                check(name, run(x), expected[name])
        check(f"{name}, left", run(x), outside)

    def by_turns(name):
        for _ in range(5):
            with turn, autocast(recipe=name):
                check(name, run(x), expected[name])

    def start(work):
        threads = [threading.Thread(target=work, args=(name,)) for name in names]
        with autocast(recipe="rowwise"):  # of this thread alone
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    start(by_turns)
    assert wrong == [] and compiles() == 5
    start(at_once)  # Dynamo may compile again where several threads search its graphs at once: Note [Regions]
    assert wrong == []


def test_tasks_of_asyncio():
    """Each has its own region, and takes along that of who made it; a coroutine's decorator is around its body."""
    run, x = te(layer(), fullgraph=False), torch.randn(X)
    names, expected = ["rowwise", "block"], {}
    for name in names:
        with autocast(recipe=name):
            expected[name] = run(x)
    outside = run(x)

    async def work(name):
        with autocast(recipe=name):
            await asyncio.sleep(0.01 * names.index(name))
            await asyncio.sleep(0.02)
            return run(x)

    @autocast(recipe="block")
    async def decorated():
        await asyncio.sleep(0)
        return await asyncio.create_task(plain())

    async def plain():
        return run(x)

    async def together():
        return await asyncio.gather(*(work(name) for name in names), decorated(), plain())

    results = asyncio.run(together())
    for found, wanted in zip(results, [*expected.values(), expected["block"], outside], strict=True):
        assert torch.equal(found, wanted)
    assert regions.active() == regions.Region() and compiles() == 3


def test_generators_that_end_in_any_order():
    def items(recipe):
        with autocast(recipe=recipe):
            yield

    block, rowwise = items("block"), items("rowwise")
    next(block), next(rowwise)
    block.close()
    assert regions.active() == regions.Region(recipe="rowwise")
    with autocast(recipe="current"):
        rowwise.close()
        assert regions.active() == regions.Region(recipe="current")
    assert regions.active() == regions.Region()


def test_a_decorated_generator_function():
    """Its body runs when the region is over."""

    def items():
        yield

    async def items_async():
        yield

    for function in (items, items_async):
        with pytest.raises(RecipeError, match=r"decorates the generator function .*items"):
            autocast(recipe="block")(function)
