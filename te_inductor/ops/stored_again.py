"""Stored weights that are written again, in place, many at once."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from te_inductor.ops.stored_experts import Float8Experts
from te_inductor.ops.stored_weight import Float8Weight, StoredWeight
from te_inductor.presentation.paths import grouped
from te_inductor.runtime.weights import cached_weights
from te_inductor.runtime.weights.cached_inputs import Refresh, Refreshers
from te_inductor.runtime.weights.cached_weights import CachedWeight, FreshnessCheck, Spec


def are_finite(weights: Sequence[Tensor]) -> dict[Tensor, bool]:
    """Whether all values of a weight are finite, for each. The host waits once for each device."""
    found = {weight: True for weight in weights if weight.numel() == 0}
    distinct = [weight for weight in dict.fromkeys(weights) if weight not in found]
    for on_device in grouped(distinct, lambda weight: weight.device).values():
        alike = grouped(on_device, lambda weight: weight.dtype).values()  # which one launch serves
        largest = [torch.stack(torch._foreach_norm(some, math.inf)) for some in alike]
        flags = torch.cat([some.isfinite() for some in largest]).tolist()
        found |= zip((weight for some in alike for weight in some), flags, strict=True)
    return found


@dataclass
class Rewriter:
    """Writes stored weights again. Those in FP8 on a GPU are cast in a few launches, by the kernels of
    `templates/triton/cached_weights.py`, straight into the memory that graphs read."""

    fallback: str  # options["fallback"], where a kernel fails
    _cached: dict[Tensor, CachedWeight] = field(default_factory=dict)  # by the stored weight
    _refreshers: dict[torch.device, Refreshers] = field(default_factory=dict)

    def __call__(self, given: Iterable[tuple[StoredWeight, Tensor, Sequence[object]]]) -> None:
        """Writes what `store` makes of each weight, with what it shares with others."""
        looks: list[FreshnessCheck] = []
        for stored, weight, shared in given:
            cached = self._cached_of(stored, weight)
            if cached is None:
                stored.copy_(stored.store(weight.detach(), stored.recipe, *stored.more, *shared))
            else:
                cached.versions = ()  # autograd is told in any case: it is written
                looks.append(FreshnessCheck(cached, [weight]))
        for device, some in grouped(looks, lambda look: look.cached.digests.device).items():
            torch._foreach_zero_([look.cached.digests for look in some])
            self._refreshers[device].look(some)

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
        picked = isinstance(stored, Float8Experts) and len(stored.unread)  # `copy_` reads that before it writes
        return cached if weight.is_contiguous() and not picked else None


def kernels(device: torch.device) -> Refresh | None:
    """What casts many weights at once there."""
    if device.type != "cuda":
        return None
    from te_inductor.templates.triton.cached_weights import OnDevice

    return OnDevice()
