"""Losses of output layers in graphs: which are computed without logits, which not and why, and what programs get."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertForTokenClassification, LlamaConfig, LlamaForCausalLM

import te_inductor
from te_inductor import backend
from te_inductor.errors import FallbackWarning, OmittedLogitsError
from te_inductor.passes.pre_grad.loss import match
from te_inductor.runtime.omitted_logits import OmittedLogits
from tests.losses import error

pytestmark = pytest.mark.usefixtures("without_tracing")

WIDTH, WORDS = 32, 96


class Head(nn.Module):
    """An output layer, and what a program makes of its logits."""

    def __init__(self, loss, bias=False):
        super().__init__()
        self.head, self.loss = nn.Linear(WIDTH, WORDS, bias=bias, dtype=torch.bfloat16), loss

    def forward(self, x, labels):
        return self.loss(self.head(x), labels)


def flat(logits, labels, **more):
    return F.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), labels.view(-1), **more)


def shifted(logits, labels):
    return F.cross_entropy(logits[..., :-1, :].contiguous().float().view(-1, WORDS), labels[..., 1:].reshape(-1))


def shifted_labels(logits, labels):
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return flat(logits, labels)


def capped(logits, labels):
    return flat(torch.tanh(logits / 5.0) * 5.0, labels)


def of_last_tokens(logits, labels):
    return F.cross_entropy(logits[:, -1], labels[:, -1])


def per_token(logits, labels):
    losses = flat(logits, labels, reduction="none")
    return (losses * torch.arange(losses.numel()) / 100).sum()


def picked(logits, labels):
    """The loss of a policy: probabilities of the words that were chosen, each with a weight."""
    chosen = labels.clamp(min=0)
    logarithms = torch.log_softmax(logits.float(), dim=-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    return -(logarithms * torch.linspace(-1, 1, labels.numel()).view_as(labels) * (labels >= 0)).sum()


def selected(logits, labels):
    """TRL's, in its two branches."""
    if logits.dtype == torch.float32:
        chosen = torch.gather(logits, dim=-1, index=labels.unsqueeze(-1)).squeeze(-1)
        return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    rows = []
    for row, label in zip(logits, labels, strict=True):
        rows.append(F.log_softmax(row, dim=-1).gather(dim=-1, index=label.unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows)


def policy(logits, labels, logarithms):
    """The loss of a policy whose words' probabilities are computed this way."""
    factors = torch.linspace(-1, 1, labels.numel()).view_as(labels) * (labels >= 0)
    return -(logarithms(logits[:, :-1], labels[:, 1:].clamp(min=0)) * factors[:, 1:]).sum()


def gathered(logits, labels):
    return logits.gather(-1, labels[..., None]) - logits.logsumexp(-1, keepdim=True)


def z_loss(logits, labels):
    """Computes what users of PaLM, OLMo and torchtitan do: tokens without a label have none."""
    rows, labels = logits.float().view(-1, WORDS), labels.view(-1)
    kept = labels != -100
    z_squared = rows.logsumexp(-1).pow(2)
    return F.cross_entropy(rows, labels) + 1e-2 * (z_squared * kept).sum() / kept.sum()


def z_loss_of_all(logits, labels):
    """Adds a z-loss of all tokens, computed in front of the loss, of capped logits."""
    logits = torch.tanh(logits / 5.0) * 5.0
    z_loss = torch.logsumexp(logits.float(), dim=-1, keepdim=True).square().mean()
    return flat(logits, labels) + 1e-2 * z_loss


def sums_beside(logits, labels):
    """Shifted, in bf16, of two `logsumexp`, one of them for the loss."""
    rows, chosen = logits[:, :-1], labels[:, 1:].clamp(min=0)
    sums = rows.logsumexp(-1)
    losses = sums - rows.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    return losses.float().mean() + 1e-2 * (sums.float().mean() + rows.logsumexp(-1).float().pow(2).mean())


FORMS = {
    "z-loss": z_loss,
    "z-loss of all tokens": z_loss_of_all,
    "sums beside a loss": sums_beside,
    "TRL in fp32": lambda logits, labels: policy(logits.float() / 0.9, labels, selected),
    "TRL in bf16": lambda logits, labels: policy(logits, labels, selected),
    "gather less logsumexp": lambda logits, labels: policy(
        logits.float(), labels, lambda *given: gathered(*given).squeeze(-1)
    ),
    "logsumexp less gather": lambda logits, labels: (
        -policy(
            logits.float(),
            labels,
            lambda rows, chosen: rows.logsumexp(-1) - rows.gather(-1, chosen.unsqueeze(-1)).squeeze(-1),
        )
    ),
    "classes second, by keywords": lambda logits, labels: F.cross_entropy(
        input=torch.permute(input=logits.float(), dims=(0, 2, 1)), target=labels
    ),
    "gather less logsumexp, by keywords": lambda logits, labels: policy(
        logits.float(),
        labels,
        lambda rows, chosen: (
            torch.squeeze(input=torch.gather(input=rows, dim=-1, index=torch.unsqueeze(input=chosen, dim=-1)), dim=-1)
            - torch.logsumexp(input=rows, dim=[-1])
        ),
    ),
    "classes second": lambda logits, labels: F.cross_entropy(logits.float().transpose(1, 2), labels),
    "classes second, a loss each": lambda logits, labels: (
        F.cross_entropy(logits.mT, labels, reduction="none") * torch.linspace(0, 1, 12)
    ).sum(),
    "log-likelihood": lambda logits, labels: F.nll_loss(
        F.log_softmax(logits.float().flatten(0, 1), -1), labels.flatten()
    ),
    "probabilities of chosen words": picked,
    "mean": flat,
    "sum over a count": lambda logits, labels: flat(logits, labels, reduction="sum") / 7,
    "shifted logits": shifted,
    "shifted labels": shifted_labels,
    "soft cap": capped,
    "scale": lambda logits, labels: flat(logits * 0.25, labels),
    "scale behind a cast": lambda logits, labels: flat(logits.float() / 8.0, labels),
    "last tokens": of_last_tokens,
    "a loss each": per_token,
    "smoothing": lambda logits, labels: flat(logits, labels, label_smoothing=0.1),
    "another ignored label": lambda logits, labels: flat(logits, labels.clamp(min=3), ignore_index=3),
    "module": lambda logits, labels: nn.CrossEntropyLoss()(logits.flatten(0, 1), labels.flatten()),
    "bf16": lambda logits, labels: F.cross_entropy(logits.view(-1, WORDS), labels.view(-1)).float(),
}


@pytest.fixture(autouse=True)
def on_a_cpu_too(monkeypatch):
    """Has losses computed in chunks on CPUs too, of few logits, so that graphs can be looked at here."""
    monkeypatch.setattr(match, "LEAST_WORDS", 0)
    monkeypatch.setattr(match, "_gains", lambda site: site.low)
    torch.manual_seed(0)


def given():
    x, labels = torch.randn(2, 12, WIDTH, dtype=torch.bfloat16), torch.randint(0, WORDS, (2, 12))
    labels[0, 4:6] = -100
    return x.requires_grad_(), labels


def step(program, x, labels):
    """The loss of a step and the gradients of x and of all parameters."""
    for one in (x, *program.parameters()):
        one.grad = None
    torch.manual_seed(0)  # of dropout
    loss = program(x, labels)
    (3 * loss).backward()
    return loss.detach(), x.grad.clone(), *(one.grad.clone() for one in program.parameters())


def how(report):
    return [(site.how, site.reason) for site in report.losses]


@pytest.fixture
def reports(monkeypatch):
    """What each compile says of its graph, which `explain` would trace once more."""
    said, announce = [], backend.announce
    monkeypatch.setattr(backend, "announce", lambda report, *given: (said.append(report), announce(report, *given)))
    return said


TRACED = ("z-loss", "probabilities of chosen words", "mean")


@pytest.mark.parametrize(
    ("form", "recipe"),
    [
        *(pytest.param(form, "current", marks=[pytest.mark.traced] * (form in TRACED)) for form in FORMS),
        pytest.param("shifted labels", "delayed", marks=pytest.mark.traced),
        ("shifted labels", "rowwise"),
    ],
)
def test_losses_as_models_write_them(form, recipe, reports):
    """Each is found, and gives what torch does, within what FP8 rounds: loss, and gradients of all that is trained."""
    program = Head(FORMS[form], bias=form == "mean")
    x, labels = given()
    wanted = step(copy.deepcopy(program), x, labels)
    compiled = torch.compile(program, backend="te", options={"recipe": recipe})
    for _ in range(2):
        found = step(compiled, x, labels)
    assert list(map(how, reports)) == [[("in chunks", None)]]
    assert abs(found[0] - wanted[0]) <= 0.02 * abs(wanted[0])
    assert all(error(one, other) <= 0.09 for one, other in zip(found[1:], wanted[1:], strict=True))


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
@pytest.mark.parametrize(
    "options", [{"weights": "once"}, {"wgrad": "deferred"}, {"wgrad": "main_grad", "weights": "once"}]
)
def test_options_reach_an_output_layer_with_its_loss(recipe, options, reports):
    program = Head(flat)
    x, labels = given()
    wanted = step(copy.deepcopy(program), x, labels)
    weight = program.head.weight
    total = torch.zeros_like(weight, dtype=torch.float32)
    if options.get("wgrad") == "main_grad":
        weight.main_grad = total
    compiled = torch.compile(program, backend="te", options={"recipe": recipe} | options)
    for _ in range(2):
        x.grad = weight.grad = None
        total.zero_()
        (3 * compiled(x, labels)).backward()
        if options.get("wgrad") == "deferred":
            te_inductor.backward_dw(program)
    assert [(how(one), one.unmet) for one in reports] == [([("in chunks", None)], [])]
    found = total if options.get("wgrad") == "main_grad" else weight.grad
    assert error(x.grad, wanted[1]) <= 0.09 and error(found, wanted[2]) <= 0.09


def written(logits, labels):
    loss = flat(logits, labels)
    logits.zero_()
    return loss


def written_between(logits, labels):
    rows = logits.view(-1, WORDS)
    logits.mul_(2)
    return F.cross_entropy(rows, labels.view(-1))


def not_recorded(logits, labels):
    with torch.no_grad():
        seen = logits * 1.0
    return F.cross_entropy(seen.view(-1, WORDS), labels.view(-1)) + logits.float().sum()


def moved(logits, labels):
    return F.cross_entropy(logits.transpose(1, 2).reshape(-1, WORDS), labels.view(-1))


def entropy(logits, labels):
    logarithms = logits.float().flatten(0, 1).log_softmax(-1)
    return F.nll_loss(logarithms, labels.flatten()) - (logarithms.exp() * logarithms).sum(-1).mean()


KEPT = {
    "written behind": (written, "reads its logits too"),
    "written between": (written_between, None),
    "in another mode": (not_recorded, None),
    "words are moved": (moved, "more than casts"),
    "words are left out": (lambda logits, labels: flat(logits[..., :64], labels % 64), None),
    "weights": (lambda logits, labels: flat(logits, labels, weight=torch.ones(WORDS)), "classes have weights"),
    "read by something else": (lambda logits, labels: flat(logits, labels) + logits.amax(), "reads its logits too"),
    "dropout": (lambda logits, labels: flat(F.dropout(logits, 0.5), labels), "more than casts"),
    "several words of a token": (
        lambda logits, labels: -logits.log_softmax(-1).gather(-1, torch.stack([labels, labels + 1], -1).clamp(0, 9)).mean(),
        "several words",
    ),
    "softmax over tokens": (
        lambda logits, labels: -logits.log_softmax(1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).mean(), None
    ),
    "softmax read by something else": (lambda logits, labels: entropy(logits, labels), "reads its logits too"),
    "two losses": (lambda logits, labels: flat(logits, labels) + flat(logits, labels.flip(0)), "reads its logits too"),
    "classes second without a permutation": (
        lambda logits, labels: F.cross_entropy(logits.reshape(2, WORDS, 12), labels), "neither the last dimension"
    ),
    "sums of other logits": (
        lambda logits, labels: (logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
                                - (2 * logits).logsumexp(-1)).float().mean(), None
    ),
    "rows in another order": (
        lambda logits, labels: (logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
                                - torch.stack([logits[1].logsumexp(-1), logits[0].logsumexp(-1)])).float().mean(), None
    ),
    "z-loss of other logits": (
        lambda logits, labels: flat(logits, labels) + 1e-2 * logits[:, 1:].float().logsumexp(-1).pow(2).mean(),
        "not as the loss does",
    ),
    "z-loss without the cap": (
        lambda logits, labels: capped(logits, labels) + 1e-2 * logits.float().logsumexp(-1).pow(2).mean(),
        "not as the loss does",
    ),
    "z-loss over tokens": (
        lambda logits, labels: flat(logits, labels) + 1e-2 * logits.logsumexp(1).float().pow(2).mean(),
        "reads its logits too",
    ),
    "z-loss beside smoothing": (
        lambda logits, labels: flat(logits, labels, label_smoothing=0.1) + logits.logsumexp(-1).float().pow(2).mean(),
        "labels are smoothed",
    ),
    "entropy beside logarithms": (
        lambda logits, labels: policy(logits.float(), labels, selected) + entropy(logits, labels), "reads its logits too"
    ),
    "probabilities": (lambda logits, labels: flat(logits, labels) if labels is None else F.cross_entropy(
        logits.flatten(0, 1), F.one_hot(labels.clamp(min=0).flatten(), WORDS).to(logits.dtype)), "no label for each"),
    "a factor that is computed": (lambda logits, labels: flat(logits * labels.float().mean() / 40, labels), None),
    "detached": (lambda logits, labels: flat(logits.detach(), labels) + logits.float().mean(), None),
}  # fmt: skip


@pytest.mark.parametrize("form", KEPT)
def test_losses_that_need_their_logits(form, reports):
    """They are left as they are written, with a reason where a loss is read at all, and give what torch does."""
    loss, reason = KEPT[form]
    program = Head(loss)
    x, labels = given()
    wanted = step(copy.deepcopy(program), x, labels)
    compiled = torch.compile(program, backend="te", options={"recipe": "current"})
    found = step(compiled, x, labels)
    [report] = reports
    assert all(site.how == "as_written" for site in report.losses)
    assert reason is None or reason in report.losses[0].reason
    assert all(error(one, other) <= 0.15 for one, other in zip(found, wanted, strict=True))


def test_an_output_layer_that_is_written_otherwise():
    """What is read as a layer and stays in high precision is put back as it was written."""

    def program(x, weight, labels):
        logits = torch.einsum("blk,vk->blv", x, weight)
        return flat(logits, labels), logits

    x, labels = given()
    weight = nn.Parameter(torch.randn(WORDS, WIDTH, dtype=torch.bfloat16))
    options = {"recipe": "none", "logits": "omit", "fallback": "silent"}
    loss, logits = torch.compile(program, backend="te", options=options)(x, weight, labels)
    assert torch.equal(loss, program(x, weight, labels)[0]) and not isinstance(logits, OmittedLogits)


def test_a_word_of_as_many_tokens_as_there_are_words():
    """A column of logits is as long as a row."""
    program = Head(lambda logits, labels: F.cross_entropy(logits[..., 3].view(-1, WORDS), labels[:, 0]))
    x, labels = torch.randn(1, WORDS, WIDTH, dtype=torch.bfloat16), torch.randint(0, WORDS, (1, WORDS))
    report = te_inductor.explain(program, x, labels, options={"recipe": "current"})
    assert [site.how for site in report.losses] == ["as_written"]


@pytest.fixture(scope="module")
def llama():
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=256
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).bfloat16()


USES = (
    lambda one: one.argmax(-1),
    lambda one: one + 1,
    lambda one: one.cpu(),
    lambda one: one[0],
    lambda one: one.mT + 1,
    lambda one: one.sum().item(),
)


@pytest.mark.quick("None-none", "30-delayed")
@pytest.mark.parametrize("recipe", ["none", pytest.param("delayed", marks=pytest.mark.traced)])
@pytest.mark.parametrize("count", [None, 30])
def test_logits_of_transformers_are_left_out(llama, recipe, count):
    """The model returns its logits beside the loss: in training they are sizes alone, whose use is an error that says
    why; in evaluation they are there."""
    ids = torch.randint(0, 256, (2, 16))
    more = {} if count is None else {"num_items_in_batch": torch.tensor(count)}
    model = copy.deepcopy(llama)
    wanted = llama(input_ids=ids, labels=ids, **more)
    compiled = torch.compile(model, backend="te", options={"recipe": recipe, "logits": "omit"})
    found = compiled(input_ids=ids, labels=ids, **more)
    found.loss.backward()
    assert abs(found.loss - wanted.loss) <= 0.01 * wanted.loss
    assert all(one.grad is not None and one.grad.isfinite().all() for one in model.parameters())
    assert isinstance(found.logits, OmittedLogits)
    assert (found.logits.shape, found.logits.dtype) == (wanted.logits.shape, wanted.logits.dtype)
    assert isinstance(found.logits.float().detach(), OmittedLogits)
    for use in USES:
        with pytest.raises(OmittedLogitsError, match="logits': 'keep'"):
            use(found.logits)
    with torch.no_grad():
        evaluated = compiled(input_ids=ids, labels=ids, **more)
    assert error(evaluated.logits, wanted.logits.detach()) <= 0.1


@pytest.mark.parametrize("kind", [BertForMaskedLM, BertForTokenClassification])
def test_heads_of_encoders(kind):
    """A masked language model, whose output layer is tied and has a bias, and classes of tokens."""
    config = BertConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=256, num_labels=16
    )
    torch.manual_seed(0)
    model = kind(config).eval().bfloat16()
    ids = torch.randint(0, 256, (2, 16))
    labels = torch.where(torch.rand(2, 16) < 0.5, ids % (16 if kind is BertForTokenClassification else 256), -100)
    wanted = model(input_ids=ids, labels=labels)
    report = te_inductor.explain(model, input_ids=ids, labels=labels, options={"recipe": "current", "logits": "omit"})
    assert how(report) == [("in chunks, without logits", None)]
    compiled = torch.compile(model, backend="te", options={"recipe": "current", "logits": "omit"})
    found = compiled(input_ids=ids, labels=labels)
    found.loss.backward()
    assert abs(found.loss - wanted.loss) <= 0.02 * wanted.loss
    assert all(one.grad.isfinite().all() for one in model.parameters() if one.grad is not None)


def test_logits_are_kept_by_default(llama):
    ids = torch.randint(0, 256, (2, 16))
    report = te_inductor.explain(llama, input_ids=ids, labels=ids, options={"recipe": "current"})
    [(way, reason)] = how(report)
    assert way == "as_written"
    assert "'logits': 'omit'" in reason and "MiB" in reason
    assert "'logits': 'omit'" in str(report)


def test_an_option_that_does_not_reach_says_so(llama):
    ids = torch.randint(0, 256, (2, 16))

    class Entropy(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = copy.deepcopy(llama)

        def forward(self, ids):
            out = self.model(input_ids=ids, labels=ids)
            return out.loss, out.logits, out.logits.amax(-1)

    compiled = torch.compile(Entropy(), backend="te", options={"recipe": "none", "logits": "omit"})
    with pytest.warns(FallbackWarning, match="option 'logits' does not reach"):
        _, logits, _ = compiled(ids)
    assert not isinstance(logits, OmittedLogits)


@pytest.mark.traced
def test_sums_of_dynamic_lengths():
    torch._dynamo.reset()
    program = Head(z_loss_of_all)
    compiled = torch.compile(program, backend="te", dynamic=True, options={"recipe": "current"})
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (12, 20):
            x, labels = torch.randn(2, length, WIDTH, dtype=torch.bfloat16), torch.randint(0, WORDS, (2, length))
            wanted = step(copy.deepcopy(program), x.requires_grad_(), labels)
            found = step(compiled, x, labels)
            assert all(error(one, other) <= 0.09 for one, other in zip(found, wanted, strict=True))


def test_a_weight_whose_sums_are_read_has_its_gradient_from_autograd():
    program = Head(z_loss)
    program.head.weight.main_grad = torch.zeros(WORDS, WIDTH)
    x, labels = given()
    report = te_inductor.explain(program, x, labels, options={"recipe": "current", "wgrad": "main_grad"})
    assert how(report) == [("in chunks", None)] and "no GEMM computes" in report.unmet[0].reason


def test_dynamic_lengths_are_one_graph(llama):
    """Lengths that differ from call to call compile no graph each, and logits have their sizes."""
    torch._dynamo.reset()
    model = copy.deepcopy(llama)
    compiled = torch.compile(model, backend="te", dynamic=True, options={"recipe": "current", "logits": "omit"})
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (16, 24, 40):
            ids = torch.randint(0, 256, (2, length))
            found = compiled(input_ids=ids, labels=ids)
            found.loss.backward()
            assert found.logits.shape == (2, length, 256)
