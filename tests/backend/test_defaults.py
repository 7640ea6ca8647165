"""Nothing depends on torch's default device or default dtype: neither an import, nor a compile, nor a result."""

import ast

import pytest
import torch
from torch import nn

from te_inductor.numerics import nvfp4
from tests.forked import PLAIN
from tests.house import nodes

# What makes a tensor of the default device; and those of the default dtype where none is given.
OF_NUMBERS = {
    "tensor",
    "ones",
    "zeros",
    "empty",
    "full",
    "rand",
    "randn",
    "eye",
    "linspace",
    "scalar_tensor",
    "empty_strided",
}
FACTORIES = OF_NUMBERS | {"arange", "randint", "randperm"}


def test_every_factory_is_told():
    """The process that builds kernels is its own."""
    found = []
    for path, node in nodes(ast.Call):
        owner, _, name = ast.unparse(node.func).partition(".")
        given = {keyword.arg for keyword in node.keywords}
        wanted = {"device"} | ({"dtype"} if name in OF_NUMBERS else set())
        if owner == "torch" and name in FACTORIES and None not in given and not wanted <= given:
            found += [f"{path}:{node.lineno}: {ast.unparse(node)}"] * (not path.endswith("/builder.py"))
    assert found == []


@pytest.mark.thorough
def test_imports_under_a_meta_default_device():
    """Every module, and a state_dict's worth of nothing left behind: no tensor is made by an import."""
    code = """
import gc, importlib, pkgutil, torch
torch.set_default_device("meta")
torch.set_default_dtype(torch.float64)
import te_inductor
for module in pkgutil.walk_packages(te_inductor.__path__, "te_inductor."):
    # Templates need Triton, or CUTLASS; integrations import their frameworks, which make tensors.
    if not module.name.startswith(("te_inductor.templates", "te_inductor.integrations.")):
        importlib.import_module(module.name)
print(sum(type(one) is torch.Tensor for one in gc.get_objects()))
"""
    done = PLAIN.run("-c", code)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "0"


@pytest.fixture(params=["meta", torch.float64, torch.bfloat16], ids=str)
def default(request):
    """How to set, and unset, one default."""
    if isinstance(request.param, str):
        with torch.device(request.param):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


def gradients(recipe: str, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch._dynamo.reset()
    model.zero_grad()
    run = torch.compile(model, backend="te", options={"recipe": recipe, "fallback": "silent"})
    y = run(x)
    y.backward(torch.ones_like(y))
    return [y.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.quick("meta-current", "torch.float64-rowwise", "torch.bfloat16-delayed")
@pytest.mark.parametrize("recipe", ["current", "rowwise", "block", "mxfp8", "nvfp4", "delayed"])
def test_compiles_the_same(recipe, default_free, default, without_tracing, one_seed):
    found = gradients(recipe, *default_free[recipe][:2])
    assert all(torch.equal(*pair) for pair in zip(found, default_free[recipe][2], strict=True))


@pytest.fixture
def default_free(request, without_tracing, one_seed):
    """Models and results before the default is changed, each model new so that it has no state."""
    recipe = request.node.callspec.params["recipe"]
    with torch.device("cpu"):
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128)) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        x = torch.randn(128, 128)
    return {recipe: (models[1], x, gradients(recipe, models[0], x))}


def test_stored_values_are_fp32(default):
    stored = torch.zeros(2, 8, dtype=torch.uint8, device="cpu")
    scale = torch.ones(2, 1, dtype=torch.float32, device="cpu").to(torch.float8_e4m3fn)
    found = nvfp4.values(stored, scale)
    assert (found.dtype, found.device.type) == (torch.float32, "cpu")
