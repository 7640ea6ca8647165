"""The column copies of layers' inputs that the backward casts: those of what it has anyway (recompute.py)."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from te_inductor import ops
from te_inductor.passes import joint
from te_inductor.passes.joint import recompute
from tests.passes import leave_out

pytestmark = [pytest.mark.usefixtures("no_caches"), pytest.mark.codegen]  # its decompositions, of which no code is made

SIZE = 1024  # which a norm's kernel may hold


class Marked(BaseException):
    """Raised where the partitioner would go on."""


class FusedNorm(torch.autograd.Function):
    """RMSNorm as autograd has it on CUDA: an op and its backward's, whose first steps do not depend on the gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        y, rstd = torch.ops.aten._fused_rms_norm(x, [SIZE], weight, 1e-5)
        ctx.save_for_backward(x, rstd, weight)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, rstd, weight = ctx.saved_tensors
        return torch.ops.aten._fused_rms_norm_backward(dy, x, [SIZE], rstd, weight, [True, True])


class Model(nn.Module):
    def __init__(self, before, size=SIZE) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(128, size, bias=False), nn.Linear(size, 128, bias=False)
        self.gain, self.bias = (nn.Parameter(torch.rand(size)) for _ in range(2))
        self.before = before

    def forward(self, x):
        y = self.first(x)
        z = self.before(self, y)
        beside = {RETURNED: lambda: z, tanh_beside: lambda: z.tanh()}.get(self.before)
        return self.last(z) if beside is None else (self.last(z), beside())


def attention(model, y):
    q = y.unflatten(-1, (4, -1)).transpose(0, 1)[None]
    return F.scaled_dot_product_attention(q, q, q)[0].transpose(0, 1).flatten(1)


def RETURNED(model, y):
    return y * 2


def of_several(y):
    """A sum, as a residual stream is."""
    return y + y.cumsum(0)


def tanh_beside(model, y):
    return of_several(y)


BEFORE = {
    "RMSNorm": (lambda model, y: F.rms_norm(y, model.gain.shape, model.gain), True),
    "RMSNorm as one op": (lambda model, y: FusedNorm.apply(y, model.gain), True),
    "LayerNorm": (lambda model, y: F.layer_norm(y, (SIZE,), model.gain), True),
    "LayerNorm with a bias": (lambda model, y: F.layer_norm(y, (SIZE,), model.gain, model.bias), True),
    "a gated norm": (lambda model, y: F.rms_norm(y, (SIZE,), model.gain) * F.silu(y), True),
    "attention": (attention, True),
    "SiLU": (lambda model, y: F.silu(y), True),
    "ReLU, whose mask is found again": (lambda model, y: F.relu(y), True),
    "a cut, of which a mask is kept": (lambda model, y: torch.where(y.detach() > 0.5, y * 2, 0.0), False),
    "a product": (lambda model, y: y, False),
    "a factor": (lambda model, y: y * 0.5, False),
    "what is returned, and not read": (RETURNED, False),
}


NORMS = {name for name in BEFORE if "Norm" in name} | {"a gated norm"}  # computed of one tensor, too
HAD = {name for name, (_, had) in BEFORE.items() if had}


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "block", "mxfp8"])
@pytest.mark.parametrize("name", BEFORE)
def test_what_is_cast_again(name, recipe, monkeypatch):
    """Copies with scales of blocks, which the casting kernel finds, are if the forward reads the tensor twice anyway, a
    norm's."""
    before, _ = BEFORE[name]
    again = {"delayed": HAD, "current": HAD, "block": NORMS}.get(recipe, ())
    assert marked(Model(before), recipe, monkeypatch) == [name in again, False]


@pytest.mark.parametrize(("size", "held"), [(896, False), (1088, False), (1280, True), (8192, True), (8320, False)])
def test_rows_that_a_program_holds(size, held, monkeypatch):
    """The program holds rows of whole blocks, neither short nor long; of others the backward would read the norm's
    input once more."""
    assert marked(Model(BEFORE["RMSNorm"][0], size), "block", monkeypatch) == [held, False]


@pytest.mark.parametrize(
    ("before", "again"),
    [(lambda model, y: F.layer_norm(of_several(y), (SIZE,), model.gain, model.bias), True), (tanh_beside, False)],
    ids=["LayerNorm", "tanh"],
)
def test_sums_of_several_tensors(before, again, monkeypatch):
    """The backward reads LayerNorm's input in fp32, for which bf16 is kept; tanh's output is itself kept."""
    assert marked(Model(before).bfloat16(), "delayed", monkeypatch) == [again, False]


def marked(model, recipe, monkeypatch) -> list[bool]:
    """Tells which column copies of layers' inputs the backward makes, the last layer's first."""
    mark = recompute.mark

    def spy(graph):
        mark(graph)
        gemms = [n for n in graph.find_nodes(op="call_function", target=ops.scaled_mm) if n.args[5].name == "wgrad"]
        copies = [gemm.args[2].args[0] for gemm in gemms]  # of x: the last layer's first, as the backward goes
        raise Marked(["recompute" in copy.meta for copy in copies])

    leave_out(monkeypatch, joint, mark, spy)
    x = torch.randn(32, 128, dtype=model.gain.dtype, requires_grad=True)
    with pytest.raises(Marked) as found:
        torch.compile(model, backend="te", fullgraph=True, options={"recipe": recipe})(x)
    return found.value.args[0]
