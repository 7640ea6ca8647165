"""Kept copies of weights on the GPU: Note [A weight that has not changed]. Three launches of kept_weights_kernels.py for all
weights of a graph, four with scales of rows:

- `kept_weights_scan` reads each weight once: its digest, and its amax where one scale is the tensor's;
- `kept_weights_decide` compares the digest with that of the weight the copies were made of, and finds the scale, or under
  delayed scaling compares the given one, and records the amax;
- `kept_weights_amaxes`, with scales of rows, reads a weight that has changed: the amax of each row, and of each column;
- `kept_weights_cast` reads the weight again and writes both copies, or returns at once (`kept_weights_cast_microscaled` of
  kept_microscaled_kernels.py, in MXFP8 and NVFP4).

Without a look (Note [Calls that do not look]) the first of them is left out, and the last records delayed scaling's amaxes.

Nothing comes back to the host, so that a look neither waits nor is decided when a CUDA graph is recorded. The kernels find
the tensors by tables of addresses, made anew when one has moved.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_inductor.recipes.formats import ROW
from te_inductor.recipes.quantizers import Quantizer
from te_inductor.runtime.kept_weights import WORD, Kept, Look, is_read_first
from te_inductor.runtime.microscaling import reciprocal
from te_inductor.templates.triton.kept_microscaled_kernels import kept_weights_cast_microscaled
from te_inductor.templates.triton.kept_weights_kernels import (
    ALIGNED_COLUMNS,
    kept_weights_amaxes,
    kept_weights_cast,
    kept_weights_decide,
    kept_weights_scan,
)

SCAN_WORDS, SCAN_WARPS = 4096, 8  # of a program
# Tile of a cast: rows, columns, how many tiles beside each other are one program's (a program that has nothing to do costs
# about as much as a word of 2 KB to read), warps. Square blocks are tiles.
TILES = dict.fromkeys(("1x32", "32x32", "1x16", "16x16"), (64, 64, 16, 4))
TILES |= dict.fromkeys(("tensor", "row"), (64, 64, 4, 4))
TILES["128x128"] = (128, 128, 1, 4)

_ELEMENTS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5, torch.uint8: tl.uint8}
_INPUTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class _Table:
    """Where everything is, for kernels that serve many tensors. In the parameter's own orientation: of one that holds
    (K, N) the copy that is laid out like it is the columnwise one."""

    parameters: Tensor  # (P, 15) int64
    weights: Tensor  # (W, 5) int64
    scans: Tensor  # the parameter of each program of kept_weights_scan
    casts: Tensor  # and of kept_weights_amaxes and kept_weights_cast
    amaxes: int  # of all weights' rows and columns
    aligned: bool  # whether rows and addresses are multiples of 16 bytes


class _Kind(NamedTuple):
    """What the kernels are compiled for."""

    quantizer: Quantizer
    dtype: torch.dtype  # of the weights
    known: bool  # whether delayed scaling gives the scale


class OnDevice:
    """Refreshes the kept weights of one graph."""

    def __init__(self) -> None:
        self.addresses: list[int] = []
        self.tables: list[tuple[_Kind, _Table]] = []

    @torch.no_grad()
    def __call__(self, looks: Sequence[Look], anew: bool = False) -> None:
        with torch.cuda.device(looks[0].kept.seen.device):
            _join_streams([look.kept for look in looks])
            self.run(looks, anew)

    def run(self, looks: Sequence[Look], anew: bool = False) -> None:
        addresses = [_address(t) for look in looks for t in (*look.weights, look.kept.data_t, look.scale, look.amax)]
        if addresses != self.addresses:
            self.tables = _tables(looks)
            self.addresses = addresses
        for kind, table in self.tables:
            _launch(kind, table, look=not anew or is_read_first(kind.quantizer, kind.known))


def _join_streams(kept: Sequence[Kept]) -> None:
    """Wait for looks of other streams, whose casts may not be done. Nothing is recorded of them: whoever captures a graph
    has waited."""
    if torch.cuda.is_current_stream_capturing():
        return
    current = torch.cuda.current_stream()
    for other in {one.stream for one in kept} - {None, current}:
        current.wait_stream(other)  # type: ignore[arg-type]
    for one in kept:
        one.stream = current


def _tables(looks: Sequence[Look]) -> list[tuple[_Kind, _Table]]:
    """One for all weights of a dtype that are cast alike."""
    alike: dict[_Kind, list[Look]] = {}
    for look in looks:
        kind = _Kind(look.kept.spec.quantizer, look.weights[0].dtype, look.scale is not None)
        alike.setdefault(kind, []).append(look)
    return [(kind, _table(kind.quantizer, found)) for kind, found in alike.items()]


def _table(quantizer: Quantizer, looks: Sequence[Look]) -> _Table:
    high, wide, steps, _ = TILES[quantizer.scope]
    rows: list[list[int]] = []
    scans: list[int] = []
    casts: list[int] = []
    amaxes = 0
    for place, look in enumerate(looks):
        one = look.kept
        data, data_t = (one.data_t, one.data) if one.spec.transposed else (one.data, one.data_t)
        words = above = 0
        all_rows = sum(parameter.shape[0] for parameter in look.weights)
        for parameter in look.weights:
            r, c = parameter.shape
            count = parameter.nbytes // WORD
            to = (0, 0) if data is None else (data.data_ptr() + above * data.stride(0), data.stride(0))
            to_t = (0, 0) if data_t is None else (data_t.data_ptr() + above, data_t.stride(0))
            starts = (len(scans), len(casts))
            source = parameter.data_ptr()
            rows.append([source, count, words, starts[0], place, r, c, starts[1], *to, *to_t, above, all_rows, amaxes])
            scans += [len(rows) - 1] * triton.cdiv(count, SCAN_WORDS)
            casts += [len(rows) - 1] * (triton.cdiv(r, high) * triton.cdiv(c, wide * steps))
            words, above = words + count, above + r
        amaxes += all_rows + look.weights[0].shape[1]
    pairs = [(look, look.kept) for look in looks]
    given = ((one.seen, *_scales(one), look.scale, one.amax if look.amax is None else look.amax) for look, one in pairs)
    addresses = [[_address(t) for t in tensors] for tensors in given]
    aligned = all(row[column] % 16 == 0 for row in rows for column in ALIGNED_COLUMNS)
    device = looks[0].kept.seen.device

    def table(values: object, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    programs = table(scans, torch.int32), table(casts, torch.int32)
    return _Table(table(rows, torch.int64), table(addresses, torch.int64), *programs, amaxes, aligned)


def _scales(kept: Kept) -> tuple[Tensor | None, Tensor | None]:
    both = (kept.scale_inv, kept.scale_inv_t)
    return both[::-1] if kept.spec.transposed else both


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _launch(kind: _Kind, table: _Table, look: bool) -> None:
    quantizer, dtype = kind.quantizer, kind.dtype
    count, device = table.weights.shape[0], table.weights.device
    digest = torch.zeros(count, dtype=torch.int64, device=device)
    amax = torch.zeros(count, dtype=torch.int32, device=device)
    stale = torch.empty(count, dtype=torch.int32, device=device)
    scale = torch.empty(count, dtype=torch.float32, device=device)
    scope = quantizer.granularity
    whole, two_level = scope.whole, scope.two_level
    encode = {
        "LARGEST": quantizer.format.max,
        "EPSILON": quantizer.amax_epsilon,
        "LARGEST_SCALE": quantizer.largest_scale(dtype),
        "POWER_2": quantizer.power_2_scale,
    }
    high, wide, steps, warps = TILES[quantizer.scope]
    if look:
        kept_weights_scan[(len(table.scans),)](
            table.parameters,
            table.scans,
            digest,
            amax,
            BLOCK=SCAN_WORDS,
            BITS=8 * dtype.itemsize,
            AMAX=whole or two_level,
            ALIGNED=table.aligned,
            num_warps=SCAN_WARPS,
        )
    kept_weights_decide[(count,)](
        table.weights,
        digest,
        amax,
        stale,
        scale,
        INPUT=_INPUTS[dtype],
        WHOLE=whole,
        TWO_LEVEL=two_level,
        KNOWN=kind.known,
        LOOK=look,
        **encode,
        num_warps=1,
    )
    tile = {"INPUT": _INPUTS[dtype], "HIGH": high, "WIDE": wide, "STEPS": steps, "ALIGNED": table.aligned}
    element = _ELEMENTS[quantizer.format.dtype]
    if scope.microscaled:
        kept_weights_cast_microscaled[(len(table.casts),)](
            table.parameters,
            table.weights,
            table.casts,
            stale,
            ELEMENT=element,
            TWO_LEVEL=two_level,
            LARGEST=quantizer.format.max,
            INVERSE=reciprocal(quantizer.format.max),
            DOWN=scope.block[0],
            ACROSS=scope.block[1],
            **tile,
            num_warps=warps,
        )
        return
    by_row = scope is ROW
    amaxes = torch.zeros(table.amaxes if by_row else 0, dtype=torch.int32, device=device)
    if by_row:
        kept_weights_amaxes[(len(table.casts),)](table.parameters, table.casts, stale, amaxes, **tile, num_warps=warps)
    kept_weights_cast[(len(table.casts),)](
        table.parameters,
        table.weights,
        table.casts,
        stale,
        scale,
        amaxes,
        ELEMENT=element,
        WHOLE=whole,
        BY_ROW=by_row,
        LOOK=look,
        RECORD=kind.known and not look,
        **tile,
        **encode,
        num_warps=warps,
    )
