"""Losses of a chunk of tokens, and the gradient of its logits: what `runtime.eager.losses.Softmax` does in plain torch, in
two kernels. The first reads each row of logits once; the second reads them again and casts both copies of dy, a tile of
logits at a time, so that both are written whole lines at a time."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from te_inductor.recipes.formats import Element, padded
from te_inductor.recipes.losses import Loss
from te_inductor.runtime.eager import losses
from te_inductor.templates.triton.casting import cast, exp_or_zero, quads
from te_inductor.templates.triton.launcher import launcher

ROW_BLOCK = 8192  # logits of a row that a program reads at a time
TILE = (128, 128)  # tokens and words of a program that casts


class SoftmaxKernels(losses.Softmax):
    """The two kernels, which a chunk's logits (n, V) are given to."""

    def losses(self, logits: Tensor, labels: Tensor, loss: Loss, out: Tensor, sums: Tensor) -> None:
        block = min(ROW_BLOCK, triton.next_power_of_2(logits.shape[1]))
        run = launcher(losses_of_rows, BLOCK=block, **_constants(loss), num_warps=8)
        words = logits.shape[1]
        run(len(out), logits, labels, out, sums, words, logits.stride(0), *_numbers(loss, words))

    def gradients(self, logits: Tensor, labels: Tensor, loss: Loss, sums: Tensor) -> None:
        self._cast(logits, labels, loss, sums, 1.0, None, logits, None)

    def copies(
        self,
        logits: Tensor,
        labels: Tensor,
        loss: Loss,
        sums: Tensor,
        element: Element,
        wants_row: bool,
        column: Tensor | None,
    ) -> Tensor | None:
        n, words = logits.shape
        row = logits.new_empty((n, padded(words)), dtype=element.dtype) if wants_row else None
        self._cast(logits, labels, loss, sums, loss.gradient_scale(element), element.max, row, column)
        return row

    def _cast(
        self,
        logits: Tensor,
        labels: Tensor,
        loss: Loss,
        sums: Tensor,
        scale: float,
        largest: float | None,
        row: Tensor | None,
        column: Tensor | None,
    ) -> None:
        n, words = logits.shape
        width = words if row is None else row.shape[1]
        tiles = triton.cdiv(n, TILE[0]), triton.cdiv(width, TILE[1])
        whole = n % TILE[0] == 0 and words % TILE[1] == 0
        fours = column is not None and n % 4 == 0 and column.stride(0) % 4 == 0 and column.data_ptr() % 4 == 0
        run = launcher(
            casts_of_tiles, LARGEST=largest, TOKENS=TILE[0], WORDS=TILE[1], WHOLE=whole, FOURS=fours,
            **_constants(loss), SUMS=loss.sums, num_warps=8,
        )  # fmt: skip
        run(
            tiles[0] * tiles[1], logits, labels, sums, row, column, n, words, width, logits.stride(0),
            0 if row is None else row.stride(0), 0 if column is None else column.stride(0), scale,
            *_numbers(loss, words),
        )  # fmt: skip


def _constants(loss: Loss) -> dict[str, Any]:
    return {
        "IGNORES": loss.ignored is not None,
        "SMOOTHS": loss.smoothing != 0.0,
        "SCALES": loss.inner != 1.0,
        "CAPS": loss.outer is not None,
        "SHARED": loss.shared is not None,
    }


def _numbers(loss: Loss, words: int) -> tuple[int, float, float, float, int, int]:
    ignored = 0 if loss.ignored is None else loss.ignored
    of_formula = loss.smoothing, loss.inner, 1.0 if loss.outer is None else loss.outer
    return ignored, *of_formula, *losses.part_of_words(loss, words)


@triton.jit
def tanh(x):
    """The hyperbolic tangent; NaN of NaN."""
    e = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def capped(logits, inner, outer, SCALES: tl.constexpr, CAPS: tl.constexpr):
    """What the softmax is of."""
    z = logits.to(tl.float32)
    if SCALES:
        z *= inner
    if CAPS:
        z = outer * tanh(z)
    return z


@triton.jit(do_not_specialize=["ignored", "smoothing", "inner", "outer", "first", "every"])
def losses_of_rows(
    logits,  # (n, V)
    labels,  # (n,) int64
    out,  # (n,) fp32
    sums,  # (n,) fp32, logarithms of the sums of exp
    words,  # V
    stride,
    ignored,
    smoothing,
    inner,
    outer,
    first,  # the place of the first of these words among those of all ranks
    every,  # the number of those
    BLOCK: tl.constexpr,
    IGNORES: tl.constexpr,
    SMOOTHS: tl.constexpr,
    SCALES: tl.constexpr,
    CAPS: tl.constexpr,
    SHARED: tl.constexpr,  # ranks have a part of the words each
):
    """One token a program."""
    token = tl.program_id(0).to(tl.int64)
    logits += token * stride
    largest, total, added = float("-inf"), 0.0, 0.0
    for start in range(0, words, BLOCK):
        place = start + tl.arange(0, BLOCK)
        z = capped(tl.load(logits + place, mask=place < words, other=0.0), inner, outer, SCALES, CAPS)
        if SMOOTHS:
            added += tl.sum(tl.where(place < words, z, 0.0), 0)
        z = tl.where(place < words, z, float("-inf"))
        new = tl.maximum(largest, tl.max(z, 0))
        shift = tl.where(new == float("-inf"), 0.0, new)  # words that none expects may fill a block
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(z - shift), 0)
        largest = new
    log_total = tl.where(largest == float("-inf"), 0.0, largest) + tl.log(total)
    label = tl.load(labels + token)
    place = label - first if SHARED else label
    own = (place >= 0) & (place < words)
    known = (label >= 0) & (label < every) if SHARED else own
    at_label = capped(tl.load(logits + tl.where(own, place, 0)), inner, outer, SCALES, CAPS)
    loss = tl.where(own, -at_label, 0.0) if SHARED else log_total - (1.0 - smoothing) * at_label
    if SMOOTHS:
        loss -= smoothing * added / words
    loss = tl.where(known, loss, float("nan"))
    if IGNORES:
        loss = tl.where(label == ignored, 0.0, loss)
    tl.store(out + token, loss)
    tl.store(sums + token, log_total)


# Sizes are specialized: stores are wide where masks are known to end at multiples of 16.
@triton.jit(do_not_specialize=["ignored", "scale", "smoothing", "inner", "outer", "first", "every"])
def casts_of_tiles(
    logits,  # (n, V)
    labels,  # (n,) int64
    sums,  # (n,) fp32
    row,  # (n, pad(V)), the logits themselves, or None
    column,  # (V, n), or None
    tokens,  # n
    words,  # V
    width,  # of what is written of a row
    stride,
    row_stride,
    column_stride,
    scale,
    ignored,
    smoothing,
    inner,
    outer,
    first,  # the place of the first of these words among those of all ranks
    every,  # the number of those
    LARGEST: tl.constexpr,  # of the element; None: the logits' own dtype
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    WHOLE: tl.constexpr,  # all tiles are
    FOURS: tl.constexpr,  # of the columnwise copy four tokens are a word of memory
    IGNORES: tl.constexpr,
    SMOOTHS: tl.constexpr,
    SCALES: tl.constexpr,
    CAPS: tl.constexpr,
    SHARED: tl.constexpr,  # ranks have a part of the words each
    SUMS: tl.constexpr,  # the gradient is that of the logarithm of a sum, but for the label's
):
    """One tile a program; those that follow each other share words of the vocabulary, so that lines of the columnwise copy
    are whole. Four tensors have every fourth token each, so that a thread has neighbours of a column, and what is
    transposed are words of memory: bytes take four times as many stores to shared memory."""
    down = tl.cdiv(tokens, TOKENS)
    first_token, first_word = (tl.program_id(0) % down) * TOKENS, (tl.program_id(0) // down) * WORDS
    word, four = first_word + tl.arange(0, WORDS), tl.arange(0, TOKENS // 4)
    is_word = (word < words)[None, :]
    tokens -= first_token
    logits, labels, sums = logits + first_token.to(tl.int64) * stride, labels + first_token, sums + first_token
    data = ()
    for i in tl.static_range(4):
        token = 4 * four + i
        is_token = token < tokens
        at = logits + token[:, None] * stride + word[None, :]
        z = capped(tl.load(at, mask=None if WHOLE else is_token[:, None] & is_word), inner, outer, SCALES, CAPS)
        label = tl.load(labels + token, mask=is_token, other=0)
        dz = z - tl.load(sums + token, mask=is_token, other=0.0)[:, None]
        # A cast makes zeros of the exponentials below 2**-126, which take three more instructions each.
        dz = tl.exp(dz) if LARGEST is None else exp_or_zero(dz)
        if SMOOTHS:
            dz -= smoothing / words
        known = (label >= 0) & (label < (every if SHARED else words))
        place = tl.where(known, label - first if SHARED else label, -1).to(tl.int32)
        if IGNORES and SUMS:
            place = tl.where(label == ignored, -1, place)
        at_label = place[:, None] == word[None, :]
        if SUMS:
            dz = tl.where(at_label, 0.0, dz)
        else:
            dz -= tl.where(at_label, 1.0 - smoothing, 0.0)
        if CAPS:
            of_cap = z / outer
            dz *= outer * inner * (1.0 - of_cap * of_cap)
        elif SCALES:
            dz *= inner
        instead = tl.full(label.shape, float("nan"), tl.float32)
        if IGNORES and SUMS:
            known |= label == ignored
        elif IGNORES:
            known &= label != ignored
            instead = tl.where(label == ignored, 0.0, instead)
        dz = tl.where(known[:, None], dz, instead[:, None])
        if LARGEST is None:
            dz = dz.to(row.dtype.element_ty)
        else:
            dz *= scale
            dz = dz if WHOLE else tl.where(is_word, dz, 0.0)
            dz = cast(dz, LARGEST, row.dtype.element_ty if column is None else column.dtype.element_ty)
        data += (dz,)  # type: ignore[assignment]
    if row is not None:
        row += first_token.to(tl.int64) * row_stride
        for i in tl.static_range(4):
            token = 4 * four + i
            inside = None if WHOLE else (token < tokens)[:, None] & (word < width)[None, :]
            tl.store(row + token[:, None] * row_stride + word[None, :], data[i], mask=inside)
    if column is not None:
        column += first_word.to(tl.int64) * column_stride + first_token
        at_word, inside = tl.arange(0, WORDS)[:, None], is_word.trans()
        if FOURS:
            at = column.to(tl.pointer_type(tl.uint32)) + at_word * (column_stride // 4) + four[None, :]
            tl.store(at, tl.trans(quads(*data)), mask=None if WHOLE else inside & (four < tokens // 4)[None, :])
        else:
            for i in tl.static_range(4):
                at = column + at_word * column_stride + (4 * four + i)[None, :]
                tl.store(at, tl.trans(data[i]), mask=inside & (4 * four + i < tokens)[None, :])


losses.SOFTMAX["cuda"] = SoftmaxKernels()
