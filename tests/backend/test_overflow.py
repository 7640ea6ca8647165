"""Note [Overflow stays visible] in lowerings/casts/values.py: what is infinite or NaN without us is so with us."""

import copy
import functools

import pytest
import torch
from torch import nn

from te_inductor import recipes
from tests.loss_scaling import of_high_precision, scales
from tests.recipes import every_recipe, quick, strict


def model(dtype=torch.float32):
    return nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128)).to(dtype)


def run(forward, module, x, dy):
    """The output and all gradients."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = forward(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def spoiled(name, module, x, dy):
    """Copies in which one number is not finite."""
    what, _, value = name.partition(" ")
    x, dy = x.clone(), dy.clone()
    weight = module[0].weight if what == "first" else module[2].weight
    {"x": x, "dy": dy}.get(what, weight.data)[3, 5] = float(value)
    return x, dy


@quick("current")
def test_infinity_and_nan_reach_what_they_reach_in_high_precision(name):
    plain = model(torch.bfloat16)
    compiled = torch.compile(plain, backend="te", options={"recipe": name, "fallback": strict(name)}, fullgraph=True)
    x, dy = torch.randn(32, 128, dtype=torch.bfloat16), torch.randn(32, 128, dtype=torch.bfloat16)
    state = copy.deepcopy(plain.state_dict())
    for what in ("x inf", "x -inf", "x nan", "dy inf", "dy nan", "first inf", "second -inf"):
        plain.load_state_dict(state)
        inputs = spoiled(what, plain, x, dy)
        found, expected = (run(forward, plain, *inputs) for forward in (compiled, plain))
        for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            hidden = ours.isfinite() & ~theirs.isfinite()
            assert not hidden.any(), (what, place, hidden.sum())
            if not recipes.resolve(name).slots().fprop.microscaled:  # of which a NaN is in all of its block
                assert torch.equal(ours.isfinite(), theirs.isfinite()), (what, place)
    plain.load_state_dict(state)
    assert all(result.isfinite().all() for result in run(compiled, plain, x, dy))


class _Experts(nn.Module):
    """One of which sees the rows that the router sends it, in a graph whose number of rows is known at run time
    alone."""

    def __init__(self):
        super().__init__()
        self.expert = nn.Linear(128, 128, bias=False)

    def forward(self, x, sent):
        rows = sent.nonzero().squeeze(1)
        return x.index_add(0, rows, self.expert(x[rows]))


@pytest.mark.quick("current-False", "delayed-False", "nvfp4-False")
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
@pytest.mark.parametrize("codegen", [pytest.param(True, marks=pytest.mark.codegen), False])
@every_recipe
def test_an_expert_without_rows(name, codegen, without_codegen):
    """Found under nvfp4, whose amax of nothing made its gradient NaN."""
    plain = _Experts()
    options = {"recipe": name, "fallback": strict(name), "policy": {"*": name}}
    compiled = torch.compile(plain, backend="te", options=options, fullgraph=True)
    x = torch.randn(32, 128)
    for sent in (torch.arange(32) % 2 == 0, torch.zeros(32, dtype=torch.bool)):
        plain.zero_grad()
        y = compiled(x, sent)
        y.square().sum().backward()
        assert y.isfinite().all() and plain.expert.weight.grad.isfinite().all()
    assert torch.equal(y, x) and not plain.expert.weight.grad.any()


@functools.cache
def in_high_precision():
    torch.manual_seed(0)
    plain, x = model(), torch.randn(32, 128)
    return plain, x, *of_high_precision(plain, x)


@quick("current")
def test_grad_scaler_skips_the_same_steps(name, without_codegen):
    plain, x, unit, expected = in_high_precision()
    assert scales(plain, x, unit, "te", {"recipe": name, "fallback": strict(name)}) == expected
