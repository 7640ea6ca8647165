"""Every launch of a kernel of ours is made with its tensors' device current."""

import ast
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch

import te_inductor
from te_inductor.templates.cutlass.launch import launches

TEMPLATES = Path(te_inductor.__file__).parent / "templates"


def functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


def decorators(function: ast.FunctionDef) -> set[str]:
    return {ast.unparse(node).partition("(")[0] for node in function.decorator_list}


def test_triton():
    """A launch is `kernel[grid](...)`, which the launcher alone does."""
    files = {path.name: ast.parse(path.read_text()) for path in sorted((TEMPLATES / "triton").glob("*.py"))}
    every = [node for tree in files.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    kernels = {function.name for function in every if decorators(function) & {"triton.jit", "gluon.jit"}}
    launching = {
        name
        for name, tree in files.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and ast.unparse(node.func.value) in kernels | {"self._kernel"}
    }
    assert len(kernels) >= 30 and launching == {"launcher.py"}


def test_cutlass():
    """A launch is a call of what `_function` returned."""
    found = functions(TEMPLATES / "cutlass" / "launch.py")
    calling = [
        function
        for function in found
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_function"
    ]
    assert len(calling) >= 5
    assert [function.name for function in calling if "launches" not in decorators(function)] == []


def test_the_first_argument_decides(monkeypatch):
    current = [0]

    @contextmanager
    def device(wanted):
        current.append(wanted.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    where = launches(lambda tensor: current[-1])
    assert where(SimpleNamespace(device=torch.device("cuda:1"))) == 1
    assert where(SimpleNamespace(device=torch.device("cuda:0"))) == 0
    assert where(torch.empty(1)) == 0
    assert current == [0]
