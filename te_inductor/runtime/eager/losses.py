"""Cross entropy of an output layer's tokens, a chunk of them at a time, in plain torch but for what a device has kernels
for.

# Note [Loss of chunks]
Logits of all tokens are the largest tensor of a training step, and they are needed for two things alone: each token's
loss, and the gradient of the logits, dy, which is the softmax less one at the label. So both are computed of a chunk of
tokens while its logits exist. dx = dy w is computed of the chunk too. dw = dyᵀ x is one product of all tokens, in the
backward, as where a GEMM adds to what another one has written, memory takes longer than the products do.

dy is computed before the gradients of the losses are known: g of a token, which is 1 / N of a mean, and anything else
of what a program makes of the losses. dx of a token is g dx₁, dx₁ being that of a loss whose gradient is 1, and
dw = dy₁ᵀ (g x): a factor of rows can be in either operand. So nothing is computed twice, whatever g is.

dy₁ is at most 1, or what a cap and a factor of the logits make of that, so that its scale in low precision is known
before it is computed: no pass for its amax. What is kept for the backward is its columnwise copy, one byte for each token
and word of the vocabulary, where a graph in bf16 has two: the logits, which their gradient is written over.

The logarithms of the softmax's sums may be results beside the losses, as a z-loss reads them. With h, the gradient of
one, that of a token's logits is (g + h) p, of probabilities p, and at the label f = g (p - 1) + h p. Neither g nor h is
known before the backward. So dy₁ is p with a zero at the label: dx = (g + h) dx₁ + f w[label], and f x is added to the
label's row of dw. With p - 1 at the label instead, and h added there, a gradient of the sums alone would be what is left
of two large numbers, one of them in low precision.

Ranks may share the words, each with a part of the weight's rows (`Loss.shared`). A rank computes a chunk's logits of
its own words, their logarithm of a sum and the label's logit if it has that word. These two numbers a token go to all
ranks, which find the sum of all words and the loss from them: one small gather a chunk, of as many tokens on each rank.
All else is of a rank's own words. So the gradient of x is a part of a sum over ranks, as behind any such layer.

The label of a token may be none: its loss and its gradient are zero. A label outside of the vocabulary has an error on
the CPU; on a GPU, and of words that ranks share, its loss and its gradients are NaN, as an error on a GPU would have to
be waited for, and one of a rank would leave the others in a gather."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributed as dist

from te_inductor.distributed import amax_groups
from te_inductor.distributed.parallel import Ranks, gather
from te_inductor.recipes import Slots
from te_inductor.recipes.formats import Element, padded
from te_inductor.recipes.losses import Loss
from te_inductor.runtime.eager import dense

CHUNK_BYTES = 2**28  # of the logits of a chunk; in high precision, whose products are slower in parts, twice as many
# With so many, what a chunk takes, its logits and their gradient, and the copy of the gradient that is kept are less than
# the logits in bf16, which a program in bf16 has.
LEAST_CHUNKS = 4
ROWS = 128  # of which a chunk has a multiple, so that tiles of a GEMM are full


def chunks(tokens: int, words: int, loss: Loss, element_bytes: float) -> Iterator[slice]:
    """The tokens that are computed at a time, of logits of so many bytes; the same on all ranks that share words."""
    row_bytes = int((words if loss.shared is None else loss.shared.most) * element_bytes)
    most = min(CHUNK_BYTES // max(row_bytes, 1), -(-tokens // LEAST_CHUNKS))
    rows = max(most // ROWS, 1) * ROWS
    for start in range(0, tokens, rows):
        yield slice(start, min(start + rows, tokens))


def part_of_words(loss: Loss, words: int) -> tuple[int, int]:
    """The place among all words of the first of these, which are a rank's, and how many there are on all ranks."""
    if loss.shared is None:
        return 0, words
    return dist.get_rank(amax_groups.process_group(loss.shared.group)) * loss.shared.most, loss.shared.words


class Softmax:
    """What is computed of a chunk's logits (n, V). In plain torch."""

    def losses(self, logits: Tensor, labels: Tensor, loss: Loss, out: Tensor, sums: Tensor) -> None:
        """Writes each token's loss into `out` (n,), and the logarithms of the softmax's sums into `sums` (n,). Where
        ranks share the words, `out` has the loss without that sum: minus the label's logit, zero where it is another
        rank's."""
        z, _ = _capped(logits, loss)
        known = _labels(labels, loss, logits.shape[1])
        found = z.logsumexp(1)
        sums.copy_(torch.where(found == torch.inf, torch.nan, found))  # as of what is divided by an infinity
        at_label = z.gather(1, known.places[:, None]).squeeze(1)
        if known.own is not None:
            found = known.or_nan(torch.where(known.own, -at_label, 0.0))
        else:
            found = sums - (1 - loss.smoothing) * at_label
        if loss.smoothing:
            found = found - loss.smoothing * z.mean(1)
        out.copy_(found if known.kept is None else torch.where(known.kept, found, 0.0))

    def gradients(self, logits: Tensor, labels: Tensor, loss: Loss, sums: Tensor) -> None:
        """Puts the gradient of the losses in the place of the logits."""
        logits.copy_(self._gradients(logits, labels, loss, sums))

    def copies(
        self,
        logits: Tensor,
        labels: Tensor,
        loss: Loss,
        sums: Tensor,
        element: Element,
        wants_row: bool,
        column: Tensor | None,  # (V, n), part of the columnwise copy
    ) -> Tensor | None:  # (n, pad(V))
        """Casts the gradient, and writes its columnwise copy into `column`."""
        scaled = self._gradients(logits, labels, loss, sums)
        data = dense.saturate(scaled, sums.new_tensor(loss.gradient_scale(element)), element.max, element.dtype)
        if column is not None:
            column.view(torch.uint8).copy_(data.view(torch.uint8).t())
        if not wants_row:
            return None
        return F.pad(data.view(torch.uint8), (0, padded(data.shape[1]) - data.shape[1])).view(element.dtype)

    def _gradients(self, logits: Tensor, labels: Tensor, loss: Loss, sums: Tensor) -> Tensor:
        z, slope = _capped(logits, loss)
        known = _labels(labels, loss, logits.shape[1])
        kept, places = known.kept, known.places[:, None]
        dz = torch.exp(z - sums[:, None]) - loss.smoothing / logits.shape[1]
        if loss.sums:
            at_label = 0.0 if kept is None else torch.where(kept[:, None], 0.0, dz.gather(1, places))
            return dz.scatter(1, places, at_label) * slope
        at_label = torch.full_like(sums, loss.smoothing - 1)
        if known.own is not None:
            at_label = torch.where(known.own, at_label, 0.0)
        dz = known.or_nan(dz.scatter_add_(1, places, at_label[:, None]))
        return dz * slope if kept is None else torch.where(kept[:, None], dz * slope, 0.0)


PLAIN = Softmax()
SOFTMAX: dict[str, Softmax] = {}  # by types of devices, of those that have kernels


def _capped(logits: Tensor, loss: Loss) -> tuple[Tensor, Tensor | float]:
    """What the softmax is of, in fp32, and its derivative by the logits."""
    z = logits.float() * loss.inner
    if loss.outer is None:
        return z, loss.inner
    z = torch.tanh(z)
    return loss.outer * z, loss.inner * loss.outer * (1 - z * z)


class _Labels(NamedTuple):
    """The labels of tokens, each (n,)."""

    places: Tensor  # of the words among a row's logits; zero where there is none
    kept: Tensor | None  # which tokens have a label; None: all have
    own: Tensor | None = None  # of words that ranks share, whether it is one of this rank's
    exist: Tensor | None = None  # likewise, whether it is one of any rank's

    def or_nan(self, found: Tensor) -> Tensor:
        """What is found of each token, (n,) or (n, V), and NaN of labels outside of a vocabulary that ranks share."""
        if self.exist is None:
            return found
        return torch.where(self.exist if found.dim() == 1 else self.exist[:, None], found, torch.nan)


def _labels(labels: Tensor, loss: Loss, words: int) -> _Labels:
    kept = None if loss.ignored is None else labels != loss.ignored
    if loss.shared is None:
        return _Labels(labels if kept is None else torch.where(kept, labels, 0), kept)
    first, every = part_of_words(loss, words)
    places = labels - first
    own = (places >= 0) & (places < words)
    own = own if kept is None else own & kept
    return _Labels(torch.where(own, places, 0), kept, own, (labels >= 0) & (labels < every))


def _add_ranks(loss: Loss, labels: Tensor, losses: Tensor, sums: Tensor) -> None:
    """Makes losses and sums (n,) of all words of those of each rank's."""
    if loss.shared is None:
        return
    ranks = Ranks(loss.shared.group, loss.shared.ranks)
    of_labels, of_sums = gather(torch.stack([losses, sums]), 0, ranks).view(ranks.ranks, 2, -1).unbind(1)
    sums.copy_(of_sums.logsumexp(0))
    found = sums + of_labels.sum(0)
    losses.copy_(found if loss.ignored is None else torch.where(labels == loss.ignored, 0.0, found))


def _rows_of(scale: Tensor, rows: int, part: slice) -> Tensor:
    """The scales of some of a matrix's rows."""
    if scale.dim() == 1:  # of blocks, stored with rows last
        return scale.view(-1, rows)[:, part].flatten()
    return scale[part] if scale.dim() else scale


def token_losses(
    x: Tensor,  # (N, K)
    weight: Tensor,  # (V, K), of x's dtype
    bias: Tensor | None,  # (V,)
    labels: Tensor,  # (N,) int64
    loss: Loss,
    wants_dx: bool,
    wants_dy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses in high precision, (N,) fp32, the logarithms of the softmax's sums, (N,) fp32, and dx (N, K) and dy (N, V) of
    losses whose gradients are 1, or empty. The gradient takes the place of the logits that it is computed from."""
    n, words = x.shape[0], weight.shape[0]
    losses, sums = (x.new_empty((n,), dtype=torch.float32) for _ in range(2))
    dx = x.new_empty((n if wants_dx else 0, x.shape[1]))
    dy = x.new_empty((n if wants_dy else 0, words))
    softmax = SOFTMAX.get(x.device.type, PLAIN)
    with torch.autocast(x.device.type, enabled=False):  # the op may run inside the user's autocast region
        for part in chunks(n, words, loss, x.element_size() / 2):
            logits = dy[part] if wants_dy else x.new_empty((part.stop - part.start, words))
            torch.mm(x[part], weight.t(), out=logits)
            if bias is not None:
                logits += bias
            softmax.losses(logits, labels[part], loss, losses[part], sums[part])
            _add_ranks(loss, labels[part], losses[part], sums[part])
            if wants_dx or wants_dy:
                softmax.gradients(logits, labels[part], loss, sums[part])
            if wants_dx:
                torch.mm(logits, weight, out=dx[part])
            del logits  # before the next chunk has its own
    return losses, sums, dx, dy


def scaled_token_losses(
    x: Tensor,  # (N, K), low precision
    x_scale: Tensor,
    weight: Tensor,  # (V, pad(K)), low precision
    weight_scale: Tensor,
    columns: Tensor | None,  # (K, pad(V)), the weight's columnwise copy, where dx is wanted
    columns_scale: Tensor | None,
    bias: Tensor | None,  # (V,)
    labels: Tensor,  # (N,) int64
    loss: Loss,
    slots: Slots,
    dtype: torch.dtype,  # of the logits
    wants_dy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # losses and sums; dx (N, K), dy columnwise (V, pad(N)), as above
    """Losses of operands in low precision."""
    n, words, element = x.shape[0], weight.shape[0], slots.grad_output.format
    losses, sums = (x.new_empty((n,), dtype=torch.float32) for _ in range(2))
    dx = x.new_empty((0, 0) if columns is None else (n, columns.shape[0]), dtype=dtype)
    dy = x.new_empty((words if wants_dy else 0, padded(n)), dtype=element.dtype)
    dy.view(torch.uint8)[:, n:] = 0
    inverse = torch.full((), 1 / loss.gradient_scale(element), dtype=torch.float32, device=x.device)
    softmax = SOFTMAX.get(x.device.type, PLAIN)
    for part in chunks(n, words, loss, dtype.itemsize):
        logits = dense.scaled_mm(x[part], _rows_of(x_scale, n, part), weight, weight_scale, bias, slots.fprop, dtype)
        softmax.losses(logits, labels[part], loss, losses[part], sums[part])
        _add_ranks(loss, labels[part], losses[part], sums[part])
        row = None
        if columns is not None or wants_dy:
            column = dy[:, part] if wants_dy else None
            row = softmax.copies(logits, labels[part], loss, sums[part], element, columns is not None, column)
        del logits  # before the next chunk has its own
        if row is not None and columns is not None and columns_scale is not None:
            dx[part] = dense.scaled_mm(row, inverse, columns, columns_scale, None, slots.dgrad, dtype)
        del row
    return losses, sums, dx, dy
