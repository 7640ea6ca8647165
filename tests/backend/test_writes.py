"""Programs that write in place into what our passes recognise (tests/writes.py): random ones, and what finds the writes.

``make test`` checks a few random programs and ``make test-all`` more, always the same; ``make fuzz`` as many as ``--cases``
says."""

import pytest
import torch
from hypothesis import HealthCheck, given, reject, seed, settings
from torch import fx

from te_inductor import compat
from te_inductor.passes.graph.operators import name
from te_inductor.passes.graph.writes import DynamoWrites
from tests import uncompiled, writes
from tests.writes import DIM, TOKENS, Case, Program, Write

pytestmark = pytest.mark.usefixtures("without_codegen")

PARTS = 20  # which workers of pytest-xdist share; make test checks one


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.thorough) for part in range(1, PARTS))])
def test_random_programs(part, request):
    @seed(request.config.getoption("--seed") * PARTS + part)
    @settings(
        max_examples=request.config.getoption("--cases") // PARTS,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(writes.cases)
    def run(case):
        try:
            writes.check(case)
        except writes.NotLegal:
            reject()

    run()


UNPLACED = ("data", "custom op")  # which count in a version of their own, or perhaps not


@pytest.mark.parametrize("form", writes.FORMS)
def test_where_a_write_stands(form):
    """A write stands between the sine's result and what reads it, and not elsewhere; where that is not known, at all
    places."""
    graphs: list[fx.GraphModule] = []

    def program(x):
        y = x.sin()
        z = y.cos()
        writes.FORMS[form](y, z)
        return y.tan() + z.exp()

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    torch.compile(program, backend=backend, fullgraph=True)(torch.randn(4, 4))
    found = DynamoWrites(graphs[0].graph)
    of = {name(node): node for node in graphs[0].graph.nodes}
    assert found.between([of["sin"]], of["cos"], of["tan"]) and found.anywhere(of["sin"])
    assert found.between([of["sin"]], of["sin"], of["cos"]) == (form in UNPLACED)
    assert found.between([of["sin"]], of["tan"], of["exp"]) == (form in UNPLACED)
    assert not found.between([of["sin"]], of["tan"], of["tan"])
    assert not found.between([of["cos"]], of["sin"], of["exp"]) and not found.anywhere(of["cos"])


@pytest.mark.parametrize("pattern", writes.PATTERNS)
def test_patterns_are_recognised(pattern, monkeypatch):
    """Patterns are recognised where nothing is written, in each way to run a program; else the random ones would say
    nothing."""
    ops = {
        "back": ("permute_rows", "layers"),
        "sums": ("sum_rows", "layers"),
        "one input": ("layers",),
    }
    graphs: list[fx.GraphModule] = []

    def compile_fx(gm, *rest):
        graphs.append(gm)
        return uncompiled.compile_fx(gm, *rest)

    monkeypatch.setattr(compat, "compile_fx", compile_fx)
    for variant in range(3):
        writes.check(Case(pattern, variant, mode="train"))
    called = {str(node.target) for gm in graphs for node in gm.graph.nodes}
    assert {f"te_inductor.{op}.default" for op in ops[pattern]} <= called


FOUND = [
    Case("back", 4194882, (Write(3, 4, "out"), Write(6, 0, "data", moves=True)), "current"),
    Case("sums", 3822283, (Write(10, 4, "set some", moves=True),), "current"),
    Case("one input", 3088481, (Write(2, 4, "list"),)),
    Case("sums", 634547, (Write(9, 3, "copy_", moves=True),), mode="no_grad"),
    Case("back", 766208, (Write(11, 2, "copy_"),)),
    Case("back", 14954153, (Write(1, 3, "half of it", moves=True),), "current", "traced"),
]


@pytest.mark.parametrize("case", FOUND, ids=str)
def test_programs_that_were_wrong(case):
    """Such programs were wrong when only the nodes were looked at."""
    writes.check(case)


def test_views_of_an_einsum():
    """An einsum stands in the graph as a layer: who reads its result by strides is seen all the same."""

    def program(m, x):
        y, z = (torch.einsum("...d,fd->...f", x, layer.weight) for layer in m.layers[:2])
        return torch.cat([y.as_strided((4, DIM), (2 * DIM, 1)), z])

    model, x = Program(Case("one input")), torch.randint(-3, 4, (TOKENS, DIM)).float()
    options = {"recipe": writes.RECIPES["current"], "policy": {"*": writes.RECIPES["current"]}}
    with torch.no_grad():
        found = torch.compile(lambda x: program(model, x), backend="te", fullgraph=True, options=options)(x)
        assert torch.equal(found, program(model, x))
