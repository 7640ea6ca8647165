"""Where delayed scaling keeps its state: with the parameter behind each weight, so that recompiles find it again and two
models never share it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from te_inductor.recipes import DelayedScaling


@dataclass(frozen=True)
class Key:
    """Which quantizer of a parameter's: a parameter may serve several sites, as an expert's slice or a tied weight."""

    site: str  # module path as the compiled region sees it, and what is taken of the parameter
    slot: str  # "input", "weight", "grad_output"
    recipe: DelayedScaling


@dataclass(frozen=True, eq=False)
class ScalingState:
    """Of one quantizer; `runtime/delayed.py` says what each tensor means. All fp32."""

    amax: Tensor  # ()
    scale: Tensor  # ()
    history: Tensor  # (amax_history_len,)

    def tensors(self) -> dict[str, Tensor]:
        return {"amax": self.amax, "scale": self.scale, "history": self.history}


_states: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def state_of(parameter: Tensor, key: Key) -> ScalingState:
    """The state of a quantizer, made where there is none yet."""
    states = _states.setdefault(parameter, {})
    if key not in states:
        # Made outside inference mode: a training step may be the next to write it.
        with torch.inference_mode(False), torch.no_grad():
            plain = parameter.detach()
            states[key] = ScalingState(
                amax=plain.new_zeros((), dtype=torch.float32),
                scale=plain.new_ones((), dtype=torch.float32),
                history=plain.new_zeros(key.recipe.amax_history_len, dtype=torch.float32),
            )
    return states[key]


def states_of(parameter: Tensor) -> Iterator[tuple[Key, ScalingState]]:
    """Every quantizer's state that some compile has made for a parameter."""
    yield from _states.get(parameter, {}).items()
