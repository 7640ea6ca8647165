"""Runs the kernels of output layers' losses in Triton's interpreter and compares them with plain torch: python -m
tests.offline.loss_kernels, with TRITON_INTERPRET=1."""

import itertools
import math
import os
from unittest import mock

import torch
from torch import Tensor

from te_inductor.recipes.formats import E5M2
from te_inductor.recipes.losses import Loss, SharedWords
from te_inductor.runtime.eager import losses as eager
from te_inductor.runtime.eager.losses import Softmax
from te_inductor.templates.triton.token_losses import SoftmaxKernels
from tests.hastened import WHOLE
from tests.losses import IGNORED
from tests.offline.interpret import mend_interpreter

# Whole tiles and fewer, words of four tokens and odd numbers.
SIZES = ((128, 128), (6, 37), (132, 144))
LOSSES = (
    Loss(IGNORED),
    Loss(None, smoothing=0.1),
    Loss(3, smoothing=0.1, inner=1 / 3, outer=3.0),
    Loss(3, inner=0.25),
    Loss(3, inner=1 / 3, outer=3.0, sums=True),
    Loss(IGNORED, sums=True),
    Loss(IGNORED, shared=SharedWords("", 3, 0)),
    Loss(3, inner=1 / 3, outer=3.0, shared=SharedWords("", 3, 0)),
)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Casts are equal but for what a different exponential rounds to the other side."""
    same = (found.float() == expected.float()) | (found.float().isnan() & expected.float().isnan())
    steps = (found.view(torch.int8).int() - expected.view(torch.int8).int()).abs()
    assert torch.where(same, 0, steps).max() <= 1
    assert same.float().mean() >= 0.99


def check(tokens: int, words: int, loss: Loss) -> None:
    logits, labels = (torch.randn(tokens, words) * 4).bfloat16(), torch.randint(0, words, (tokens,))
    if loss.shared is not None:  # the second of three ranks; two labels are no word of any
        labels += torch.randint(-1, 2, (tokens,)) * words + words
        labels[4], labels[5] = -1, 3 * words
        logits[0] = -math.inf
    labels[::3] = 0 if loss.ignored is None else loss.ignored
    for row, value in ((1, math.nan), (2, math.inf), (3, -math.inf)):
        logits[row, 0] = value
    outs, columns = torch.full((2, tokens), 7.0), torch.full((2, words, tokens + 16), 7, dtype=torch.uint8)
    kinds = Softmax(), SoftmaxKernels()
    sums, found = torch.full((2, tokens), 7.0)
    for kind, out, one in zip(kinds, outs, (sums, found), strict=True):
        kind.losses(logits, labels, loss, out, one)
    torch.testing.assert_close(found, sums, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-4, equal_nan=True)
    views = [one.view(E5M2.dtype)[:, 16:] for one in columns]
    rows = [kind.copies(logits, labels, loss, sums, E5M2, True, view) for kind, view in zip(kinds, views, strict=True)]
    assert_near(rows[1], rows[0])
    assert_near(views[1], views[0])
    assert columns[:, :, :16].eq(7).all()
    copies = [logits.clone() for _ in kinds]
    for kind, copy in zip(kinds, copies, strict=True):
        kind.gradients(copy, labels, loss, sums)
    torch.testing.assert_close(copies[1], copies[0], rtol=1e-2, atol=1e-5, equal_nan=True)


if __name__ == "__main__":
    mend_interpreter()
    torch.manual_seed(0)
    pairs = itertools.product if WHOLE in os.environ else lambda sizes, losses: zip(itertools.cycle(sizes), losses)
    for sizes, loss in pairs(SIZES, LOSSES):
        part = (0, sizes[1]) if loss.shared is None else (sizes[1], 3 * sizes[1])
        with mock.patch.object(eager, "part_of_words", lambda *_, part=part: part):
            check(*sizes, loss)
