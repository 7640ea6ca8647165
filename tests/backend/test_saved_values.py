"""What a forward saves in E4M3 under option `saved`, and what stays as it is: of small functions, without Dynamo, as the
graphs that AOTAutograd and the partitioner make."""

import pytest
import torch
import torch.nn.functional as F
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._inductor.decomposition import select_decomp_table

from te_inductor.passes.joint.low_precision_saves import LOW, SavingPartitioner
from te_inductor.presentation.report import SavedSite

ROWS, COLUMNS = 32, 256
LARGE = ROWS * COLUMNS


def compiled(function, dynamic=False, saved=LOW):
    """The function, whose forward saves low, and the rows that it tells of; its graphs run node by node."""
    rows: list[SavedSite] = []
    partitioner = SavingPartitioner(None, (("*", saved),), rows.extend)
    compile = lambda gm, _: make_boxed_func(gm.forward)  # noqa: E731
    run = aot_function(
        function, compile, partition_fn=partitioner, decompositions=select_decomp_table(), dynamic=dynamic
    )
    return run, rows


def between(f):
    """A function of a matrix's product, whose result another product reads."""
    return lambda x, w, v: f(x @ w) @ v


def operands(columns=COLUMNS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = (ROWS, 64), (64, columns), (columns, 16)
    made = (torch.randn(shape, generator=generator, dtype=torch.float64) / 4 for shape in shapes)
    return [x.to(dtype).requires_grad_() for x in made]


def gradients(run, inputs):
    return torch.autograd.grad(run(*inputs).square().sum(), inputs)


class SiluByReciprocal(torch.autograd.Function):
    """SiLU with the backward that torch 2.11 decomposes it into."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        sigmoid = 1 / (1 + torch.exp(-x))
        return grad * sigmoid * (1 + x * (1 - sigmoid))


class LayerNorm(torch.autograd.Function):
    """LayerNorm of 16 bits, with the backward that torch decomposes it into for a GPU: it begins with a copy."""

    @staticmethod
    def forward(ctx, x):
        wide = x.float()
        variance, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
        rstd = (variance + 1e-5).rsqrt()
        ctx.save_for_backward(x, mean, rstd)
        return ((wide - mean) * rstd).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, mean, rstd = ctx.saved_tensors
        normal = (x.to(torch.float32, memory_format=torch.contiguous_format) - mean) * rstd
        wide, size = grad.float(), grad.shape[-1]
        total, along = wide.sum(-1, keepdim=True), (wide * normal).sum(-1, keepdim=True)
        return (rstd / size * (wide * size - total - normal * along)).to(x.dtype)


class Chosen(torch.autograd.Function):
    """SiLU's rows in another order, of which the backward takes those that it reads, as experts' rows are."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.silu(x)[order()]

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x[order()]
        sigmoid = x.sigmoid()
        return torch.empty_like(grad).index_put((order(),), grad * sigmoid * (1 + x * (1 - sigmoid)))


def clamped_swiglu(gate, up):
    """gpt-oss': the gate is clamped from above, what it meets from both sides."""
    gate, up = gate.clamp(max=1.0), up.clamp(-1.0, 1.0)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


def order():
    return torch.arange(ROWS) ^ 5


def by_mask(shape, size, where=lambda mask, x: torch.where(mask, x, 0)):
    """A product with what a mask leaves of a value, whose shape the mask is."""
    return lambda x: F.silu(x) * where((torch.arange(size) % 3 > 0).view(shape), x)


CAST = {
    "rows by an index": Chosen.apply,
    "rows by a mask": by_mask((-1, 1), ROWS),
    "rows by a mask's other side": by_mask((-1, 1), ROWS, lambda mask, x: torch.where(mask, torch.zeros_like(x), x)),
    "rows of halves by a mask": lambda x: by_mask((-1, 1), ROWS)(x[:, : COLUMNS // 2]).repeat(1, 2),
    "silu": F.silu,
    "silu by a reciprocal": SiluByReciprocal.apply,
    "swiglu by a reciprocal": lambda x: SiluByReciprocal.apply(x[:, : COLUMNS // 2]) * x[:, COLUMNS // 2 :],
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "squared relu": lambda x: F.relu(x).square(),
    "a cube of relu": lambda x: F.relu(x) ** 3,
    "relu by itself": lambda x: F.relu(x) * F.relu(x),
    "squared relu, viewed": lambda x: F.relu(x.view(2, -1, COLUMNS)).square().view(ROWS, COLUMNS),
    "a cube": lambda x: x**3,
    "of a rounding": lambda x: x.mul(8).round() * x,
    "swiglu": lambda x: F.silu(x[:, : COLUMNS // 2]) * x[:, COLUMNS // 2 :].repeat(1, 1),
    "swiglu, clamped": lambda x: clamped_swiglu(*(4 * x).split(COLUMNS // 2, -1)),
    "swiglu, clamped, in turns": lambda x: clamped_swiglu(4 * x[:, ::2], 4 * x[:, 1::2]),
    "swiglu of relu": lambda x: F.relu(x[:, ::2]) * x[:, 1::2],
    "swiglu of a gate alone": lambda x: torch.sigmoid(x[:, : COLUMNS // 2]) * x[:, COLUMNS // 2 :],
    "swiglu of gelu": lambda x: F.gelu(x[:, ::2], approximate="tanh") * x[:, 1::2],
    "a soft cap": lambda x: 3 * torch.tanh(x / 3),
    "squared relu, and relu": lambda x: F.relu(x).square() + F.relu(x),
    "a squared mask of its own": lambda x: torch.where(x > 0, x.square(), 0),
    "leaky relu": lambda x: F.leaky_relu(x, 0.1) * x,
    "relu of six": lambda x: F.relu6(4 * x) * F.relu6(4 * x),
    "the largest": lambda x: x.amax(-1, keepdim=True) * x,
    "permuted": lambda x: F.silu(x.view(ROWS, 2, -1).transpose(0, 1)).transpose(0, 1).reshape(ROWS, -1),
}


@pytest.mark.parametrize("name", CAST)
def test_what_pointwise_functions_read_is_cast(name):
    """The forward has the bits that it has without; gradients are off by a rounding to E4M3 of what they read."""
    x, w, v = operands()
    v = v[: COLUMNS // 2].detach().requires_grad_() if name.startswith("swiglu") else v
    function = between(CAST[name])
    (run, rows), (high, _) = compiled(function), compiled(function, saved="high_precision")
    assert torch.equal(run(x, w, v), high(x, w, v))
    assert any(row.reason is None and row.bytes_after < 0.3 * row.bytes_before for row in rows), rows
    for ours, theirs in zip(gradients(run, (x, w, v)), gradients(function, (x, w, v)), strict=True):
        assert (ours - theirs).norm() < 2**-4 * theirs.norm()


REFUSED = {  # and by which operator of the backward
    "a product": (lambda x: x @ torch.ones(COLUMNS, COLUMNS), lambda x: x, "mm"),
    "a magnitude": (torch.abs, None, "abs|sign|sgn"),
    "clamped": (lambda x: x.clamp(-1, 1), None, "clamp|ge|le"),
    "a logarithm": (lambda x: (x * x + 0.1).log(), None, "log|add"),
    "a root": (lambda x: (x * x + 0.1).sqrt(), None, "sqrt"),
    "a reciprocal": (lambda x: 1 / x, None, "reciprocal|div"),
    "a sine": (lambda x: (100 * x).sin(), None, "sin|cos"),
    "an exponential": (lambda x: (8 * x).exp(), None, "exp"),
    "a difference": (lambda x: (x - 1000).square(), None, "sub"),
    "softmax": (lambda x: x.softmax(-1), torch.square, "softmax|fma"),
    "elements by a mask": (by_mask((1, -1), COLUMNS), lambda x: x, "where"),
    "columns by a mask": (
        by_mask((-1, 1), COLUMNS, lambda mask, x: torch.where(mask, x.t(), 0).t()),
        lambda x: x,
        "where",
    ),
    "parts of rows by a mask": (
        by_mask((-1, 1), 2 * ROWS, lambda mask, x: torch.where(mask, x.view(2 * ROWS, -1), 0).view(ROWS, -1)),
        lambda x: x,
        "where",
    ),
    "rows by a mask of their own, of few bits": (
        lambda x: F.silu(x) * torch.where(x[:, :1] > 0, x, 0),
        lambda x: x,
        "no multiple of 128",
    ),
    "rows by a mask, of others": (
        by_mask((-1, 1), ROWS, lambda mask, x: torch.where(mask, x, 1)),
        lambda x: x,
        "where",
    ),
    "of many": (lambda x: (x.unsqueeze(0) + torch.linspace(1, 2, 4)[:, None, None]).square(), lambda x: x, "spreads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_error_would_make_another_number_is_saved_as_it_is(name):
    """Gradients are what they are without the option, bit for bit."""
    f, g, reasons = REFUSED[name]
    inputs = operands()[:2]

    def function(x, w):
        made = x @ w
        return f(made) * made if g is None else g(f(made))

    (run, rows), (high, _) = compiled(function), compiled(function, saved="high_precision")
    found, expected = gradients(run, inputs), gradients(high, inputs)
    assert all(row.reason is not None for row in rows if row.dtype != "bool"), rows
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert any(part in row.reason for row in rows for part in reasons.split("|")), (reasons, rows)


MASKED = (F.relu, F.leaky_relu, F.relu6, lambda x: F.dropout(x, 0.3), lambda x: x.T.relu().T)


@pytest.mark.parametrize("function", MASKED)
def test_masks_are_saved_as_bits(function):
    """Gradients are what they are without the option, bit for bit: a sixteenth of 16 bits is saved, where nothing else
    reads the value."""
    inputs = operands(dtype=torch.bfloat16)[:2]
    found = []
    for saved in (LOW, "high_precision"):
        run, rows = compiled(lambda x, w: function(x @ w).cumsum(0), saved=saved)
        torch.manual_seed(0)
        found.append(gradients(run, inputs))
        [mask] = [row for row in rows if row.dtype == "bool"]
        assert (mask.bytes_before, mask.bytes_after) == (LARGE, LARGE // 8 if saved == LOW else LARGE)
    assert all(map(torch.equal, *found))


def test_what_a_clamp_leaves_out_may_be_infinite():
    """The clamped value is cast, so that neighbours of what is infinite keep their gradients."""
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.randn(ROWS, COLUMNS, generator=generator)
    x[3, 5], x[4, 6] = torch.inf, -torch.inf
    given = torch.zeros(ROWS, COLUMNS, requires_grad=True)
    function = lambda given, x: clamped_swiglu((given + x)[:, ::2].clamp(min=-9), (given + x)[:, 1::2])  # noqa: E731
    run, rows = compiled(function)
    [ours], [theirs] = (torch.autograd.grad(one(given, x).sum(), [given]) for one in (run, function))
    assert any(row.reason is None for row in rows), rows
    assert ours.isfinite().all() and torch.equal(ours == 0, theirs == 0)


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("norm", [LayerNorm.apply, lambda x: F.layer_norm(x, x.shape[-1:])], ids=["GPU", "CPU"])
def test_layer_norms_of_16_bits(norm, offset):
    """The difference from the mean is saved, however large the mean, also where its output is computed again; on a CPU
    the backward alone computes it, of a mean in 16 bits."""
    x, w, v = operands(dtype=torch.bfloat16)
    run, rows = compiled(lambda x, w, v: norm(x @ w + offset) @ v)
    found = gradients(run, (x, w, v))
    assert any(row.reason is None and row.shape == (ROWS, COLUMNS) for row in rows), rows
    expected = gradients(lambda x, w, v: norm(x @ w + offset) @ v, (x, w, v))
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() < 2**-4 * theirs.norm()


def test_infinities_and_tiny_rows():
    """What is infinite or NaN makes gradients NaN, as GradScaler looks for; rows of zeros and of numbers below all
    scales make none."""
    run, rows = compiled(lambda x, w, added: F.silu(x @ w + added))
    x, w = torch.zeros(8, 4), torch.zeros(4, COLUMNS)
    added = torch.randn(8, COLUMNS)
    added[0], added[1], added[2, 3], added[3, 200], added[4] = 0.0, 1e-38, torch.inf, torch.nan, 1e-45
    inputs = [one.requires_grad_() for one in (x, w, added)]
    found = torch.autograd.grad(run(*inputs).sum(), inputs)[-1]
    assert any(row.reason is None for row in rows)
    assert found.isnan().any(1).tolist() == [False, False, True, True, False, False, False, False]
    assert torch.allclose(found[[0, 1, 4]], torch.full((3, COLUMNS), 0.5))


def test_what_is_returned_or_shares_memory_stays():
    def returned(x, w):
        made = x @ w
        return F.silu(made).sum(), made

    def partly(x, w, v):  # the second half is read by a product
        first, second, _ = (x @ w).split((64, 128, 64), -1)
        return F.silu(first), second @ v[:128]

    for function, reason in ((returned, "the graph returns it"), (partly, "another part of its memory")):
        run, rows = compiled(function)
        inputs = operands()[: 2 if function is returned else 3]
        sum(one.sum() for one in run(*inputs)).backward()
        assert all(row.reason is not None for row in rows)
        assert any(reason in row.reason for row in rows), rows


def test_rows_that_are_no_multiple_of_a_block():
    """Blocks at the end of a row are shorter: 200 values take 256 bytes. Of 40 there is nothing to gain."""
    for columns, cast in ((200, True), (40, False)):
        run, rows = compiled(lambda x, w, v: F.silu(x @ w) @ v)
        gradients(run, operands(columns, torch.bfloat16))
        assert any(row.reason is None for row in rows) is cast, rows


def test_sizes_that_are_not_known_before_it_runs():
    """Rows may be any number; blocks of 128 are cut of a last dimension that is known."""

    def function(x, w, v):
        return F.silu(x @ w) @ v

    run, rows = compiled(function, dynamic=True)
    gradients(run, operands())
    assert any("last dimension" in str(row.reason) for row in rows), rows


def test_a_second_backward_is_refused():
    run, _ = compiled(between(F.silu))
    inputs = operands()
    first = torch.autograd.grad(run(*inputs).square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        sum(one.sum() for one in first).backward()
