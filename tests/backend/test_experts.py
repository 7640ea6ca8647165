"""Experts' grouped products as sites: every form, by what name, under which recipe, and what leaves them alone. Results
against the eager reference (tests/experts.py), bit for bit."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from te_inductor import autocast, explain
from te_inductor.api import assertions
from te_inductor.backend import parse
from te_inductor.errors import FallbackWarning
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.match.sites import match_sites
from te_inductor.passes.pre_grad.plan import Plan
from te_inductor.passes.pre_grad.sites.rule import Match
from te_inductor.recipes import CustomRecipe, Float8BlockScaling, Quantizer
from tests.experts import BARE, EACH, FOLDED, FORMS, HIDDEN, TOKENS, Experts, MoE, grouped_mm, reference
from tests.recipes import STATELESS, quick
from tests.support.autograd import same
from tests.support.expert_layers import PATHS, ROUTER, Biased, results, sites, te, tokens
from tests.support.layers import grouped_linears
from tests.support.oracle_layers import Calls

pytestmark = pytest.mark.usefixtures("without_tracing", "one_seed")
pytest.importorskip("transformers")  # whose op multiplies in fp32 where code is compiled


def check(model, name, x, **options) -> None:
    expected = results(twin := reference(model, name), twin, x)
    torch._dynamo.reset()
    found = results(te(model, name, **options), model, x)
    assert same(found, expected)
    assert not torch.equal(found[0], model(x))


def matched(model, *inputs) -> list[Match]:
    """What the rule finds of experts."""
    found: list[Match] = []

    def backend(gm, examples):
        plan = Plan(gm, parse(None, {}), examples)
        match_sites(plan)
        found.extend(site.match for site in plan.candidates if site.match.groups)
        return gm.forward

    torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, dtype, split):
    """A parameter (E, N, K) that is used transposed, one (E, K, N), and casts of them, which the layer does itself."""
    model, x = MoE("torchtitan" if split else "getitem", form, split).to(dtype), tokens(dtype=dtype)
    for match in matched(model, x):
        assert match.weight.op == "placeholder" and match.transposed == (form == "direct")
        assert match.sizes == (48, *((32, 48) if "down" in match.weight.name else ((48 if split else 96), 32)))
    of_first = {"experts.w1": 2, "experts.w3": 2} if split else {"experts.gate_up_proj": 0}
    found = {path: how[1:3] for path, how in sites(model, x).items() if "experts" in path}
    assert found == {path: (False, merged) for path, merged in {**of_first, "experts.down_proj": 0}.items()}


FORMS_RUN = [("transpose", torch.bfloat16, False), ("direct", torch.float32, True)]


@pytest.mark.parametrize(
    ("form", "dtype", "split"),
    FORMS_RUN
    + [
        pytest.param(form, dtype, split, marks=pytest.mark.thorough)
        for form in FORMS
        for dtype in (torch.float32, torch.bfloat16)
        for split in (False, True)
        if (form, dtype, split) not in FORMS_RUN
    ],
)
def test_results_of_forms(form, dtype, split):
    check(MoE("torchtitan", form=form, split=split).to(dtype), "current", tokens(dtype=dtype))


@pytest.mark.parametrize("pick", [*FOLDED, *BARE])
def test_what_is_gathered_behind_the_cast(pick):
    """It is gathered so if the gather is `x[order // k]` and nothing writes in between."""
    first, second = matched(MoE(pick), tokens())
    assert (first.groups.rows is not None) == (first.groups.order is not None) == (pick in FOLDED)
    assert value(first.x).shape[0] == (TOKENS if pick in FOLDED else TOKENS * EACH)
    assert second.groups.rows is None


GATHERS_RUN = [("torchtitan", "rowwise"), ("in place", "current"), ("table written", "delayed")]


@pytest.mark.parametrize(
    ("pick", "name"),
    GATHERS_RUN
    + [
        pytest.param(pick, name, marks=pytest.mark.thorough)
        for pick in [*FOLDED, *BARE]
        for name in ("current", "rowwise", "mxfp8", "delayed")
        if (pick, name) not in GATHERS_RUN
    ],
)
def test_results_of_gathers(pick, name):
    check(MoE(pick), name, tokens())


@pytest.mark.traced
@pytest.mark.parametrize("dropped", [0, pytest.param(17, marks=pytest.mark.thorough)])
@quick("rowwise", "delayed")
def test_recipes(name, dropped):
    """Rows behind the last group, whose products nobody defines, have zeros."""
    model, x = MoE(), tokens()
    if name == "block":
        reasons = {how[3] for path, how in sites(model, x, recipe=name).items() if path in PATHS}
        assert all("padded to multiples of 128" in reason for reason in reasons)
        return
    model.dropped = dropped
    check(model, name, x)


def test_blocks():
    """The sizes are such that blocks fill them."""
    experts, x = Experts(inner=256), torch.randn(200, 128, requires_grad=True)
    for weight, shape in (("gate_up_proj", (4, 512, 128)), ("down_proj", (4, 128, 256))):
        setattr(experts, weight, nn.Parameter(torch.randn(shape) / shape[2] ** 0.5))
    ends = torch.tensor([0, 17, 144, 190], dtype=torch.int32)
    torch.manual_seed(0)
    dy = torch.randn(200, 128)
    wanted = [x, *experts.parameters()]

    def both(run):
        y = run(x, ends)
        return [y.detach(), *torch.autograd.grad(y, wanted, dy)]

    twin = reference(experts, "block")
    y = twin(x, ends)
    expected = [y.detach(), *torch.autograd.grad(y, [x, *twin.parameters()], dy)]
    assert same(both(te(experts, "block")), expected)


def test_what_is_one_gemm():
    """Two calls of one input; not under scales whose column copies run across, nor for other inputs or offsets."""
    x = tokens()
    merged = {name: sites(MoE(split=True), x, recipe=name)["experts.w1"][2] for name in STATELESS if name != "block"}
    assert merged == {name: 2 if name == "current" else 0 for name in merged}
    assert sites(MoE(split=True), x, recipe="delayed")["experts.w1"][2] == 2
    assert sites(MoE(split=True), x, policy={"*w3": "rowwise", **ROUTER})["experts.w1"][2] == 0
    frozen = MoE(split=True)
    frozen.experts.w3.requires_grad_(False)
    assert sites(frozen, x)["experts.w1"][2] == 0

    class Apart(Experts):
        def forward(self, x, ends):
            gate, up = (self.product(one, [w], e)[0] for one, w, e in self.apart(x, ends))
            return self.product(F.silu(gate) * up, [self.down_proj], ends)[0]

        def apart(self, x, ends):
            return ((x, self.w1, ends), (x + 1, self.w3, ends))

    class Offsets(Apart):
        def apart(self, x, ends):
            return ((x, self.w1, ends), (x, self.w3, ends - 1))

    for kind in (Apart, Offsets):
        model = MoE(split=True)
        model.experts.__class__ = kind
        assert sites(model, x)["experts.w1"][2] == 0


def test_names():
    """A site is its parameter: a module of experts has several."""
    model, x = nn.Sequential(MoE(), MoE()), tokens()
    assert list(sites(model, x)) == [f"{i}.{path}" for i in "01" for path in ("gate", *PATHS)]
    policy = {"*.experts.gate_up_proj": "rowwise", "0.experts": "mxfp8", "*.experts.*": "none", "*.expert.*": "none"}
    report = explain(model, x, options={"policy": policy})
    recipes = {site.fqn: site.recipe for site in report.sites}
    of = {f"{i}.experts.{name}": "rowwise" for i in "01" for name in ("gate_up_proj",)}
    assert recipes == {
        **of,
        "0.experts.down_proj": "mxfp8",
        "1.experts.down_proj": "none",
        "0.gate": "current",
        "1.gate": "current",
    }
    assert report.unused_policy == ["*.expert.*"]
    seen = []

    def spy(path, shape):
        seen.append((path, shape))
        return False

    explain(model[0], x, options={"policy": {spy: "none"}})
    assert seen == [("gate", (24, 4, 32)), (PATHS[0], (48, 96, 32)), (PATHS[1], (48, 32, 48))]


def test_regions():
    model, x = MoE(), tokens()

    def around(recipe, enabled=True):
        def call(x):
            with autocast(enabled=enabled, recipe=recipe):
                return model(x)

        return {site.fqn: site.recipe for site in explain(call, x).sites if "experts" in site.fqn}

    assert set(around("rowwise").values()) == {"rowwise"}
    assert set(around(None, enabled=False).values()) == {"none"}


def test_a_router_is_no_fallback():
    """It is left on purpose: the report has the reason, and nothing warns of it."""
    model, x = MoE(), tokens()
    report = explain(model, x)
    [router] = {(site.fqn, site.reason, site.outside) for site in report.sites if site.kernel == "high_precision"}
    assert router[0] == "gate" and "a router" in router[1] and router[2] and not report.fallbacks
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        te(model, "current", fallback="error", policy={})(x)
    for meant in ([], ["gate"]):  # of `assert_low_precision`
        assertions._check(report, meant)


def test_fallback():
    """What a site cannot do is said, or raised, with its reason."""
    te(MoE(), "current", fallback="error", policy=ROUTER)(tokens())
    recipe = Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1)
    reason = sites(Experts(), torch.randn(8, HIDDEN), torch.tensor([1, 2, 3, 8]).int(), recipe=recipe)
    assert {"blocks of several rows, which may belong to several experts, share a scale"} == {
        how[3] for how in reason.values()
    }
    wide = torch.tensor([1, 2, 3, 8])
    for how in sites(Experts().bfloat16(), torch.randn(8, HIDDEN).bfloat16(), wide.int()).values():
        assert how[3] is None
    narrow = Experts(inner=10)
    assert all("would be padded" in how[3] for how in sites(narrow, torch.randn(8, HIDDEN), wide.int()).values())


def by_path(slot, module):
    return Quantizer("e4m3", scope="row") if slot in ("input", "weight", "grad_output") and "down" in module else None


def test_a_custom_recipe_knows_the_path():
    model, x = MoE(), tokens()
    y = te(model, CustomRecipe(by_path), fallback="error")(x)
    with Calls(of=lambda name, args: args[6].scopes if name == "grouped_mm" else None) as seen:
        y.sum().backward()
    assert seen.names == [("row", "row"), ("tensor", "tensor")]


@pytest.mark.parametrize("name", ["current", pytest.param("delayed", marks=pytest.mark.thorough)])
def test_dynamic_token_counts(name):
    """One graph for all, or two; M is a symbol."""
    model = MoE()
    counters.clear()
    run = torch.compile(model, backend="te", dynamic=True, fullgraph=True, options={"recipe": name, "policy": ROUTER})
    twin = reference(model, name)
    for count in (24, 40, 1):
        with torch._dynamo.config.patch(error_on_recompile=count not in (24, 1)):
            x = tokens(count)
            found = results(run, model, x)
        if name == "current":
            assert same(found, results(twin, twin, x))
    assert counters["stats"]["unique_graphs"] <= 2
    report = explain(torch.compile(model, backend="te", dynamic=True), tokens())
    assert not report.failure


@pytest.mark.thorough
def test_automatic_dynamic():
    model = MoE()
    run, compiled = te(model, "rowwise", policy=ROUTER), counters["stats"]
    before = compiled["unique_graphs"]
    for count in (24, 40, 9, 64):
        run(tokens(count)).sum().backward()
    assert compiled["unique_graphs"] - before <= 2


@pytest.mark.parametrize("name", ["current", pytest.param("mxfp8", marks=pytest.mark.thorough)])
def test_inference(name):
    model, x = MoE(), tokens()
    for mode in (torch.no_grad, torch.inference_mode):
        torch._dynamo.reset()
        with mode():
            assert torch.equal(te(model, name)(x), reference(model, name)(x))


@pytest.mark.parametrize("name", ["rowwise", pytest.param("delayed", marks=pytest.mark.thorough)])
def test_frozen_and_tied_experts(name):
    """No wgrad of what is frozen; of a parameter that two layers have, the sum."""
    frozen, x = MoE(), tokens()
    frozen.experts.gate_up_proj.requires_grad_(False)
    check(frozen, name, x)
    run = te(frozen, name)
    y = run(x)
    with Calls(of=lambda op, args: op if "wgrad" in op else None) as seen:
        y.sum().backward()
    assert seen.names == ["grouped_wgrad"]
    if name == "rowwise":
        tied = nn.Sequential(MoE(), MoE())
        tied[1].experts = tied[0].experts
        check(tied, name, x)


class Bmm(nn.Module):
    def __init__(self, experts=40) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, HIDDEN, 48) / HIDDEN**0.5)

    def forward(self, x):
        return torch.bmm(x, self.weight)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["current", pytest.param("rowwise", marks=pytest.mark.thorough)])
def test_many_matrices(name, dynamic):
    """A batched product of more than 32 matrices is a grouped one of equal groups."""
    from te_inductor import recipes

    model, x = Bmm(), torch.randn(40, 6, HIDDEN, requires_grad=True)
    assert sites(model, x)["weight"][:2] == ("current", False)
    run = torch.compile(
        model, backend="te", fullgraph=True, dynamic=dynamic, options={"recipe": name, "fallback": "error"}
    )
    found = results(run, model, x)
    weight, flat = model.weight.detach().requires_grad_(), x.detach().view(-1, HIDDEN).requires_grad_()
    ends = torch.arange(6, 241, 6).int()
    [y] = grouped_linears(flat, [weight.transpose(1, 2)], [], ends, recipes.resolve(name).slots(), torch.float32)
    torch.manual_seed(1)
    dx, dw = torch.autograd.grad(y.view(40, 6, 48), [flat, weight], torch.randn(40, 6, 48))
    assert same(found, [y.view(40, 6, 48).detach(), dx.view_as(x), dw])


class Parallel(Biased):
    """Experts as transformers has them where other ranks have other experts: their ids, which no bias is for, are the
    last."""

    def forward(self, x):
        scores, ids = self.gate(x).softmax(-1).topk(EACH, dim=-1)
        ids, order = torch.sort(torch.where(ids == 1, 4, ids).flatten())
        chosen = x[order // EACH]
        ends = torch.histc(ids.float(), bins=4, min=0, max=3).cumsum(0, dtype=torch.int32)
        mask = (ids >= 4).unsqueeze(-1)
        ids.clamp_(max=2 if self.add == "too low" else 3)
        chosen.masked_fill_(mask, 1.0 if self.add == "ones" else 0.0)
        y = grouped_mm(chosen.to(torch.float32), self.experts["w"], ends)
        y.add_(self.bias[ids])
        y = y.masked_fill(mask, 0.0) * scores.flatten()[order][:, None]
        return y[torch.argsort(order)].view(-1, EACH, 32).sum(1)


@pytest.mark.parametrize("how", ["", "too low", "ones"])
def test_experts_of_other_ranks(how):
    """Rows that are emptied since they belong to nobody do not keep the gather from the layer, nor ids that are clamped
    the bias."""
    model, x = Parallel(how), tokens()
    [match] = matched(model, x)
    assert (match.groups.rows is not None) == (how != "ones")
    assert (match.bias is not None) == (how != "too low")
    if not how:
        high, low = results(model, model, x), results(te(model, "rowwise"), model, x)
        assert not torch.equal(high[0], low[0])
        for a, b in zip(high, low, strict=True):
            assert (a - b).norm() < 0.2 * a.norm()


class Given(Biased):
    """Experts whose ids come from elsewhere."""

    def forward(self, x, ids):
        ids, order = torch.sort(ids)
        ends = torch.histc(ids.float(), bins=4, min=0, max=3).cumsum(0, dtype=torch.int32)
        y = grouped_mm(x[order], self.experts["w"], ends)
        return (y + self.bias[ids])[torch.argsort(order)]


def test_negative_ids_are_no_experts():
    """Such rows would be counted by no group, so that each row would be in another one than its bias is of."""
    model, x, ids = Given("added"), tokens(), torch.arange(TOKENS) % 4
    run = te(model, "rowwise")
    high, low = model(x, ids), run(x, ids)
    assert (high - low).norm() < 0.2 * high.norm()
    with pytest.raises(RuntimeError, match="an expert's id is below 0"):
        run(x, ids - 1)


TAKEN = ("in place", "augmented", "added")


@pytest.mark.parametrize("add", [*TAKEN, "read before", "ids written", "scaled", "descending", "others counted"])
def test_biases(add):
    """The layer adds a bias that is chosen by the sorted ids which the groups' ends count; no other."""
    model, x = Biased(add), tokens()
    [match] = matched(model, x)
    assert (match.bias is not None) == (add in TAKEN)


@pytest.mark.parametrize("add", ["in place", *(pytest.param(add, marks=pytest.mark.thorough) for add in TAKEN[1:])])
def test_results_of_biases(add):
    """Its gradient is a sum in fp32 in another order than autograd's."""
    from te_inductor import recipes

    model, x = Biased(add), tokens()
    slots = recipes.resolve("rowwise").slots()
    found = results(te(model, "rowwise"), model, x)
    scores, ids = model.gate(x).softmax(-1).topk(EACH, dim=-1)
    ids, order = torch.sort(ids.flatten())
    ends = (ids[:, None] == torch.arange(4)).sum(0).cumsum(0).int()
    weight = model.experts["w"].transpose(1, 2)
    [y] = grouped_linears(x[order // EACH], [weight], [model.bias], ends, slots, torch.float32)
    y = (y * scores.flatten()[order][:, None])[torch.argsort(order)].view(-1, EACH, 32).sum(1)
    wanted = [x, *model.parameters()]
    torch.manual_seed(1)
    expected = [y.detach(), *torch.autograd.grad(y, wanted, torch.randn_like(y))]
    assert same(found, expected)
