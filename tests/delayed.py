"""Delayed scaling step by step, by the oracle: one linear layer whose scales follow from the steps before."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from te_inductor.recipes import DelayedScaling
from te_inductor.runtime.state.state_sites import SLOTS
from tests.bounds import assert_within, gemm_error, sum_error
from tests.oracle import casts
from tests.oracle.casts import ScalingHistory


def quantizers(recipe: DelayedScaling) -> dict[str, ScalingHistory]:
    slots = recipe.slots()
    return {slot: ScalingHistory(recipe, getattr(slots, slot).format) for slot in SLOTS}


@dataclass
class OracleLayer:
    """The layer's quantizers. `forward` and `backward` record and update, as a training step does.

    `device_error` of a GEMM's result and K is what a device errs beyond `gemm_error`, as a part of the sum of
    magnitudes."""

    recipe: DelayedScaling
    device_error: Callable[[str, int], float] = lambda result, k: 0.0
    of: dict[str, ScalingHistory] = field(init=False)

    def __post_init__(self) -> None:
        self.of = quantizers(self.recipe)

    def check(self, x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor, y: Tensor, grads: list[Tensor]) -> None:
        """One step, all on the CPU: results within the GEMMs' errors, as operands agree bit for bit."""
        scales = self.scales()
        self.forward(x, weight)
        self.backward(dy)
        self.check_results(scales, x, weight, bias, dy, y, grads)

    def scales(self) -> dict[str, float | None]:
        """All read when the forward starts; none where some quantizer has no history."""
        known = all(history.has_history for history in self.of.values())
        return {slot: history.scale if known else None for slot, history in self.of.items()}

    def forward(self, x: Tensor, weight: Tensor) -> None:
        for slot, tensor in (("input", x), ("weight", weight)):
            self.of[slot].record(tensor)
            self.of[slot].update()

    def backward(self, dy: Tensor) -> None:
        self.of["grad_output"].record(dy)
        self.of["grad_output"].update()

    def check_results(
        self,
        scales: dict[str, float | None],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dy: Tensor,
        y: Tensor,
        grads: list[Tensor],
    ) -> None:
        slots = self.recipe.slots()
        operands = {"input": x, "weight": weight, "grad_output": dy}
        scales = {
            slot: self.of[slot].scale_of_first(operands[slot]) if scale is None else scale
            for slot, scale in scales.items()
        }
        row, column = (
            {
                slot: casts.quantize_known(turn(tensor), scales[slot], getattr(slots, slot))
                for slot, tensor in operands.items()
            }
            for turn in (lambda t: t, lambda t: t.t())
        )
        products = {
            "y": (row["input"], row["weight"], bias, y),
            "dx": (row["grad_output"], column["weight"], None, grads[0]),
            "dw": (column["grad_output"], column["input"], None, grads[1]),
        }
        for name, (a, b, added, actual) in products.items():
            expected = casts.scaled_mm(*a, *b, added)
            finite = expected.isfinite()
            assert torch.equal(actual.isfinite(), finite), f"{name}: not finite in other places"
            error = gemm_error(*a, *b, added, actual.dtype)
            magnitudes = casts.scaled_mm(a[0].abs(), a[1], b[0].abs(), b[1])
            error = error + self.device_error(name, a[0].shape[1]) * magnitudes
            assert_within(actual[finite], expected[finite], error[finite], name)
        if bias is not None and dy.isfinite().all():
            assert_within(grads[2], dy.double().sum(0), sum_error(dy, grads[2].dtype), "db")

    def check_state(self, state: dict[str, Tensor], prefix: str = "") -> None:
        """Bit for bit what `te_inductor.state_dict` returned."""
        for slot, history in self.of.items():
            check_entry(state, f"{prefix}{slot}", history)


def check_entry(state: dict[str, Tensor], name: str, history: ScalingHistory) -> None:
    assert state[f"{name}.scale"].item() == history.scale, name
    assert state[f"{name}.amax_history"].tolist() == history.window(), name
