"""Programs that eager torch runs and that a loss in chunks could get wrong: each gives what eager does, or is left as it is
written, or fails as eager does."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import te_inductor
from te_inductor.errors import OmittedLogitsError
from te_inductor.passes.pre_grad.loss import match
from te_inductor.runtime.omitted_logits import OmittedLogits
from tests.losses import error

pytestmark = pytest.mark.usefixtures("without_codegen")

WIDTH, WORDS, TOKENS = 32, 96, 12
IN_CHUNKS = "in chunks"


@pytest.fixture(autouse=True)
def on_a_cpu_too(monkeypatch):
    monkeypatch.setattr(match, "LEAST_WORDS", 0)
    monkeypatch.setattr(match, "_gains", lambda site: site.low)
    torch.manual_seed(0)


class Program(nn.Module):
    def __init__(self, run, bias=False, dtype=torch.bfloat16):
        super().__init__()
        self.head, self.run = nn.Linear(WIDTH, WORDS, bias=bias, dtype=dtype), run

    def forward(self, x, labels):
        return self.run(self.head, x, labels)


def flat(logits, labels, **more):
    return F.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), labels.reshape(-1), **more)


def labels_are_written(head, x, labels):
    loss = flat(head(x), labels.clone())
    labels.fill_(-100)
    return loss


def weight_is_written(head, x, labels):
    logits = head(x.detach())
    with torch.no_grad():
        head.weight.mul_(0.5)
    return flat(logits, labels)


def words_are_set(head, x, labels):
    logits = head(x)
    logits[..., 5] = -math.inf
    return flat(logits, labels.clamp(min=6))


def pseudo_labels(head, x, labels):
    """The largest logits, by more than what rounds."""
    logits = head(x)
    return flat(logits, (logits + 9 * F.one_hot(labels.clamp(min=0), WORDS)).argmax(-1))


def in_no_grad(head, x, labels):
    with torch.no_grad():
        seen = flat(head(x), labels)
    return seen * x.float().sum()


def two_predictions(head, x, labels):
    """Two hidden states have one output layer, as layers that predict several tokens do."""
    return flat(head(x), labels) + 0.3 * flat(head(x.tanh()), labels.roll(1))


def in_autocast(head, x, labels):
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(x)
        return flat(logits, labels)


def checkpointed(head, x, labels):
    return checkpoint(lambda x: flat(head(x), labels), x, use_reentrant=False)


def written_elsewhere(head, x, labels):
    """A result that goes into a tensor of the program's too."""
    kept = torch.empty(2, TOKENS, 1)
    with torch.no_grad():
        torch.gather(head(x).float().log_softmax(-1), -1, labels.clamp(min=0).unsqueeze(-1), out=kept)
    return flat(head(x), labels) * kept.mean()


def of_one_label(head, x, labels):
    """The index of `gather` has fewer rows than the logits."""
    return -head(x).float().log_softmax(-1).gather(-1, labels[:, :1].clamp(min=0).unsqueeze(-1)).mean()


def sums_are_read(head, x, labels):
    logits, chosen = head(x).float(), labels.clamp(min=0).unsqueeze(-1)
    sums = logits.logsumexp(-1)
    return -(logits.gather(-1, chosen).squeeze(-1) - sums).mean() + 1e-2 * sums.pow(2).mean()


def sums_are_read_without_gradients(head, x, labels):
    logits = head(x).float()
    with torch.no_grad():
        sums = logits.logsumexp(-1)
    return flat(logits, labels) + (sums * x.float().mean(-1)).mean()


def sums_choose_labels(head, x, labels):
    """Every second token is sure, by far more than what rounds."""
    logits = head(x * torch.tensor([0.25, 4], dtype=x.dtype).repeat(TOKENS // 2)[:, None]).float()
    sure = logits.logsumexp(-1) > 5.5
    return flat(logits, torch.where(sure, labels, -100))


def labels_are_written_behind_sums(head, x, labels):
    logits, labels = head(x).float(), labels.clone()
    sums = logits.logsumexp(-1).mean()
    labels[0, 7:] = -100
    return flat(logits, labels) + 1e-2 * sums


def permuted_twice(head, x, labels):
    """A permutation that puts tokens where words were."""
    return F.cross_entropy(head(x).float().permute(2, 0, 1).reshape(WORDS, -1).t(), labels.reshape(-1))


def of_the_mean(head, x, labels):
    """Logits of one row are broadcast to all."""
    return flat(head(x).mean(1, keepdim=True).expand(2, TOKENS, WORDS), labels)


TRAPS = {
    "labels are written": (labels_are_written, None),
    "the weight is written": (weight_is_written, "writes what the loss is made of"),
    "words are set": (words_are_set, None),
    "words are masked": (lambda head, x, labels: flat(
        head(x).masked_fill(torch.arange(WORDS) < 3, -math.inf), labels.clamp(min=3)), "more than casts"),
    "words have a bias": (lambda head, x, labels: flat(head(x) + torch.arange(WORDS), labels), None),
    "pseudo labels": (pseudo_labels, "reads its logits too"),
    "accuracy": (lambda head, x, labels: flat(head(x), labels) + 0 * (head(x).argmax(-1) == labels).sum(), None),
    "in no_grad": (in_no_grad, None),
    "two predictions": (two_predictions, IN_CHUNKS),
    "checkpointed": (checkpointed, None),
    "written elsewhere": (written_elsewhere, None),
    "of one label": (of_one_label, "several words"),
    "sums are read": (sums_are_read, IN_CHUNKS),
    "sums are read without gradients": (sums_are_read_without_gradients, "gradients are recorded of some"),
    "sums are read in front of labels": (sums_choose_labels, "labels are made behind"),
    "labels are written behind sums": (labels_are_written_behind_sums, "writes its labels"),
    "sums have other gradients": (lambda head, x, labels: (
        flat(logits := head(x).float(), labels)
        + (logits.logsumexp(-1) * torch.linspace(-1, 1, TOKENS)).sum()), IN_CHUNKS),
    "sums of detached logits": (lambda head, x, labels: (
        flat(logits := head(x).float(), labels)
        + (logits.detach().logsumexp(-1) * x.float().mean(-1)).sum()), "not as the loss does"),
    "permuted twice": (permuted_twice, None),
    "of the mean": (of_the_mean, None),
    "a temperature that is trained": (lambda head, x, labels: flat(head(x) / x.float().exp().mean(), labels), None),
    "last tokens": (lambda head, x, labels: flat(head(x)[:, -4:], labels[:, -4:]), IN_CHUNKS),
    "last states": (lambda head, x, labels: flat(head(x[:, -4:]), labels[:, -4:]), IN_CHUNKS),
    "one token": (lambda head, x, labels: flat(head(x[:1, :1]), labels[:1, :1]), IN_CHUNKS),
    "every second token": (lambda head, x, labels: flat(head(x)[:, ::2], labels[:, ::2]), IN_CHUNKS),
    "smoothing and a valid ignored class": (lambda head, x, labels: flat(
        head(x), labels.clamp(min=2), ignore_index=2, label_smoothing=0.2), IN_CHUNKS),
    "a weight each": (lambda head, x, labels: (
        flat(head(x), labels, reduction="none") * x.float().mean(-1).reshape(-1)).sum(), IN_CHUNKS),
    "all ignored but one": (lambda head, x, labels: flat(
        head(x), torch.where(torch.arange(TOKENS) == 3, labels, -100)), IN_CHUNKS),
}  # fmt: skip


def given(dtype=torch.bfloat16):
    x, labels = torch.randn(2, TOKENS, WIDTH, dtype=dtype), torch.randint(0, WORDS, (2, TOKENS))
    labels[0, 4:6] = -100
    return x.requires_grad_(), labels


def stepped(program, compiled, x, labels, times=1):
    """The loss, and all gradients after so many backwards."""
    x = x.detach().clone().requires_grad_()
    loss = compiled(x, labels.clone())
    for _ in range(times):
        loss.backward(retain_graph=times > 1)
    return [loss.detach(), *(one.grad for one in (x, *program.parameters()) if one.grad is not None)]


def assert_same(program, x, labels, options=None, times=1):
    options = {"recipe": "current"} | (options or {})
    exact = copy.deepcopy(program)
    wanted = stepped(exact, exact, x, labels, times)
    found = stepped(program, torch.compile(program, backend="te", options=options), x, labels, times)
    assert len(found) == len(wanted)
    assert all(error(one, other) <= 0.15 for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("trap", TRAPS)
def test_what_eager_does(trap):
    run, expected = TRAPS[trap]
    program = Program(run)
    x, labels = given()
    report = te_inductor.explain(copy.deepcopy(program), x, labels.clone(), options={"recipe": "current"})
    if expected == IN_CHUNKS:
        assert report.losses and {site.how for site in report.losses} == {IN_CHUNKS}
    elif expected is not None:
        assert any(expected in (site.reason or "") for site in report.losses), report.losses
    assert_same(program, x, labels)


def test_mixed_precision():
    program = Program(in_autocast, dtype=torch.float32)
    assert_same(program, *given(torch.float32))


def test_a_word_that_its_bias_suppresses():
    program = Program(lambda head, x, labels: flat(head(x), labels.clamp(min=1)), bias=True)
    with torch.no_grad():
        program.head.bias[0] = -math.inf
    assert_same(program, *given())


def test_two_backwards():
    assert_same(Program(lambda head, x, labels: flat(head(x), labels)), *given(), times=2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients(mode):
    program = Program(lambda head, x, labels: flat(head(x), labels))
    x, labels = given()
    with mode():
        wanted, found = (
            program(x, labels),
            torch.compile(program, backend="te", options={"recipe": "current"})(x, labels),
        )
    assert error(found, wanted) <= 0.02 and not found.requires_grad


def test_left_out_logits_behind_a_graph_break():
    """They are handed on there, and no value of them is read. They say that they are where logits would be."""

    def broken(head, x, labels):
        logits = head(x)
        loss = flat(logits, labels)
        torch._dynamo.graph_break()
        return loss * torch.ones(1, device=logits.device).sum() * logits.shape[0], logits.detach().float()

    program = Program(broken)
    x, labels = given()
    loss, logits = torch.compile(program, backend="te", options={"recipe": "current", "logits": "omit"})(x, labels)
    loss.backward()
    assert (logits.device, logits.is_cpu, logits.is_meta) == (x.device, True, False)
    assert isinstance(logits, OmittedLogits) and program.head.weight.grad.isfinite().all()
    assert error(loss.detach(), program(x, labels)[0].detach()) <= 0.02


def test_left_out_logits_that_are_read_behind_a_graph_break():
    """An error, also of their `data`, which is another tensor."""

    def broken(head, x, labels):
        logits = head(x)
        loss = flat(logits, labels)
        torch._dynamo.graph_break()
        return loss, logits.data.argmax(-1)

    run = torch.compile(Program(broken), backend="te", options={"recipe": "current", "logits": "omit"})
    with pytest.raises(OmittedLogitsError, match="argmax of logits that were not computed"):
        run(*given())


def test_no_token():
    """The mean of nothing is not a number, and its gradients are zero."""
    program = Program(lambda head, x, labels: flat(head(x), labels))
    compiled = torch.compile(program, backend="te", options={"recipe": "current"})
    loss = compiled(torch.empty(2, 0, WIDTH, dtype=torch.bfloat16), torch.empty(2, 0, dtype=torch.int64))
    loss.backward()
    assert loss.isnan() and program.head.weight.grad.eq(0).all()


@pytest.mark.parametrize("label", [-5, WORDS])
def test_labels_outside_of_the_vocabulary_fail(label):
    program = Program(lambda head, x, labels: flat(head(x), labels))
    x, labels = given()
    labels[1, 3] = label
    for run in (program, torch.compile(program, backend="te", options={"recipe": "current"})):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
            run(x, labels)


def test_labels_of_int32_are_left_to_torch():
    program = Program(lambda head, x, labels: flat(head(x), labels))
    x, labels = given()
    outcomes = []
    for run in (program, torch.compile(program, backend="te", options={"recipe": "current"})):
        with pytest.raises(Exception, match=r"Int|int32|Long") if _fails(program, x, labels.int()) else nullcontext():
            outcomes.append(run(x, labels.int()))
    assert len(outcomes) in (0, 2)


def _fails(program, x, labels):
    try:
        program(x, labels)
    except Exception:
        return True
    return False


@pytest.mark.parametrize("recipe", ["none", "current"])
def test_labels_that_change_before_the_backward(recipe):
    """Gradients are those of the labels that the loss was computed of. Eager refuses such a backward."""
    program = Program(lambda head, x, labels: (flat(logits := head(x), labels), logits))
    x, labels = given()
    wanted = stepped(exact := copy.deepcopy(program), lambda *given: exact(*given)[0], x, labels)
    compiled = torch.compile(program, backend="te", options={"recipe": recipe, "logits": "omit"})
    loss = compiled(x, labels)[0]
    labels.fill_(-100)
    loss.backward()
    found = loss.detach(), x.grad, program.head.weight.grad
    assert all(error(one, other) <= 0.09 for one, other in zip(found, wanted, strict=True))


def test_gradients_of_gradients_are_refused():
    program = Program(lambda head, x, labels: flat(head(x), labels))
    x, labels = given()
    loss = torch.compile(program, backend="te", options={"recipe": "current"})(x, labels)
    with pytest.raises(RuntimeError):
        [dx] = torch.autograd.grad(loss, x, create_graph=True)
        dx.float().pow(2).sum().backward()


def test_transforms():
    program = Program(lambda head, x, labels: flat(head(x), labels))
    x, labels = given()

    def gradient(x):
        return torch.func.grad(lambda x: program(x, labels))(x)

    found = torch.compile(gradient, backend="te", options={"recipe": "current"})(x.detach())
    assert error(found, gradient(x.detach())) <= 0.15
