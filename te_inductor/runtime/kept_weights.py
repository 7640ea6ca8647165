"""Low-precision copies of weights that outlive a call: made anew where the weight has changed, and only there.

# Note [A weight that has not changed]
Nothing on the host knows whether a weight has changed. torch's own `AdamW(fused=True)` writes without a trace in
`p._version` (2.13), as do `p.data.mul_()`, other optimizers' kernels, collectives and FSDP; and a copy that is not the
weight's would be a wrong model without a word. So each call looks at the weight itself: it reads it once and compares a
64-bit digest with that of the weight the copies were made of. On a GPU the comparison and what follows from it stay there:
a cast whose weight is the same returns before it reads (`templates/triton/kept_weights.py`). Whatever happens to a
parameter, its address, its storage, its `.data`, and whichever tensor is handed in its place, the copies are those of the
values that are there, also where a CUDA graph is replayed.

What it saves, of a weight in bf16, in bytes moved an element: 2 instead of 8 (amax, the cast of the row copy, and that of
the column copy in the backward), instead of 6 under delayed scaling, which knows the scale, or with square blocks, whose
copies are made together; where the weight has changed it is 6. What it costs: the copies, 2 bytes an element in training
and 1 in inference, stay between calls, where otherwise each dies behind its GEMM.

The digest: ``sum(mix(word[i] + (i + 1) * GOLDEN)) mod 2**64`` over the weight's bytes as 64-bit words. `mix` is a bijection
(two rounds of multiply and xor with the high half, as in SplitMix64), so weights that differ in one word have different
digests; others have the same one with a probability of 2**-64. The sum may be taken in any order.

Under delayed scaling the scale comes from the state, and copies are stale too where it has changed; the amax is recorded at
each call, as it is where weights are cast at each call. Of two microbatches in flight the first one's backward reads the
copies as the second one's forward left them, of the same weight with the newer scale.

A backward that is still to come reads the copies of its forward. Where a weight changes in between *and* another forward
runs, they are overwritten; autograd's own check finds that, as in eager code, by the version counters: those of the copies
go up where that of a weight has. What hides a change from `_version` hides it from that check, there as here.

# Note [Calls that do not look]
A look is worth its read where it may find the weight as it was: in a step's second microbatch and those behind it. Where the
last step had one call, a step's first one casts without a look, leaves no digest, and costs what a cast at each call does.
That a step begins is taken from `grad is None`; where they are elsewhere, as in a `main_grad`, all calls are one step's.
It decides about time alone: copies cast without a look are the weight's whatever has happened, and the next look finds no
digest and casts again. What has to find its amax first reads the whole weight for that, and looks by the way. With
``weights="once"`` each call looks.
"""

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from te_inductor.recipes import DelayedScaling
from te_inductor.recipes.quantizers import Quantizer
from te_inductor.runtime import delayed, eager

GOLDEN = 0x9E3779B97F4A7C15
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # SplitMix64's multipliers
WORD = 8  # bytes


class Spec(NamedTuple):
    """Which copies of a parameter."""

    quantizer: Quantizer
    transposed: bool  # the parameter holds (K, N)
    pieces: int  # how many parameters are one weight, one below the other
    recipe: DelayedScaling | None = None  # whose state has the scale; None: it is found from the weight


@dataclass(eq=False)
class Kept:
    """The copies of one weight (N, K), of one or several parameters. On which all is in place: compiled graphs and CUDA
    graphs hold these tensors."""

    spec: Spec
    sizes: tuple[tuple[int, int], ...]  # of the parameters
    data: Tensor  # (N, pad(K)), zeros in the padding, or NaN where it shares a block of MXFP8 with one
    scale_inv: Tensor
    seen: Tensor  # (3,) int64: the digest of what the copies were made of; 1 where there is any; bits of a given scale
    data_t: Tensor | None = None  # (K, pad(N)), where a gradient of the input has been wanted
    scale_inv_t: Tensor | None = None
    amax: Tensor | None = None  # () fp32, of scales of two levels
    versions: tuple[int, ...] | None = None  # of the parameters, at the last look
    stream: object = None  # CUDA's, of the last look

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return self.taken(columns=True)

    def taken(self, columns: bool) -> list[Tensor]:
        """As a graph takes them, which may read no column copy."""
        copies = (self.data, self.scale_inv, *([self.data_t, self.scale_inv_t] if columns else []), self.amax)
        return [t for t in copies if t is not None]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)"""
        return weight_shape(self.spec, self.sizes)

    def fits(self, weights: Sequence[Tensor]) -> bool:
        return self.seen.device == weights[0].device and self.sizes == tuple(tuple(w.shape) for w in weights)

    def want_columns(self) -> None:
        """Have column copies from now on."""
        if self.data_t is None:
            self.data_t, self.scale_inv_t = _empty(self.spec.quantizer, self.shape[::-1], self.data)
            self.seen.zero_()

    def note(self, weights: Sequence[Tensor]) -> None:
        """What autograd has to know of what this call may write."""
        versions = tuple(0 if w.is_inference() else w._version for w in weights)
        if self.versions not in (None, versions):
            torch.autograd.graph.increment_version(self.tensors)
        self.versions = versions


class Look(NamedTuple):
    """One weight before a call."""

    kept: Kept
    weights: Sequence[Tensor]  # its parameters
    scale: Tensor | None = None  # () fp32, given by delayed scaling
    amax: Tensor | None = None  # () fp32, where delayed scaling is to record the weight's


def is_read_first(quantizer: Quantizer, known: bool) -> bool:
    """Whether a cast waits for the amax of the whole weight; `known` is whether delayed scaling gives the scale."""
    scope = quantizer.granularity
    return scope.two_level or (scope.whole and not known)


def weight_shape(spec: Spec, sizes: Sequence[Sequence[int]]) -> tuple[int, int]:
    rows, columns = sum(size[0] for size in sizes), sizes[0][1]
    return (columns, rows) if spec.transposed else (rows, columns)


def _empty(quantizer: Quantizer, shape: tuple[int, int], like: Tensor) -> tuple[Tensor, Tensor]:
    scope = quantizer.granularity
    data = like.new_zeros((shape[0], quantizer.stored(shape[1])), dtype=torch.uint8).view(quantizer.format.dtype)
    return data, like.new_ones(scope.scale_shape(*shape), dtype=scope.scale.dtype)


def new(spec: Spec, weights: Sequence[Tensor]) -> Kept:
    """Copies that are yet to be made. Outside of inference mode: a training step may be the next to write them."""
    with torch.inference_mode(False), torch.no_grad():
        like, sizes = weights[0].detach(), tuple((int(w.shape[0]), int(w.shape[1])) for w in weights)
        tensors = _empty(spec.quantizer, weight_shape(spec, sizes), like)
        amax = like.new_zeros((), dtype=torch.float32) if spec.quantizer.granularity.two_level else None
        return Kept(spec, sizes, *tensors, like.new_zeros(3, dtype=torch.int64), amax=amax)


@dataclass
class _Owned:
    kept: Kept
    others: list[weakref.ref[Tensor]] = field(default_factory=list)  # the parameters beside the first


_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # first parameter: {Spec: _Owned}
LOCK = threading.RLock()  # two threads may call one model


def kept_of(spec: Spec, weights: Sequence[Tensor], columns: bool) -> Kept:
    """Those of these parameters, whichever graph asks."""
    owned: dict[Spec, _Owned] = _kept.setdefault(weights[0], {})
    found = owned.get(spec)
    if found is None or not found.kept.fits(weights) or not _same(found.others, weights[1:]):
        found = _Owned(new(spec, weights), [weakref.ref(w) for w in weights[1:]])
        owned[spec] = found
    if columns:
        with torch.inference_mode(False), torch.no_grad():
            found.kept.want_columns()
    return found.kept


def _same(references: Sequence[weakref.ref[Tensor]], weights: Sequence[Tensor]) -> bool:
    return all(ref() is weight for ref, weight in zip(references, weights, strict=True))


def forget() -> None:
    """Let go of all copies that no compiled graph holds."""
    _kept.clear()


@torch.no_grad()
def refresh(looks: Sequence[Look], anew: bool = False) -> None:
    """Look at the weights, in plain torch, and make what is stale anew; or all: Note [Calls that do not look]."""
    for look in looks:
        # The same memory, so that autograd learns of changes from `note` alone, as on a GPU.
        pieces = [parameter.detach() for parameter in look.weights]
        if anew and not is_read_first(look.kept.spec.quantizer, look.scale is not None):
            _make(look.kept, pieces, look.scale)
            look.kept.seen.data[1] = 0
        elif look.kept.seen.tolist() != (found := [digest(pieces), 1, _bits(look.scale)]):
            _make(look.kept, pieces, look.scale)
            look.kept.seen.data.copy_(torch.tensor(found))
        if look.amax is not None:
            delayed.record_amax(pieces, look.amax)


def _bits(scale: Tensor | None) -> int:
    return 0 if scale is None else int(scale.view(torch.int32))


def _make(kept: Kept, pieces: list[Tensor], scale: Tensor | None) -> None:
    quantizer = kept.spec.quantizer
    w = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    w = w.t() if kept.spec.transposed else w
    data_t = None
    if quantizer.granularity.whole:
        scale, scale_inv = eager.current_scale([w], quantizer) if scale is None else (scale, 1.0 / scale)
        data, scale_inv_t = eager.quantize_delayed(w, scale, quantizer), scale_inv
        if kept.data_t is not None:
            data_t = eager.quantize_delayed(w.t(), scale, quantizer)
    else:
        amax = None if kept.amax is None else kept.amax.data.copy_(eager.tensor_amax(w))
        data, scale_inv = eager.quantize(w, quantizer, amax)
        if kept.data_t is not None:
            data_t, scale_inv_t = eager.quantize(w.t(), quantizer, amax)
    kept.data.data.copy_(data)
    kept.scale_inv.data.copy_(scale_inv)
    if kept.data_t is not None and kept.scale_inv_t is not None:
        kept.data_t.data.copy_(data_t)  # type: ignore[arg-type]
        kept.scale_inv_t.data.copy_(scale_inv_t)


def digest(pieces: Sequence[Tensor]) -> int:
    """Of contiguous tensors one behind the other, each of whole words; as a signed integer."""
    total, first = 0, 0
    for piece in pieces:
        words = piece.contiguous().view(-1).view(torch.int64)
        index = torch.arange(first + 1, first + 1 + words.numel(), device=words.device)
        value = words + index * _signed(GOLDEN)
        for factor in MIX:
            value = (value ^ _high(value)) * _signed(factor)
        total += int((value ^ _high(value)).sum())
        first += words.numel()
    return _signed(total % 2**64)


def _high(value: Tensor) -> Tensor:
    """A logical shift: torch's is arithmetic."""
    return (value >> 32) & 0xFFFFFFFF


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
