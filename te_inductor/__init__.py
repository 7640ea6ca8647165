"""te_inductor: `torch.compile(model, backend="te")` runs plain PyTorch models in FP8, MXFP8 or NVFP4.

Start reading at `backend.py`; `docs/architecture.md` draws the whole path. Importing this package imports neither
triton, cutlass nor Inductor: names are loaded when they are first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from te_inductor import distributed as distributed
    from te_inductor import recipes as recipes
    from te_inductor.api.accuracy import accuracy_report as accuracy_report
    from te_inductor.api.accuracy_figures import AccuracyReport as AccuracyReport
    from te_inductor.api.assertions import assert_low_precision as assert_low_precision
    from te_inductor.api.checkpoints import load_quantized as load_quantized
    from te_inductor.api.explanation import explain as explain
    from te_inductor.api.lowering import lower as lower
    from te_inductor.api.quantization import quantize_ as quantize_
    from te_inductor.api.saved_state import load_state_dict as load_state_dict
    from te_inductor.api.saved_state import state_dict as state_dict
    from te_inductor.api.written_checkpoints import quantized_state_dict as quantized_state_dict
    from te_inductor.backend import te as te
    from te_inductor.presentation.report import Report as Report
    from te_inductor.presentation.report import Site as Site
    from te_inductor.recipes.regions import autocast as autocast
    from te_inductor.runtime.gradients.deferred_wgrads import backward_dw as backward_dw

__version__ = "0.1.0"

_HOME = {
    "accuracy_report": ("te_inductor.api.accuracy", "accuracy_report"),
    "AccuracyReport": ("te_inductor.api.accuracy_figures", "AccuracyReport"),
    "assert_low_precision": ("te_inductor.api.assertions", "assert_low_precision"),
    "autocast": ("te_inductor.recipes.regions", "autocast"),
    "backward_dw": ("te_inductor.runtime.gradients.deferred_wgrads", "backward_dw"),
    "explain": ("te_inductor.api.explanation", "explain"),
    "load_quantized": ("te_inductor.api.checkpoints", "load_quantized"),
    "load_state_dict": ("te_inductor.api.saved_state", "load_state_dict"),
    "lower": ("te_inductor.api.lowering", "lower"),
    "quantize_": ("te_inductor.api.quantization", "quantize_"),
    "quantized_state_dict": ("te_inductor.api.written_checkpoints", "quantized_state_dict"),
    "distributed": ("te_inductor.distributed", None),
    "recipes": ("te_inductor.recipes", None),
    "state_dict": ("te_inductor.api.saved_state", "state_dict"),
    "te": ("te_inductor.backend", "te"),
    "Report": ("te_inductor.presentation.report", "Report"),
    "Site": ("te_inductor.presentation.report", "Site"),
}

__all__ = [
    "AccuracyReport",
    "Report",
    "Site",
    "__version__",
    "accuracy_report",
    "assert_low_precision",
    "autocast",
    "backward_dw",
    "distributed",
    "explain",
    "load_quantized",
    "load_state_dict",
    "lower",
    "quantize_",
    "quantized_state_dict",
    "recipes",
    "state_dict",
    "te",
]


def __getattr__(name: str) -> Any:
    try:
        module, attribute = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    loaded = import_module(module)
    value = loaded if attribute is None else getattr(loaded, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


import_module("te_inductor.api.saved_programs")
