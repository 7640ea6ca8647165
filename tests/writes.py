"""Random programs that write in place into what our passes recognise: each step of a pattern is followed by a place
where any of its tensors may be written, in any way that torch has. The check of one: compiled against eager code.

All numbers are small integers, which every cast of these recipes holds exactly, so that low precision computes what high
precision does, bit for bit, and whatever is read at the wrong time is seen. A case is plain data: `check(Case(...))`.
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_inductor import lower
from te_inductor.recipes import Float8CurrentScaling, Float8RowwiseScaling, Format, QParams
from tests.experts import grouped_mm

TOKENS, EACH, EXPERTS, DIM = 12, 2, 4, 32
ROWS = TOKENS * EACH
_POWERS = QParams(power_2_scale=True)
RECIPES = {
    "rowwise": Float8RowwiseScaling(),
    "current": Float8CurrentScaling(Format.E4M3, _POWERS, _POWERS, _POWERS),
}


@torch.library.custom_op("te_inductor_tests::assign", mutates_args={"x"})
def assign(x: Tensor, y: Tensor) -> None:
    x.copy_(y)


LIBRARY = torch.library.Library("te_inductor_tests", "FRAGMENT")
LIBRARY.define("assign_all(Tensor(a!)[] xs, Tensor y) -> ()")  # nothing counts versions
LIBRARY.impl("assign_all", lambda xs, y: [x.copy_(y) for x in xs] and None, "CPU")
LIBRARY.impl("assign_all", lambda xs, y: None, "Meta")


def _set_items(x: Tensor, y: Tensor) -> None:
    x[:] = y


def _set_some(x: Tensor, y: Tensor) -> None:
    x[::2] = y[::2]


def _augment(x: Tensor, y: Tensor) -> None:
    x += y - x


def _in_a_body(x: Tensor, y: Tensor) -> None:
    def body(y: Tensor) -> Tensor:
        x.copy_(y)
        return y + 1

    checkpoint(body, y, use_reentrant=False)


# Each writes y into x.
FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copy_": lambda x, y: x.copy_(y),
    "view": lambda x, y: x.view(-1).copy_(y.reshape(-1)),
    "half of it": lambda x, y: x.chunk(2)[1].copy_(y.chunk(2)[1]),
    "set items": _set_items,
    "set some": _set_some,
    "augmented": _augment,
    "data": lambda x, y: x.data.copy_(y),
    "detach": lambda x, y: x.detach().copy_(y),
    "out": lambda x, y: torch.mul(y, 1, out=x.detach()),
    "list": lambda x, y: torch._foreach_copy_([x], [y]),
    "custom op": assign,
    "library": lambda x, y: torch.ops.te_inductor_tests.assign_all.default([x], y),
    "body": _in_a_body,
}
_MODES = ("train", "no_grad", "export", "traced")


@dataclass(frozen=True)
class Write:
    """`place` counts the places of a program, `which` the tensors there; `moves` rows, where it could negate them."""

    place: int
    which: int
    form: str
    moves: bool = False


@dataclass(frozen=True)
class Case:
    pattern: str  # of PATTERNS
    variant: int = 0
    writes: tuple[Write, ...] = ()
    recipe: str = "rowwise"
    mode: str = "train"


class Program(nn.Module):
    """A pattern with writes. Its tensors are `x` (TOKENS, DIM) and `choices` (ROWS,) of experts."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.places = case, 0
        self.looks = False  # whether the values of ends may be looked at, as of eager code

        def integers(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randint(-2, 3, shape).float())

        self.w, self.v = integers(EXPERTS, DIM, DIM), integers(EXPERTS, DIM, DIM)
        self.b = integers(EXPERTS, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        for layer in self.layers:
            layer.weight, layer.bias = integers(DIM, DIM), integers(DIM)

    def forward(self, x: Tensor, choices: Tensor) -> Tensor:
        self.places = 0
        return PATTERNS[self.case.pattern](self, x * 1, choices + 0)

    def choose(self, *variants: Any) -> Any:
        """Another of these at each place, by the case's variant."""
        return variants[(self.case.variant >> self.places) % len(variants)]

    def at(self, *tensors: Tensor) -> None:
        """A place where these may be written."""
        self.places += 1
        for write in self.case.writes:
            if write.place == self.places:
                x = tensors[write.which % len(tensors)]
                with torch.no_grad():
                    FORMS[write.form](x, _other(x, write.moves))


def _other(x: Tensor, moves: bool) -> Tensor:
    """Other values of the same kind."""
    if x.dtype == torch.int32:  # ends of groups, in order, of which the last is that of all
        return torch.cat([x[1:], x[-1:]])
    if x.is_floating_point() and not moves:
        return -x if x.dim() > 1 else x.flip(0)
    return x.flip(0) if moves else x.roll(1, 0)


def _experts(m: Program, x: Tensor, choices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of experts and their order."""
    ids, order = torch.sort(choices, stable=True)
    if m.choose(False, False, True):
        order = torch.argsort(choices, descending=m.choose(False, True), stable=True)
    m.at(ids, order)
    counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    m.at(counts, ids, order)
    ends = counts.cumsum(0, dtype=torch.int32)
    m.at(ends, counts, ids, order, x)
    index = m.choose(lambda: order // EACH, lambda: torch.div(order, EACH, rounding_mode="floor"))()
    m.at(index, order, x)
    rows = _gathered(m, x, index)
    m.at(rows, index, order, x, ends, m.w)
    if m.choose(True, False):
        mask = (ids >= EXPERTS).unsqueeze(-1)
        m.at(mask.view(torch.uint8), ids)
        rows.masked_fill_(mask, 0.0)
        m.at(rows, ids)
    w, v = m.choose(lambda: (m.w, m.v), lambda: (m.w.transpose(1, 2), m.v.transpose(1, 2)), lambda: _cast(m))()
    m.at(rows, w, ends, order, index, x)
    if m.looks and int(ends.max()) > ROWS:
        raise NotLegal  # counts that were written: rows that do not exist, which a GPU's product would read
    y = grouped_mm(rows.to(w.dtype), w, ends).float()
    m.at(y, ends, rows, order, x, v)
    if m.choose(True, False):
        y = y + grouped_mm(rows.to(v.dtype), v, ends).float()
        m.at(y, ids, ends)
    elif m.choose(True, False):
        y.add_(m.b[ids.clamp(max=EXPERTS - 1)] if m.choose(False, True) else m.b[ids])
        m.at(y, ids, m.b, ends)
    return y, order


def _cast(m: Program) -> tuple[Tensor, Tensor]:
    narrow = [w.bfloat16() for w in (m.w, m.v)]
    m.at(*narrow, m.w)
    return tuple(w.transpose(1, 2) for w in narrow)  # type: ignore[return-value]


def _gathered(m: Program, x: Tensor, index: Tensor) -> Tensor:
    if m.choose(True, False, False):
        column = index.reshape(-1, 1)
        m.at(column, index)
        return x.gather(0, column.expand(-1, DIM))
    if m.choose(True, False):
        narrow = x[index].bfloat16()
        m.at(narrow, x)
        return narrow.float()
    return m.choose(lambda: x[index], lambda: x.index_select(0, index))()  # type: ignore[no-any-return]


def _brought_back(m: Program, x: Tensor, choices: Tensor) -> Tensor:
    y, order = _experts(m, x, choices)
    if m.choose(True, False):
        back = order.argsort(descending=m.choose(False, False, True))
        m.at(back, order, y)
    else:
        back, places = torch.zeros_like(order), torch.arange(ROWS)
        m.at(places, order)
        back[order] = places
        m.at(back, order, y, places)
    y = y[back]
    m.at(y, back, order)
    return y.view(TOKENS, EACH, DIM).sum(1)


def _added_up(m: Program, x: Tensor, choices: Tensor) -> Tensor:
    y, order = _experts(m, x, choices)
    y = y * (choices % 3 - 1).float()[order].unsqueeze(-1)
    index = order // EACH
    m.at(index, order, y)
    out = torch.zeros(TOKENS, DIM)
    if m.choose(True, False):
        columns = index.reshape(-1, 1).expand(-1, DIM)
        m.at(index, order)
        return m.choose(out.scatter_add, out.scatter_add_)(0, columns, y)  # type: ignore[no-any-return]
    m.at(out, index) if m.choose(True, False, False) else None
    out = m.choose(out.index_add, out.index_add_)(0, index, y)
    m.at(out, index, order, y)
    return out


def _of_one_input(m: Program, x: Tensor, choices: Tensor) -> Tensor:
    """Layers that are one GEMM."""
    if m.choose(False, True):
        x = m.choose(lambda: x.view(2, -1, DIM), lambda: x.bfloat16().float(), lambda: x.t().contiguous().t())()
    m.at(x, m.layers[1].weight)
    ys = []
    for layer in m.layers:
        form = m.choose(layer, layer, lambda x, w=layer.weight: torch.einsum("...d,fd->...f", x, w))
        ys.append(form(x))
        m.at(x, ys[-1], *(one for other in m.layers[1:] for one in other.parameters()))
        if m.choose(False, False, True):
            ys.append(ys[-1].reshape(-1, DIM) + 1)
    return torch.cat([y.view(-1, DIM) if y.is_contiguous() else y.reshape(-1, DIM) for y in ys])


PATTERNS = {"back": _brought_back, "sums": _added_up, "one input": _of_one_input}
_writes = st.builds(Write, st.integers(1, 12), st.integers(0, 6), st.sampled_from([*FORMS]), st.booleans())
cases = st.builds(
    Case,
    pattern=st.sampled_from([*PATTERNS, "back", "sums"]),
    variant=st.integers(0, 2**24),
    writes=st.lists(_writes, min_size=1, max_size=2).map(tuple),
    recipe=st.sampled_from([*RECIPES]),
    mode=st.sampled_from(["train", "no_grad", *_MODES]),
)


class NotLegal(Exception):
    """torch itself refuses the program."""


def check(case: Case) -> None:
    """Compiled, lowered or traced, a case is what it is in eager code; or, where torch by itself differs from that, as
    where what is written through ``.data`` is read by a backward, what torch's own compiler makes of it.

    Raises:
        NotLegal: torch refuses the program.
    """
    torch._dynamo.reset()
    torch.manual_seed(case.variant)
    model = Program(case)
    x, choices = torch.randint(-3, 4, (TOKENS, DIM)).float(), torch.randint(0, EXPERTS, (ROWS,))
    try:
        expected = _results(model, x, choices, case)
    except (RuntimeError, IndexError) as refused:
        raise NotLegal from refused
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="(?s).*because a pass of ours failed")
        options = {"recipe": RECIPES[case.recipe], "policy": {"*": RECIPES[case.recipe]}, "fallback": "silent"}
        try:
            found = _results(model, x, choices, case, {**options, "fallback": "warn"})
        except torch._dynamo.exc.Unsupported as refused:
            raise NotLegal from refused
        if not _same(expected, found):
            assert _same(_results(model, x, choices, case, None), found), case


def _results(model: Program, x: Tensor, choices: Tensor, case: Case, options: Any = False) -> list[Tensor]:
    """Output, what was written, and gradients; `options` are a dict, None for torch's own compiler, or False for eager
    code."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_(case.mode in ("train", "traced"))
    model.looks = options is False
    step = _traced if case.mode == "traced" else _run
    return step(model, x, choices, case, options)


def _run(model: Program, x: Tensor, choices: Tensor, case: Case, options: Any) -> list[Tensor]:
    training = case.mode == "train"
    with torch.set_grad_enabled(training):
        run: Any = model
        if options is not False and case.mode == "export":
            try:
                program = torch.export.export(model, (x, choices), strict=False)
            except RuntimeError as refused:
                raise NotLegal from refused
            run = program.module() if options is None else lower(program, options).module()
        elif options is not False:
            backend: dict[str, Any] = (
                {"backend": "aot_eager"} if options is None else {"backend": "te", "options": options}
            )
            run = torch.compile(model, fullgraph=True, **backend)
        y = run(x, choices)
        held = run.state_dict() if run is not model and case.mode == "export" else model.state_dict()
        if training:
            (y * torch.arange(-1, 3).repeat(DIM // 4)).sum().backward()
    grads = [one.grad for one in (x, *model.parameters()) if one.grad is not None]
    return [y.detach(), *held.values(), *grads]


def _traced(model: Program, x: Tensor, choices: Tensor, case: Case, options: Any) -> list[Tensor]:
    from torch.fx.experimental.proxy_tensor import make_fx

    names = [name for name, _ in model.named_parameters()]

    def step(parameters: list[Tensor], x: Tensor, choices: Tensor) -> list[Tensor]:
        y = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (x, choices))
        loss = (y * torch.arange(-1, 3).repeat(DIM // 4)).sum()
        found = torch.autograd.grad(loss, [x, *parameters], allow_unused=True)
        return [y.detach(), *(one for one in found if one is not None)]

    given = [one.detach().clone().requires_grad_() for one in model.parameters()], x, choices
    if options is False:
        return step(*given)
    graph = make_fx(step, tracing_mode="fake")(*given)
    run = graph if options is None else lower(graph, options, parameters=names)
    with torch.no_grad():
        return list(run(*given))


def _same(expected: list[Tensor], found: list[Tensor]) -> bool:
    return len(expected) == len(found) and all(map(torch.equal, expected, found))
