"""Output layers with a loss, for tests: a reference in float64, and programs as models write them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from te_inductor import ops, recipes
from te_inductor.ops import LayerSpec
from te_inductor.recipes.losses import Loss, slots_of_loss

IGNORED = -100


def operands(
    tokens: int, width: int, words: int, dtype: torch.dtype, device: str = "cpu", bias: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """x (N, K), a weight (V, K), a bias (V,) or None, and labels (N,) of which some are ignored."""
    x = torch.randn(tokens, width, dtype=dtype, device=device)
    weight = (torch.randn(words, width, device=device) * width**-0.5).to(dtype)
    labels = torch.randint(0, words, (tokens,), device=device)
    labels[3::5] = IGNORED
    return x, weight, torch.randn(words, dtype=dtype, device=device) if bias else None, labels


def results_of(recipe: str, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, loss: Loss) -> list[Tensor]:
    """The losses of tokens, and the logarithms of their sums if the loss has those, by the op of a recipe."""
    if recipe == "none":
        return ops.output_loss(x, weight, bias, labels, loss, x.dtype)  # type: ignore[no-any-return]
    slots = slots_of_loss(recipes.resolve(recipe).slots())
    assert slots is not None
    spec = LayerSpec(slots, loss=loss)
    return ops.layers(x, [weight], [] if bias is None else [bias], spec, x.dtype, labels=labels)  # type: ignore[no-any-return]


def losses_of(recipe: str, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, loss: Loss) -> Tensor:
    """The losses alone."""
    return results_of(recipe, x, weight, bias, labels, loss)[0]


def reference_logits(x: Tensor, weight: Tensor, bias: Tensor | None, loss: Loss) -> Tensor:
    """What the softmax is of, in float64."""
    logits = F.linear(x.double(), weight.double(), None if bias is None else bias.double()) * loss.inner
    return logits if loss.outer is None else loss.outer * torch.tanh(logits)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, loss: Loss) -> Tensor:
    """The same in float64, as torch has it."""
    logits = reference_logits(x, weight, bias, loss)
    ignored = IGNORED if loss.ignored is None else loss.ignored
    return F.cross_entropy(logits, labels, ignore_index=ignored, reduction="none", label_smoothing=loss.smoothing)


def gradients(
    run: Callable[..., Tensor], given: tuple[Tensor, Tensor, Tensor | None, Tensor], factors: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The losses, and the gradients of x, the weight and the bias, of the losses' sum with these factors."""
    leaves = [None if one is None else one.detach().clone().requires_grad_() for one in given[:3]]
    found = run(*leaves, given[3])
    (found * factors.to(found.dtype)).sum().backward()
    return found.detach(), [leaf.grad for leaf in leaves if leaf is not None]  # type: ignore[misc]


def error(found: Tensor, wanted: Tensor) -> float:
    """The norm of the difference, in parts of the wanted one's."""
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()
