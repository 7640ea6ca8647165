"""What a compiled graph returns in the place of logits that it does not compute."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_inductor import compat
from te_inductor.errors import OmittedLogitsError

_TELLS = frozenset(
    "__get__ size dim numel stride element_size is_contiguous is_floating_point is_complex __len__ nelement ndimension"
    " __repr__ __hash__".split()
)
_PLACES: dict[Any, Callable[[torch.device], Any]] = {  # what tells where a tensor is
    Tensor.device.__get__: lambda device: device,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: lambda device: device.type == "meta",  # type: ignore[attr-defined]
}
_KEEPS = frozenset("detach float half bfloat16 to contiguous clone".split())


class OmittedOutput(NamedTuple):
    """A place among a graph's outputs."""

    output: int  # which of them
    words: int  # the size of the last dimension
    dtype: torch.dtype


class OmittedLogits(Tensor):
    """Logits that were not computed: a tensor on the meta device, whose sizes, dtype and device, as they would be, can be
    read."""

    _device: torch.device

    @staticmethod
    def of(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> "OmittedLogits":
        made = torch.empty(sizes, dtype=dtype, device="meta").as_subclass(OmittedLogits)
        made._device = device
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (place := _PLACES.get(function)) is not None:
            return place(args[0]._device)
        if not torch.compiler.is_dynamo_compiling() and compat.is_translating():
            # Dynamo looks at what is alive behind a graph break, which need not be read.
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        called = getattr(function, "__name__", str(function))
        moves = any(isinstance(one, str | torch.device) for one in (*args[1:], *(kwargs or {}).values()))
        if called not in _TELLS | _KEEPS or moves:
            raise OmittedLogitsError(
                f"{called} of logits that were not computed, as options={{'logits': 'omit'}} says; expected nothing to"
                " read them in training. Compile with options={'logits': 'keep'}, or have the program read the loss"
                " alone"
            )
        with torch._C.DisableTorchFunctionSubclass():
            made = function(*args, **(kwargs or {}))
        return cls.of(made.shape, made.dtype, args[0]._device) if isinstance(made, Tensor) else made

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"OmittedLogits(size={tuple(self.shape)}, dtype={self.dtype})"


compat.never_compile(OmittedLogits.__torch_function__)


def leave_out(compiled: Callable[..., Any], places: Sequence[OmittedOutput]) -> Callable[..., Any]:
    """A compiled graph whose outputs at these places, of sizes (…, 0), become logits that were left out."""
    if not places:
        return compiled

    def run(*inputs: Any) -> Any:
        outputs = list(compiled(*inputs))
        for place in places:
            sizes = (*outputs[place.output].shape[:-1], place.words)
            outputs[place.output] = OmittedLogits.of(sizes, place.dtype, outputs[place.output].device)
        return outputs

    return run
