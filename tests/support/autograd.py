"""Small models compiled and run eagerly, and what autograd gives for both."""

import torch
from torch import nn

from tests.eager import quantized
from tests.recipes import strict

# AOTAutograd's eager graphs save state that a backward updates, and autograd's check of versions sees the update;
# Inductor's do not: what is tested of stateless recipes here, tests/backend/test_delayed_backward.py tests compiled.
DIM = 128


X = (32, DIM)


def te(function, name, **options):
    return torch.compile(
        function, backend="te", fullgraph=True, options={"recipe": name, "fallback": strict(name), **options}
    )


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))


def loss_of(run, *inputs) -> torch.Tensor:
    torch.manual_seed(0)
    return run(*inputs).square().sum()


def results(run, parameters, *inputs) -> list[torch.Tensor | None]:
    """The output and all gradients, of inputs and parameters."""
    torch.manual_seed(0)
    y = run(*inputs)
    wanted = [tensor for tensor in (*inputs, *parameters) if tensor.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), wanted)]


def same(first, second) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def check(model: nn.Module, name: str, *inputs: torch.Tensor, **options) -> None:
    """Compiled and eager results of a model, and that these are not those of high precision."""
    eager = quantized(model, *inputs, options={"recipe": name, **options})
    expected = results(eager, list(eager.parameters()), *inputs)
    found = results(te(model, name, **options), list(model.parameters()), *inputs)
    assert same(found, expected)
    assert not torch.equal(found[0], model(*inputs))
