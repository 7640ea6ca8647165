"""Stored weights that are written again, in place, many at once."""

import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from te_inductor.numerics import nvfp4
from te_inductor.ops.stored_experts import Float8Experts, NVFP4Experts, StoredExperts
from te_inductor.ops.stored_weight import Float8Weight, NVFP4Weight, StoredWeight
from te_inductor.presentation.paths import grouped
from te_inductor.runtime.weights import cached_weights
from te_inductor.runtime.weights.cached_inputs import Refresh, Refreshers, say_failed
from te_inductor.runtime.weights.cached_weights import CachedWeight, FreshnessCheck, Spec

T = TypeVar("T")
CAST_AT_ONCE = 1 << 22  # values of NVFP4 that plain torch casts at once, which takes some 50 bytes each
ORDERED_AT_ONCE = 1 << 26  # that are put in order at once, which takes some 8
PADDED = 32  # values along K; kernels write weights without padding


def ask_finite(weights: Sequence[Tensor]) -> Callable[[], dict[Tensor, bool]]:
    """Has devices find out whether all values of a weight are finite, for each. Returns what waits for the answers, once
    for each device."""
    distinct = [weight for weight in dict.fromkeys(weights) if weight.numel() > 0]
    groups = grouped(distinct, lambda weight: weight.device).values()
    asked = [largest_of(on_device).isfinite() for on_device in groups]

    def wait() -> dict[Tensor, bool]:
        found = dict.fromkeys(weights, True)
        for on_device, answers in zip(groups, asked, strict=True):
            found |= zip(on_device, answers.tolist(), strict=True)
        return found

    return wait


def largest_of(weights: Sequence[Tensor]) -> Tensor:  # (W,) fp32
    """The amaxes of weights of a device, by one launch for all of a dtype."""
    alike = grouped(range(len(weights)), lambda place: weights[place].dtype).values()
    found = [torch.stack(torch._foreach_norm([weights[one] for one in some], math.inf)).float() for some in alike]
    order = [place for some in alike for place in some]
    whole = torch.cat(found)
    return whole if len(found) == 1 else whole[torch.tensor(order, dtype=torch.int64, device=whole.device).argsort()]


@dataclass
class Rewriter:
    """Writes stored weights again, many by few launches. Those in FP8 on a GPU are cast by the kernels of
    `templates/triton/cached_weights.py`, straight into the memory that graphs read."""

    fallback: str  # options["fallback"], where a kernel fails
    _cached: dict[Tensor, CachedWeight] = field(default_factory=dict)  # by the stored weight
    _refreshers: dict[torch.device, Refreshers] = field(default_factory=dict)
    _nvfp4: dict[torch.device, "_NVFP4Writer"] = field(default_factory=dict)

    def __call__(self, given: Iterable[tuple[StoredWeight, Tensor, Sequence[Tensor]]]) -> None:
        """Writes what `store` makes of each weight, which is one matrix with others, itself among them."""
        looks: list[FreshnessCheck] = []
        in_nvfp4: list[_Matrix] = []
        for stored, weight, together in given:
            matrices = list(_matrices(stored, weight, together))
            cached = self._cached_of(stored, weight)
            if matrices:
                in_nvfp4 += matrices
            elif cached is None:
                shared = stored.shared(together) if together[1:] else ()
                stored.copy_(stored.store(weight.detach(), stored.recipe, *stored.more, *shared))
            else:
                cached.versions = ()  # autograd is told in any case: it is written
                looks.append(FreshnessCheck(cached, [weight]))
        for device, some in grouped(looks, lambda look: look.cached.digests.device).items():
            torch._foreach_zero_([look.cached.digests for look in some])
            self._refreshers[device].look(some)
        for device, alike in grouped(in_nvfp4, lambda matrix: matrix.weight.device).items():
            self._nvfp4.setdefault(device, _NVFP4Writer(device, self.fallback)).write(alike)

    def _cached_of(self, stored: StoredWeight, weight: Tensor) -> CachedWeight | None:
        """The stored weight as the kernels know it; None where they do not write it."""
        cached = self._cached.get(stored)
        if cached is None or not cached.fits([weight]):
            refresh = kernels(weight.device)
            if refresh is None or not isinstance(stored, Float8Weight | Float8Experts) or stored.values_.is_inference():
                return None
            spec = Spec(stored.quantizer, getattr(stored, "transposed", False), 1)
            cached = self._cached[stored] = cached_weights.new(spec, [weight], (stored.values_, stored.scale_inv))
            if weight.device not in self._refreshers:
                self._refreshers[weight.device] = Refreshers(lambda _: refresh, [cached], self.fallback)
        return cached if weight.is_contiguous() and not _is_picked(stored) else None


def _is_picked(stored: StoredWeight) -> bool:
    """Whether `copy_` reads some of it before it writes."""
    return isinstance(stored, StoredExperts) and len(stored.unread) > 0


class _Matrix(NamedTuple):
    """A matrix that is stored in NVFP4."""

    parts: Sequence[Tensor]  # where
    weight: Tensor  # (N, K)
    together: Sequence[Tensor]  # the weights whose amax its scale of the tensor is of


def _matrices(stored: StoredWeight, weight: Tensor, together: Sequence[Tensor]) -> Iterator[_Matrix]:
    """The matrices of a weight in NVFP4, of whole blocks and as they lie in memory; none of another."""
    if not isinstance(stored, NVFP4Weight | NVFP4Experts) or weight.shape[-1] % nvfp4.BLOCK:
        return
    if not weight.is_contiguous() or weight.numel() == 0 or getattr(stored, "transposed", False) or _is_picked(stored):
        return
    if isinstance(stored, NVFP4Weight):
        yield _Matrix(stored.parts, weight.detach(), together)
    else:
        for place, matrix in enumerate(weight.detach()):
            yield _Matrix([part[place] for part in stored.parts], matrix, [matrix])


@dataclass
class _NVFP4Writer:
    """Writes matrices in NVFP4 on one device: by the kernels of cached weights, whose values then are put in the order of
    Note [Order of a stored block], or by plain torch."""

    device: torch.device
    fallback: str
    amaxes: Tensor | None = None  # (M,) fp32, at addresses that the kernels know from before

    def __post_init__(self) -> None:
        self.cast = casts(self.device)

    def write(self, matrices: Sequence[_Matrix]) -> None:
        amaxes = self._amaxes(matrices)
        scales = nvfp4.tensor_scale(amaxes).unbind()
        torch._foreach_copy_([matrix.parts[2] for matrix in matrices], list(scales))
        padded = [place for place, one in enumerate(matrices) if self.cast is None or one.weight.shape[1] % PADDED]
        whole = [place for place in range(len(matrices)) if place not in set(padded)]
        if whole and not self._cast_by_kernels([matrices[place] for place in whole], amaxes[whole]):
            padded = list(range(len(matrices)))
        for some in in_chunks(padded, lambda place: matrices[place].weight.numel(), CAST_AT_ONCE):
            stored, block_scales = nvfp4.store_together([matrices[one].weight for one in some], amaxes[some])
            made = [*stored, *(scale.view(torch.uint8) for scale in block_scales)]
            into = [matrices[one].parts[part].view(torch.uint8) for part in (0, 1) for one in some]
            torch._foreach_copy_(into, made)

    def _amaxes(self, matrices: Sequence[_Matrix]) -> Tensor:  # (M,) fp32
        groups = {id(matrix.together): matrix.together for matrix in matrices}
        places = {key: place for place, key in enumerate(groups)}
        of_weights = [places[key] for key, group in groups.items() for _ in group]
        found = largest_of([weight.detach() for group in groups.values() for weight in group])
        if len(of_weights) > len(groups):
            index = torch.tensor(of_weights, dtype=torch.int64, device=self.device)
            found = found.new_zeros(len(groups)).scatter_reduce_(0, index, found, "amax")
        if len(matrices) == len(groups):
            return found
        wanted = [places[id(matrix.together)] for matrix in matrices]
        return found[torch.tensor(wanted, dtype=torch.int64, device=self.device)]

    def _cast_by_kernels(self, matrices: Sequence[_Matrix], amaxes: Tensor) -> bool:
        """Whether they are written so."""
        if self.amaxes is None or len(self.amaxes) != len(amaxes):
            self.amaxes = torch.empty_like(amaxes)
        self.amaxes.copy_(amaxes)
        digests = amaxes.new_zeros(1, dtype=torch.int64)
        spec = Spec(nvfp4.QUANTIZER, False, 1)
        looks = [
            FreshnessCheck(
                CachedWeight(spec, (tuple(one.weight.shape),), one.weight.dtype, one.parts[0], one.parts[1], digests),
                [one.weight],
                amax=amax,
            )
            for one, amax in zip(matrices, self.amaxes.unbind(), strict=True)
        ]
        try:
            self.cast(looks)  # type: ignore[misc]  # it is there where this is called
        except Exception:
            self.cast = None
            say_failed(traceback.format_exc(limit=-3), self.fallback)
            return False
        for some in in_chunks(matrices, lambda one: one.weight.numel(), ORDERED_AT_ONCE):
            codes = [one.parts[0].view(-1, nvfp4.BLOCK // 2) for one in some]
            ordered = nvfp4.repack(torch.cat(codes)).split([len(one) for one in codes])
            torch._foreach_copy_(codes, list(ordered))
        return True


def in_chunks(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yields items in turn, so many that their sizes are no more than `most` together, or one."""
    chunk, size = list[T](), 0
    for item in items:
        mine = size_of(item)
        if chunk and size + mine > most:
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += mine
    if chunk:
        yield chunk


def kernels(device: torch.device) -> Refresh | None:
    """What casts many weights at once there."""
    if device.type != "cuda":
        return None
    from te_inductor.templates.triton.cached_weights import OnDevice

    return OnDevice()


def casts(device: torch.device) -> Callable[[Sequence[FreshnessCheck]], None] | None:
    """What casts many weights at once there whose amaxes are known."""
    if device.type != "cuda":
        return None
    from te_inductor.templates.triton.cached_weights import OnDevice

    return OnDevice().cast
