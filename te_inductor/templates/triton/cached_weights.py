"""Cached copies of weights on the GPU: Note [A weight that has not changed]. The kernels of cached_weights_kernels.py
serve all weights of a graph. Of those whose tiles can be cast by themselves one does everything, in the other cases
three, or four:

- `cached_weights_scan` reads each weight once: its digest, and its amax, or the amaxes of its rows and columns;
- `cached_weights_decide` compares the digest with the stored one, and finds the scale where one is the tensor's;
- `cached_weights_scales` makes scales of the amaxes of rows and columns;
- `cached_weights_cast` reads the weight, compares tiles with their digests where they have one each, and writes both
  copies of what has changed (`cached_weights_cast_microscaled` of cached_microscaled_kernels.py, in MXFP8 and NVFP4).

Nothing comes back to the host, so that a look neither waits nor is decided when a CUDA graph is recorded. The kernels
find the tensors by tables of addresses, made anew when one has moved."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_inductor.numerics.arithmetic import reciprocal
from te_inductor.recipes.formats import ROW, Scope
from te_inductor.recipes.quantizers import Quantizer
from te_inductor.runtime.weights.cached_weights import (
    TILE,
    WORD,
    CachedWeight,
    FreshnessCheck,
    is_tiled,
    matrices,
    tiles,
)
from te_inductor.templates.triton import casting
from te_inductor.templates.triton.cached_microscaled_kernels import cached_weights_cast_microscaled
from te_inductor.templates.triton.cached_tiles import ALIGNED_COLUMNS
from te_inductor.templates.triton.cached_weights_kernels import (
    cached_weights_cast,
    cached_weights_decide,
    cached_weights_scales,
    cached_weights_scan,
)
from te_inductor.templates.triton.launcher import launcher

WARPS, SCALES = 4, 1024  # of a tile; that a program computes
REGISTERS = 168  # of a thread of `cached_weights_cast`, so that a multiprocessor has three tiles

_INPUTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class _Table:
    """The places of everything, for kernels that serve many tensors, in the parameter's own orientation: of one that
    holds (K, N) the copy that is laid out like it is the columnwise one."""

    parameters: Tensor  # (P, 18) int64
    weights: Tensor  # (W, 7) int64
    programs: Tensor  # the parameter of each tile
    amaxes: int  # of all weights' rows and columns
    longest: int  # of one weight's
    aligned: bool  # whether rows and addresses are multiples of 16 bytes

    @property
    def device(self) -> torch.device:
        return self.weights.device


class _Kind(NamedTuple):
    """What the kernels are compiled for, and where they run."""

    device: torch.device
    quantizer: Quantizer
    dtype: torch.dtype  # of the weights
    tiled: bool  # whether a tile is cast by itself


class OnDevice:
    """Refreshes the cached weights of one graph."""

    def __init__(self) -> None:
        self.addresses: list[int] = []
        self.tables: list[tuple[_Kind, _Table]] = []

    @torch.no_grad()
    def __call__(self, looks: Sequence[FreshnessCheck]) -> None:
        for device in {look.cached.digests.device for look in looks}:
            _join_streams(device, [look.cached for look in looks if look.cached.digests.device == device])
        self.run(looks)

    def run(self, looks: Sequence[FreshnessCheck]) -> None:
        self._find(looks)
        for kind, table in self.tables:
            _launch(table, kind)

    def cast(self, looks: Sequence[FreshnessCheck]) -> None:
        """Makes copies with scales of two levels anew, whatever they were made of, with the looks' amaxes as those of the
        tensors. Weights may share an amax."""
        self._find(looks)
        for kind, table in self.tables:
            _cast_microscaled(table, kind, table.weights.new_ones(len(table.weights), dtype=torch.int32))

    def _find(self, looks: Sequence[FreshnessCheck]) -> None:
        """Makes tables anew where something has moved."""
        addresses = [_address(t) for look in looks for t in (*look.weights, look.cached.data_t, look.scale, look.amax)]
        if addresses != self.addresses:
            self.tables = _tables(looks)
            self.addresses = addresses


def _join_streams(device: torch.device, cached: Sequence[CachedWeight]) -> None:
    """Wait for looks of a device's other streams, whose casts may not be done. Nothing is recorded of them: who
    captures a graph has waited."""
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            return
    current = torch.cuda.current_stream(device)
    for other in {one.stream for one in cached} - {None, current}:
        current.wait_stream(other)  # type: ignore[arg-type]
    for one in cached:
        one.stream = current


def _tables(looks: Sequence[FreshnessCheck]) -> list[tuple[_Kind, _Table]]:
    """One for all weights of a device and a dtype that are cast alike."""
    alike: dict[_Kind, list[FreshnessCheck]] = {}
    for look in matrices(looks):
        spec = look.cached.spec
        kind = _Kind(look.cached.digests.device, spec.quantizer, look.weights[0].dtype, is_tiled(spec))
        alike.setdefault(kind, []).append(look)
    return [(kind, _table(found)) for kind, found in alike.items()]


def _table(looks: Sequence[FreshnessCheck]) -> _Table:
    parameters: list[list[int]] = []
    weights: list[list[int]] = []
    programs: list[int] = []
    amaxes = longest = 0
    for place, look in enumerate(looks):
        one = look.cached
        data, data_t = (one.data_t, one.data) if one.spec.transposed else (one.data, one.data_t)
        sizes = sum(parameter.shape[0] for parameter in look.weights), look.weights[0].shape[1]
        scales, amax = list(map(_address, _scales(one))), one.amax if look.amax is None else look.amax
        above = tile = 0
        for parameter in look.weights:
            r, c = parameter.shape
            to = (0, 0) if data is None else (data.data_ptr() + above * data.stride(0), data.stride(0))
            to_t = (0, 0) if data_t is None else (data_t.data_ptr() + above, data_t.stride(0))
            parameters.append(
                [
                    *(parameter.data_ptr(), place, r, c, len(programs), tile, one.digests.data_ptr() + tile * WORD),
                    *(*to, *to_t, above, sizes[0], amaxes, *scales, _address(look.scale), _address(amax)),
                ]
            )
            count = math.prod(tiles(parameter.shape))
            programs += [len(parameters) - 1] * count
            above, tile = above + r, tile + count
        weights.append([one.digests.data_ptr(), *scales, _address(amax), amaxes, *sizes])
        amaxes, longest = amaxes + sum(sizes), max(longest, sum(sizes))
    aligned = all(row[column] % 16 == 0 for row in parameters for column in ALIGNED_COLUMNS)
    device = looks[0].cached.digests.device

    def table(values: object, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return _Table(table(parameters), table(weights), table(programs, torch.int32), amaxes, longest, aligned)


def _scales(cached: CachedWeight) -> tuple[Tensor | None, Tensor | None]:
    both = (cached.scale_inv, cached.scale_inv_t)
    return both[::-1] if cached.spec.transposed else both


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _decided(
    table: _Table, scope: Scope, tile: dict[str, Any], encode: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launches what reads the weights: which of them are stale, their scales, and those of rows and columns."""
    count, device = table.weights.shape[0], table.weights.device
    digest = torch.zeros(count, dtype=torch.int64, device=device)
    amax = torch.zeros(count, dtype=torch.int32, device=device)
    amaxes = torch.zeros(table.amaxes if scope is ROW else 0, dtype=torch.int32, device=device)
    stale = torch.empty(count, dtype=torch.int32, device=device)
    scale = torch.empty(count, dtype=torch.float32, device=device)
    run = launcher(cached_weights_scan, BY_ROW=scope is ROW, **tile, num_warps=WARPS)
    run(len(table.programs), table.parameters, table.programs, digest, amax, amaxes)
    one_scale = {"WHOLE": scope.whole, "TWO_LEVEL": scope.two_level}
    run = launcher(cached_weights_decide, **one_scale, **encode, num_warps=1)
    run(count, table.weights, digest, amax, stale, scale)
    if scope is not ROW:
        return stale, scale, None
    chunks = triton.cdiv(table.longest, SCALES)
    run = launcher(cached_weights_scales, BLOCK=SCALES, **encode)
    run(count * chunks, table.weights, stale, amaxes, chunks)
    return stale, scale, amaxes.view(torch.float32)


def _launch(table: _Table, kind: _Kind) -> None:
    quantizer, scope = kind.quantizer, kind.quantizer.granularity
    tile = _tile(table, kind)
    encode = {"SCALING": casting.scaling(quantizer, kind.dtype)}
    stale, scale, scales = (None, None, None) if kind.tiled else _decided(table, scope, tile, encode)
    if scope.microscaled:
        _cast_microscaled(table, kind, stale)
        return
    run = launcher(
        cached_weights_cast,
        ELEMENT=casting.ELEMENTS[quantizer.format.dtype],
        WHOLE=scope.whole,
        BY_ROW=scope is ROW,
        KNOWN=scope.whole and kind.tiled,
        **tile,
        **encode,
        num_warps=WARPS,
        maxnreg=REGISTERS,
    )
    run(len(table.programs), table.parameters, table.programs, stale, scale, scales)


def _tile(table: _Table, kind: _Kind) -> dict[str, Any]:
    return {"INPUT": _INPUTS[kind.dtype], "TILE": TILE, "ALIGNED": table.aligned}


def _cast_microscaled(table: _Table, kind: _Kind, stale: Tensor | None) -> None:
    quantizer, scope = kind.quantizer, kind.quantizer.granularity
    run = launcher(
        cached_weights_cast_microscaled,
        ELEMENT=casting.ELEMENTS[quantizer.format.dtype],
        TWO_LEVEL=scope.two_level,
        PACKED=quantizer.format.packed,
        LARGEST=quantizer.format.max,
        INVERSE=reciprocal(quantizer.format.max),
        DOWN=scope.block[0],
        ACROSS=scope.block[1],
        **_tile(table, kind),
        num_warps=WARPS,
    )
    run(len(table.programs), table.parameters, table.programs, stale)
