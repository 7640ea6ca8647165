"""Low-precision copies of weights that outlive a call: made anew where the weight has changed, and only there.

Experts' weights, (E, N, K), are E weights whose copies stand in one tensor: each expert has its own digests and scales,
and is cast by itself where it has changed.

# Note [A weight that has not changed]
Nothing on the host knows whether a weight has changed. torch's own `AdamW(fused=True)` writes without a trace in
`p._version` (2.13), as do `p.data.mul_()`, other optimizers' kernels, collectives and FSDP; and a copy that is not the
weight's would be a wrong model without a word. So each call looks at the weight itself: it reads it once and compares
64-bit digests with those of the weight the copies were made of. On a GPU the comparison and what follows from it stay
there (`templates/triton/cached_weights.py`). Whatever happens to a parameter, its address, its storage, its `.data`,
and whichever tensor is handed in its place, the copies are those of the values that are there, also where a CUDA graph
is replayed.

A tile of 128 x 128 that can be cast by itself has a digest of its own: with blocks for scales, and under
delayed scaling, which knows the scale (its bits are part of the digest). The kernel that would cast it holds it when it
finds that the digest is the same, and writes nothing. What has to find an amax of the weight, or those of its rows and
columns, before any of it can be cast has one digest, and is read a second time where it has changed.

In bytes moved an element, a weight in bf16 that has not changed costs 2; one that has 4 by tiles, 6 where it is read
twice. Cast at each call it is 6 by tiles of which the backward reads the weight again, 4 with square blocks, whose
copies are made together, and 8 with an amax. What it costs: the copies, 2 bytes an element in training and 1 in
inference, stay between calls, where otherwise each dies behind its GEMM.

The digest of a tile: its bytes are 64-bit words, with zeros behind the weight's ends. Every sixteenth row of a column
of words is added to a chain, ``chain = mix(chain) + word``, which begins with the chain's position; the ends of all
chains are mixed twice more and added up mod 2**64. `mix`, a product with the xor of a word and its own high half, as in
SplitMix64, is a bijection. So tiles that differ in one word have different digests, and others the same one with a
probability of 2**-64. The digest of a weight is the sum over its tiles.

Under delayed scaling the amax is recorded at each call, as it is where weights are cast at each call. Of two
microbatches in flight the first one's backward reads the copies as the second one's forward left them, of the same
weight with the newer scale.

A backward that is still to come reads the copies of its forward. Where another look came in between, of a later forward
with perhaps other weights, it looks again itself, before it runs (`cached_inputs.py`): then it reads copies of the
weights as they are, as eager code's reads weights. Is a change seen by `_version`, eager code's is an error, and so is
this one: the version counters of the copies go up where that of a weight has. Compiled autograd, which traces a
backward, leaves that out."""

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from te_inductor.recipes import DelayedScaling
from te_inductor.recipes.formats import ROW
from te_inductor.recipes.quantizers import Quantizer
from te_inductor.runtime.eager import delayed, dense
from te_inductor.tensor_tables import TensorGroups

GOLDEN = 0x9E3779B97F4A7C15
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # SplitMix64's multipliers
WORD = 8  # bytes
_BITS = {2: torch.int16, 4: torch.int32}  # of an element, by its size
TILE = 128  # rows and columns that have a digest, where each is cast by itself
STEP = 16  # rows of a tile that are read at once


class Spec(NamedTuple):
    """A kind of copies of a parameter."""

    quantizer: Quantizer
    transposed: bool  # the parameter holds (K, N)
    pieces: int  # how many parameters are one weight, one below the other
    recipe: DelayedScaling | None = None  # whose state has the scale; None: it is found from the weight


@dataclass(eq=False)
class CachedWeight:
    """The copies of one weight (N, K), or of E experts' (E, N, K), of one or several parameters. On which all is in
    place: compiled graphs and CUDA graphs hold these tensors. Experts' have one more dimension in front, E."""

    spec: Spec
    sizes: tuple[tuple[int, ...], ...]  # of the parameters
    dtype: torch.dtype  # and theirs: a digest is of bits
    data: Tensor  # (N, pad(K)), zeros in the padding, or NaN where it shares a block of MXFP8 with one
    scale_inv: Tensor
    digests: Tensor  # int64, of what the copies were made of, one parameter's behind another's; 0: of nothing
    data_t: Tensor | None = None  # (K, pad(N)), where a gradient of the input has been wanted
    scale_inv_t: Tensor | None = None
    amax: Tensor | None = None  # () fp32, of scales of two levels, which experts' copies do not have
    versions: tuple[int, ...] | None = None  # of the parameters, at the last look
    looks: int = 0  # so many, so that a backward knows whether its forward's was the last
    stream: object = None  # CUDA's, of the last look

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return self.taken(columns=True)

    def taken(self, columns: bool) -> list[Tensor]:
        """The tensors that a graph takes, which may read no column copy."""
        copies = (self.data, self.scale_inv, *([self.data_t, self.scale_inv_t] if columns else []), self.amax)
        return [t for t in copies if t is not None]

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, K), or (E, N, K)"""
        return weight_shape(self.spec, self.sizes)

    def fits(self, weights: Sequence[Tensor]) -> bool:
        sizes, (first, *_) = tuple(tuple(w.shape) for w in weights), weights
        return (self.digests.device, self.dtype, self.sizes) == (first.device, first.dtype, sizes)

    def want_columns(self) -> None:
        """Have column copies from now on."""
        if self.data_t is None:
            self.data_t, self.scale_inv_t = _empty(self.spec.quantizer, turned(self.shape), self.data)
            self.digests.zero_()

    def expert(self, place: int) -> "CachedWeight":
        """The copies of one expert, in the same memory."""
        data_t, scale_inv_t = (None if t is None else t[place] for t in (self.data_t, self.scale_inv_t))
        sizes = tuple(size[1:] for size in self.sizes)
        mine = self.data[place], self.scale_inv[place], self.digests[place]
        return CachedWeight(self.spec, sizes, self.dtype, *mine, data_t, scale_inv_t)

    def note(self, weights: Sequence[Tensor]) -> None:
        """What autograd has to know of what this call may write."""
        versions = tuple(0 if w.is_inference() else w._version for w in weights)
        if self.versions not in (None, versions):
            torch.autograd.graph.increment_version(self.tensors)
        self.versions = versions
        self.looks += 1


class FreshnessCheck(NamedTuple):
    """One weight before a call."""

    cached: CachedWeight
    weights: Sequence[Tensor]  # its parameters
    scale: Tensor | None = None  # () fp32, given by delayed scaling
    amax: Tensor | None = None  # () fp32, where delayed scaling is to record the weight's


def matrices(looks: Sequence[FreshnessCheck]) -> Iterator[FreshnessCheck]:
    """The checks of weights of two dimensions: one of each expert in the place of experts'."""
    for look in looks:
        if len(look.cached.sizes[0]) == 2:
            yield look
            continue
        for place in range(look.cached.sizes[0][0]):
            mine = [parameter.detach()[place] for parameter in look.weights]
            yield look._replace(cached=look.cached.expert(place), weights=mine)


def is_tiled(spec: Spec) -> bool:
    """Whether a tile of the weight can be cast by itself."""
    scope = spec.quantizer.granularity
    return not scope.two_level and (scope.blocked or (scope.whole and spec.recipe is not None))


def tiles(size: Sequence[int]) -> tuple[int, int]:
    """How many lie below and beside each other in a parameter."""
    return -(-size[0] // TILE), -(-size[1] // TILE)


def weight_shape(spec: Spec, sizes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    *experts, _, columns = sizes[0]
    shape = (*experts, sum(size[-2] for size in sizes), columns)
    return turned(shape) if spec.transposed else shape


def turned(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the transposed matrix, or matrices."""
    *experts, rows, columns = shape
    return *experts, columns, rows


def stored_shapes(quantizer: Quantizer, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of a copy's values and scales. Experts' scales are those that `ops.quantize_experts` returns."""
    scope, (*experts, rows, columns) = quantizer.granularity, shape
    scales = scope.scale_shape(rows, columns)
    scales = scales[:1] if experts and scope is ROW else scales
    return (*experts, rows, quantizer.stored(columns)), (*experts, *scales)


def _empty(quantizer: Quantizer, shape: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
    stored, scales = stored_shapes(quantizer, shape)
    data = like.new_zeros(stored, dtype=torch.uint8).view(quantizer.format.dtype)
    return data, like.new_ones(scales, dtype=quantizer.granularity.scale.dtype)


def new(spec: Spec, weights: Sequence[Tensor], copy: tuple[Tensor, Tensor] | None = None) -> CachedWeight:
    """Copies that are yet to be made, by default in memory of their own: values and scales. Outside of inference mode: a
    training step may be the next to write them."""
    with torch.inference_mode(False), torch.no_grad():
        like, sizes = weights[0].detach(), tuple(tuple(map(int, w.shape)) for w in weights)
        tensors = copy or _empty(spec.quantizer, weight_shape(spec, sizes), like)
        amax = like.new_zeros((), dtype=torch.float32) if spec.quantizer.granularity.two_level else None
        count = sum(math.prod(tiles(size[-2:])) for size in sizes) if is_tiled(spec) else 1
        stored = like.new_zeros((*sizes[0][:-2], count), dtype=torch.int64)
        return CachedWeight(spec, sizes, like.dtype, *tensors, stored, amax=amax)


_cached: TensorGroups[dict[Spec, CachedWeight]] = TensorGroups()  # by the parameters
LOCK = threading.RLock()  # two threads may call one model


def cached_of(spec: Spec, weights: Sequence[Tensor], columns: bool) -> CachedWeight:
    """The copies of these parameters, whichever graph asks."""
    mine = _cached.get(weights)
    if mine is None:
        _cached.set(weights, mine := {})
    found = mine.get(spec)
    if found is None or not found.fits(weights):
        mine[spec] = found = new(spec, weights)
    if columns:
        with torch.inference_mode(False), torch.no_grad():
            found.want_columns()
    return found


def forget() -> None:
    """Let go of all copies that no compiled graph holds."""
    _cached.clear()


@torch.no_grad()
def refresh(looks: Sequence[FreshnessCheck]) -> None:
    """Look at the weights, in plain torch, and make what is stale anew."""
    for look in matrices(looks):
        # The same memory, so that autograd learns of changes from `note` alone, as on a GPU.
        pieces = [parameter.detach() for parameter in look.weights]
        found = digests(look.cached.spec, pieces, look.scale)
        if not torch.equal(look.cached.digests, found):
            _make(look.cached, pieces, look.scale)
            look.cached.digests.data.copy_(found)
        if look.amax is not None:
            delayed.record_amax(pieces, look.amax)


def _make(cached: CachedWeight, pieces: list[Tensor], scale: Tensor | None) -> None:
    quantizer = cached.spec.quantizer
    w = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    w = w.t() if cached.spec.transposed else w
    data_t = None
    if quantizer.granularity.whole:
        scale, scale_inv = dense.current_scale([w], quantizer) if scale is None else (scale, 1.0 / scale)
        data, scale_inv_t = dense.quantize_delayed(w, scale, quantizer), scale_inv
        if cached.data_t is not None:
            data_t = dense.quantize_delayed(w.t(), scale, quantizer)
    else:
        amax = None if cached.amax is None else cached.amax.data.copy_(dense.tensor_amax(w))
        data, scale_inv = dense.quantize(w, quantizer, amax)
        if cached.data_t is not None:
            data_t, scale_inv_t = dense.quantize(w.t(), quantizer, amax)
    cached.data.data.copy_(data)
    cached.scale_inv.data.copy_(scale_inv.reshape(cached.scale_inv.shape))
    if cached.data_t is not None and cached.scale_inv_t is not None:
        cached.data_t.data.copy_(data_t)  # type: ignore[arg-type]
        cached.scale_inv_t.data.copy_(scale_inv_t.reshape(cached.scale_inv_t.shape))


def digests(spec: Spec, pieces: Sequence[Tensor], scale: Tensor | None = None) -> Tensor:
    """Digests contiguous tensors one above the other: of each tile, or the sum of them."""
    found: list[Tensor] = []
    for piece in pieces:
        found.append(_digests(piece, sum(map(len, found))))
    digest = torch.cat(found)
    if not is_tiled(spec):
        digest = digest.sum(0, keepdim=True)
    elif scale is not None:
        digest = digest + scale.view(torch.int32).to(torch.int64) * signed(GOLDEN)
    return torch.where(digest == 0, 1, digest)  # 0 is that of nothing


def _digests(piece: Tensor, first: int) -> Tensor:
    """The digests of a piece's tiles; `first` is how many are above."""
    size = piece.element_size()
    down, across = tiles(piece.shape)
    padding = (0, across * TILE - piece.shape[1], 0, down * TILE - piece.shape[0])
    words = functional.pad(piece.view(_BITS[size]), padding).view(torch.int64)
    words = words.view(down, TILE // STEP, STEP, across, -1).permute(0, 3, 1, 2, 4).flatten(0, 1)
    chain = torch.arange(words[:, 0].numel(), device=words.device).view(words[:, 0].shape)
    chain = (chain + first * chain[0].numel() + 1) * signed(GOLDEN)
    for step in range(TILE // STEP):
        chain = (chain ^ _high(chain)) * signed(MIX[0]) + words[:, step]
    for factor in MIX:
        chain = (chain ^ _high(chain)) * signed(factor)
    return (chain ^ _high(chain)).sum((1, 2))


def _high(value: Tensor) -> Tensor:
    """A logical shift: torch's is arithmetic."""
    return (value >> 32) & 0xFFFFFFFF


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
