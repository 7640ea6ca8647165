"""Losses of output layers on a GPU: the kernels against plain torch, and compiled programs against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import te_inductor
from te_inductor.passes.pre_grad.loss import match
from te_inductor.recipes.formats import E4M3, E5M2
from te_inductor.recipes.losses import Loss
from te_inductor.runtime.eager import losses as eager
from tests.losses import IGNORED, error, operands, reference

pytestmark = pytest.mark.gpu

LOSSES = (
    Loss(IGNORED),
    Loss(None, smoothing=0.1),
    Loss(3, smoothing=0.1, inner=1 / 3, outer=3.0),
    Loss(IGNORED, sums=True),
    Loss(None, inner=1 / 3, outer=3.0, sums=True),
)


@pytest.mark.parametrize(("tokens", "words"), [(5, 37), (130, 200), (1, 16), (7, 513), (1000, 50257), (257, 128256)])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_do_what_plain_torch_does(tokens, words, loss, dtype):
    """Losses within fp32's sums, casts but for what these round to the other side; with NaN, infinities, ignored labels,
    outputs poisoned."""
    from te_inductor.templates.triton.token_losses import SoftmaxKernels

    torch.manual_seed(0)
    logits = (torch.randn(tokens, words, device="cuda") * 4).to(dtype)
    labels = torch.randint(0, words, (tokens,), device="cuda")
    labels[::3] = 0 if loss.ignored is None else loss.ignored
    if tokens > 4:
        for row, value in ((1, torch.nan), (2, torch.inf), (3, -torch.inf)):
            logits[row, 0] = value
    plain, kernels = eager.Softmax(), SoftmaxKernels()
    outs, sums = ([torch.full((tokens,), 7.0, device="cuda") for _ in range(2)] for _ in range(2))
    for one, out, of_rows in zip((plain, kernels), outs, sums, strict=True):
        one.losses(logits, labels, loss, out, of_rows)
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-4, equal_nan=True)
    for element in (E5M2, E4M3):
        columns = [torch.full((words, tokens + 16), 7, dtype=torch.uint8, device="cuda") for _ in range(2)]
        views = [one.view(element.dtype)[:, 16:] for one in columns]
        rows = [
            one.copies(logits, labels, loss, sums[0], element, True, view)
            for one, view in zip((plain, kernels), views, strict=True)
        ]
        for one, other in (rows, views):
            steps = (one.view(torch.int8).int() - other.view(torch.int8).int()).abs()
            steps = torch.where(one.float().isnan() & other.float().isnan() | (one.float() == other.float()), 0, steps)
            assert steps.max() <= 1
            assert (steps > 0).float().mean() <= 1e-2
        assert all(one[:, :16].eq(7).all() for one in columns)
    copies = [logits.clone() for _ in range(2)]
    for one, copy in zip((plain, kernels), copies, strict=True):
        one.gradients(copy, labels, loss, sums[0])
    torch.testing.assert_close(copies[1], copies[0], rtol=1e-2, atol=1e-5, equal_nan=True)


def test_a_label_outside_of_the_vocabulary_is_not_a_number():
    from te_inductor.templates.triton.token_losses import SoftmaxKernels

    logits, labels = torch.randn(4, 64, device="cuda"), torch.tensor([0, 64, -5, 63], device="cuda")
    out, sums = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    SoftmaxKernels().losses(logits, labels, LOSSES[0], out, sums)
    SoftmaxKernels().gradients(logits, labels, LOSSES[0], sums)
    assert out.isnan().tolist() == logits.isnan().all(1).tolist() == [False, True, True, False]


class Head(nn.Module):
    def __init__(self, width, words, bias):
        super().__init__()
        self.head = nn.Linear(width, words, bias=bias, dtype=torch.bfloat16, device="cuda")

    def forward(self, x, labels, z_loss=0.0):
        logits = self.head(x)
        loss = F.cross_entropy(logits.float(), labels)
        return loss + z_loss * logits.float().logsumexp(-1).square().mean() if z_loss else loss, logits


@pytest.mark.parametrize("recipe", ["none", "current", "delayed", "rowwise", "block"])
@pytest.mark.parametrize(
    ("tokens", "width", "words", "bias"),
    [(2048, 1024, 32000, False), (1000, 512, 50257, True), (129, 256, 262144, False)],
)
def test_compiled_losses_are_those_of_float64(recipe, tokens, width, words, bias, monkeypatch):
    monkeypatch.setattr(match, "LEAST_WORDS", 0)
    torch.manual_seed(0)
    x, weight, bias_values, labels = operands(tokens, width, words, torch.bfloat16, "cuda", bias)
    model = Head(width, words, bias)
    with torch.no_grad():
        model.head.weight.copy_(weight)
        if bias_values is not None:
            model.head.bias.copy_(bias_values)
    options = {"recipe": "none", "policy": {"*": recipe}, "logits": "omit"}
    compiled = torch.compile(model, backend="te", options=options)
    x.requires_grad_()
    for _ in range(2):  # `delayed` has a history in the second
        for one in (x, *model.parameters()):
            one.grad = None
        loss, logits = compiled(x, labels)
        loss.backward()
    assert type(logits).__name__ == "OmittedLogits"
    wide = [one.detach().double().requires_grad_() for one in (x, *model.parameters())]
    wanted = (
        reference(wide[0], wide[1], wide[2] if bias else None, labels, Loss(IGNORED)).sum() / (labels != IGNORED).sum()
    )
    wanted.backward()
    bound = 2**-6 if recipe == "none" else 0.075
    assert abs(loss.double() - wanted) <= 0.01 * wanted
    for one, other in zip((x, *model.parameters()), wide, strict=True):
        assert error(one.grad, other.grad) <= bound


@pytest.mark.parametrize("recipe", ["none", "current", "delayed", "rowwise", "block"])
def test_a_z_loss_is_that_of_float64(recipe):
    torch.manual_seed(0)
    x, weight, _, labels = operands(2048, 1024, 32000, torch.bfloat16, "cuda")
    model = Head(1024, 32000, False)
    with torch.no_grad():
        model.head.weight.copy_(weight)
    options = {"recipe": "none", "policy": {"*": recipe}, "logits": "omit"}
    compiled = torch.compile(model, backend="te", options=options)
    given = [x.requires_grad_(), model.head.weight]
    for _ in range(2):
        for one in given:
            one.grad = None
        loss, logits = compiled(x, labels, 0.01)
        loss.backward()
    assert type(logits).__name__ == "OmittedLogits"
    wide = [one.detach().double().requires_grad_() for one in given]
    exact = F.linear(*wide)
    wanted = F.cross_entropy(exact, labels, ignore_index=IGNORED) + 0.01 * exact.logsumexp(-1).square().mean()
    wanted.backward()
    assert abs(loss.double() - wanted) <= 0.01 * wanted
    for one, other in zip(given, wide, strict=True):
        assert error(one.grad, other.grad) <= (2**-6 if recipe == "none" else 0.075)


def test_cuda_graphs_and_memory(monkeypatch):
    """A step in CUDA graphs has the same gradients, and a step takes less than the logits and the gradient of the weight in
    bf16."""
    torch.manual_seed(0)
    x, _, _, labels = operands(4096, 512, 65536, torch.bfloat16, "cuda")
    found = []
    for mode in (None, "reduce-overhead"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Head(512, 65536, False)
        options = {"recipe": "current", "policy": {"head": "current"}, "logits": "omit"} | (
            {"mode": mode} if mode else {}
        )
        compiled = torch.compile(model, backend="te", options=options)
        for _ in range(3):
            model.zero_grad()
            loss = compiled(x, labels)[0]
            loss.backward()
        found.append((loss.clone(), model.head.weight.grad.clone()))
        if mode is None:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            compiled(x, labels)[0].backward()
            assert torch.cuda.max_memory_allocated() - before < 2 * 4096 * 65536 + 2 * 65536 * 512
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_the_layer_is_chosen_by_the_size_rule():
    model = Head(4096, 128256, False)
    x, labels = (
        torch.randn(8192, 4096, dtype=torch.bfloat16, device="cuda"),
        torch.zeros(8192, dtype=torch.int64, device="cuda"),
    )
    report = te_inductor.explain(model, x, labels, options={"recipe": "current", "logits": "omit"})
    assert [site.how for site in report.losses] == ["in chunks, without logits"]
    assert {site.kernel for site in report.sites} == {"cublaslt"}
