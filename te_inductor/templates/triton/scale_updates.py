"""The begin and the end of a step under delayed scaling on the GPU: one kernel each for all quantizers of a graph, where
torch's ops are some thirty launches (`runtime/eager/delayed.py`, whose arithmetic this is, bit for bit).

The state of each quantizer is a tensor of its own, found by a table of their addresses. It is in pinned memory, which
the GPU reads by itself: no copy waits, and none is recorded in a CUDA graph. Tables are kept for good, by the addresses,
since a recorded graph reads its table for as long as it is replayed; each is 8 bytes a quantizer."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_inductor.recipes.delayed import DelayedScaling, ScaleUpdate
from te_inductor.runtime.definition import implement_on_cuda
from te_inductor.runtime.eager import delayed
from te_inductor.runtime.state.misfits import COUNTS
from te_inductor.templates.triton.launcher import Launcher, empty, launcher

LONGEST = 4096  # amaxes of a history that one program holds

_tables: dict[tuple[int, ...], Tensor] = {}


def read_scales(states: list[Tensor]) -> Tensor:
    """Does what `runtime.eager.delayed.read_scales` does."""
    table = _table(states)
    return delayed.read_scales(states) if table is None else launch_read(states[0], table)


def launch_read(
    state: Tensor,  # one of n
    table: Tensor,  # (n,)
) -> Tensor:  # (2 * n, APART)
    """Launches on the device of `state`."""
    count = table.shape[0]
    out = empty(state, (2 * count, delayed.APART), state.dtype)
    _reader(count)(1, table, out, count, state.shape[0] - 1, on=state.device)
    return out


@functools.cache
def _reader(count: int) -> Launcher:
    block = triton.next_power_of_2(count * delayed.APART)
    return launcher(read_each, BLOCK=block, APART=delayed.APART, num_warps=1)


def update_scales(
    states: list[Tensor],  # n of (H + 1,)
    update: ScaleUpdate,
    read: Tensor | None = None,
    misfits: Tensor | None = None,  # (n, COUNTS) int32
    own: bool = False,
) -> None:
    """Does what `runtime.eager.delayed.update_scales` does, which runs where a recipe brings functions of its own."""
    table = _table(states) if _is_for(update.recipe) and not update.waits else None
    if table is None:
        delayed.update_scales(states, update, read, misfits, own)
    else:
        launch(states[0], table, update, misfits, own)


def _is_for(recipe: DelayedScaling) -> bool:
    own = callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None
    return not own and recipe.amax_history_len <= LONGEST


def _table(states: list[Tensor]) -> Tensor | None:
    """Their addresses, int64; None where they are of several devices, and while a CUDA graph is recorded whose tensors were
    not met before."""
    addresses = tuple([state.data_ptr() for state in states])
    table = _tables.get(addresses)
    if table is None and addresses and not torch.cuda.is_current_stream_capturing():
        if len({state.device for state in states}) > 1:
            return None
        table = _tables[addresses] = torch.tensor(addresses, dtype=torch.int64, device="cpu", pin_memory=True)
    return table


def launch(state: Tensor, table: Tensor, update: ScaleUpdate, misfits: Tensor | None = None, own: bool = False) -> None:
    """Launches on the device of `state`, one of the tensors."""
    count, recipe, reduced = table.shape[0], update.recipe, None
    if delayed.reduces(update):
        reduced = state.new_empty(count)
        collect = launcher(collect_amaxes, BLOCK=triton.next_power_of_2(count), num_warps=1)
        collect(1, table, reduced, count, on=state.device)
        delayed.reduce(reduced, update)
    most_recent = recipe.amax_compute_algo == "most_recent"
    updater = _updater(recipe.amax_history_len, most_recent, own, update.heals and misfits is not None)
    limits = update.largest, *update.suitable, update.outlying
    updater(count, table, reduced, misfits, *limits, on=state.device)


@functools.cache
def _updater(length: int, most_recent: bool, own: bool, heals: bool) -> Launcher:
    return Launcher(
        update_each,
        LENGTH=length,
        BLOCK=triton.next_power_of_2(length),
        MOST_RECENT=most_recent,
        OWN=own,
        HEALS=heals,
        TINY=delayed.FP32_TINY,
        LARGEST=delayed.FP32_MAX,
        JUMP=delayed.JUMP,
        COUNTS=COUNTS,
        PATIENCE=delayed.PATIENCE,
        FAILURE=delayed.FAILURE,
        FAILING=delayed.FAILING,
        num_warps=4,
    )


@triton.jit
def observed(amax):
    """0 in place of what is no observation."""
    return tl.where((amax > 0) & (amax < float("inf")), amax, 0.0)


@triton.jit(do_not_specialize=["count", "scale_at"])
def read_each(
    table,  # (count,): addresses of state
    out,  # (2 * count, APART)
    count,
    scale_at,  # which of the state's numbers the scale is
    BLOCK: tl.constexpr,
    APART: tl.constexpr,
):
    place = tl.arange(0, BLOCK)
    inside, first = place < count * APART, place % APART == 0
    address = tl.load(table + place // APART, mask=inside & first, other=0).to(tl.pointer_type(tl.float32))
    scale = tl.load(address + scale_at, mask=inside & first, other=1.0)
    tl.store(out + place, tl.where(first, scale, 0.0), mask=inside)
    tl.store(out + count * APART + place, tl.where(first, tl.div_rn(1.0, scale), 0.0), mask=inside)


@triton.jit(do_not_specialize=["count"])
def collect_amaxes(table, out, count, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    address = tl.load(table + place, mask=place < count, other=0).to(tl.pointer_type(tl.float32))
    tl.store(out + place, observed(tl.load(address, mask=place < count, other=0.0)), mask=place < count)


@triton.jit
def count_misfit(
    counts,
    recorded,
    cast,  # what the scale brought the amax to; 0 where the step cast by own amaxes
    following,  # what the next one would have brought it to
    jumps,
    kept_out,
    limits,  # of suitable values, and of outliers
    OWN: tl.constexpr,
    HEALS: tl.constexpr,
    FAILURE: tl.constexpr,
    FAILING: tl.constexpr,
):
    """Counts for one quantizer, whose counts are int32: the fields of `Misfits`."""
    least, most, outlying = limits
    cut, coarse, outlies = cast > most, (cast > 0) & (cast < least), cast > outlying
    unsuited = (following > most) | ((following > 0) & (following < least))
    if HEALS:
        level = tl.where(unsuited, FAILURE, -1)
    else:
        level = tl.where(cut | coarse, FAILURE, -1)
        level = tl.where(cast > 2 * most, 4 * FAILURE, level)
        level = tl.where(outlies, FAILING, level)
    steps, first, failing = tl.load(counts) + 1, tl.load(counts + 3), tl.load(counts + 8)
    since = tl.where((failing == 0) & (level > 0), steps, tl.load(counts + 9))
    failing = tl.maximum(failing + level, 0)
    first = tl.where((first == 0) & outlies, steps, first)
    first = tl.where((first == 0) & (failing >= FAILING), since, first)
    tl.store(counts, steps)
    tl.store(counts + 1, tl.load(counts + 1) + cut.to(tl.int32))
    tl.store(counts + 2, tl.load(counts + 2) + coarse.to(tl.int32))
    tl.store(counts + 3, first)
    tl.store(counts + 4, tl.load(counts + 4) + 1 - (recorded < float("inf")).to(tl.int32))
    tl.store(counts + 5, tl.load(counts + 5) + jumps)
    tl.store(counts + 6, tl.load(counts + 6) + OWN)
    tl.store(counts + 7, tl.load(counts + 7) + kept_out)
    tl.store(counts + 8, failing)
    tl.store(counts + 9, since)
    tl.store(counts + 10, tl.maximum(tl.load(counts + 10), cast.to(tl.int32, bitcast=True)))
    tl.store(counts + 11, tl.where(unsuited, tl.load(counts + 11) + 1, 0))


@triton.jit(do_not_specialize=["largest", "least", "most", "outlying"])
def update_each(
    table,  # (count,): addresses of state
    reduced,  # (count,) amaxes of all ranks, or None
    misfits,  # (count, COUNTS) int32, or None
    largest,  # what an amax is scaled to
    least,  # between which values a scale has to bring an amax
    most,
    outlying,  # above which value it is kept out
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST_RECENT: tl.constexpr,
    OWN: tl.constexpr,
    TINY: tl.constexpr,
    LARGEST: tl.constexpr,
    JUMP: tl.constexpr,
    COUNTS: tl.constexpr,
    HEALS: tl.constexpr,
    PATIENCE: tl.constexpr,
    FAILURE: tl.constexpr,
    FAILING: tl.constexpr,
):
    """One quantizer a program."""
    which = tl.program_id(0)
    history_at = tl.load(table + which).to(tl.pointer_type(tl.float32))
    scale_at = history_at + LENGTH
    recorded = tl.load(history_at)
    amax = observed(recorded) if reduced is None else tl.load(reduced + which)
    place = tl.arange(0, BLOCK)
    kept = tl.load(history_at + place, mask=(place > 0) & (place < LENGTH), other=0.0)
    moved = tl.load(history_at + place + 1, mask=(place > 0) & (place + 1 < LENGTH), other=0.0)
    old = tl.load(scale_at)
    outlies = False
    if HEALS:
        outlies = (old != 1) & (amax * old > outlying) & (tl.load(misfits + COUNTS * which + COUNTS - 1) < PATIENCE)
    tl.debug_barrier()  # all threads have read what others overwrite
    entering = tl.where(outlies, 0.0, amax)
    chosen, broken = entering, False
    if not MOST_RECENT:
        chosen = tl.maximum(entering, tl.max(kept, 0))
        broken = tl.max((kept != kept).to(tl.int32), 0) > 0
    scale = tl.minimum(tl.maximum(tl.div_rn(largest, chosen), TINY), LARGEST)
    usable = (chosen > 0) & (chosen < float("inf")) & (broken == 0)
    scale = tl.where(usable, scale, old)
    if misfits is not None:
        jumps = ((old != 1) & ((scale > JUMP * old) | (scale * JUMP < old))).to(tl.int32)
        kept_out = (entering != amax).to(tl.int32)
        cast = tl.where((amax > 0) & (OWN == 0), tl.maximum(amax * old, TINY), 0.0)
        following = tl.where(amax > 0, tl.maximum(amax * scale, TINY), 0.0)
        counts, limits = misfits + COUNTS * which, (least, most, outlying)
        count_misfit(counts, recorded, cast, following, jumps, kept_out, limits, OWN, HEALS, FAILURE, FAILING)
    # Both have 0 in slot 0.
    rolled = tl.where((place > 0) & (place == LENGTH - 1), entering, moved)
    tl.store(history_at + place, tl.where(entering > 0, rolled, kept), mask=place < LENGTH)
    tl.store(scale_at, scale)


implement_on_cuda(read_scales=read_scales, update_scales=update_scales)
