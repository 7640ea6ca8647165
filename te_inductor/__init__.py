"""te_inductor: `torch.compile(model, backend="te")` runs plain PyTorch models in FP8, MXFP8 or NVFP4.

Start reading at `backend.py`; `docs/architecture.md` draws the whole path. Importing this package imports neither
triton, cutlass nor Inductor: names are loaded when they are first used.

# Note [First uses in threads]
Python locks each module that a thread imports, a package behind its module: a thread that asks for `ops.casts` holds its
lock while it waits for `ops`, which another thread may be running, and which wants `ops.casts`. Python then breaks the
deadlock, and one of them gets a module without its names. So whatever asks for a module that needs `ops` imports `ops`
first, and holds no other lock of its."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from te_inductor import distributed as distributed
    from te_inductor import eager_layers as eager_layers
    from te_inductor import errors as errors
    from te_inductor import integrations as integrations
    from te_inductor import recipes as recipes
    from te_inductor.api.accuracy import accuracy_report as accuracy_report
    from te_inductor.api.accuracy_figures import AccuracyReport as AccuracyReport
    from te_inductor.api.assertions import assert_low_precision as assert_low_precision
    from te_inductor.api.calibration import calibrate as calibrate
    from te_inductor.api.calibration.policy import Calibration as Calibration
    from te_inductor.api.checkpoints import load_quantized as load_quantized
    from te_inductor.api.explanation import explain as explain
    from te_inductor.api.lowering import lower as lower
    from te_inductor.api.options import CompileOptions as CompileOptions
    from te_inductor.api.options import list_options as list_options
    from te_inductor.api.quantization import quantize_ as quantize_
    from te_inductor.api.rollouts import refresh_rollout as refresh_rollout
    from te_inductor.api.rollouts import rollout as rollout
    from te_inductor.api.saved_state import load_state_dict as load_state_dict
    from te_inductor.api.saved_state import state_dict as state_dict
    from te_inductor.api.statistics import statistics as statistics
    from te_inductor.api.streaming import quantization_config as quantization_config
    from te_inductor.api.streaming import stream_quantized as stream_quantized
    from te_inductor.api.written_checkpoints import quantized_state_dict as quantized_state_dict
    from te_inductor.backend import te as te
    from te_inductor.presentation.report import Report as Report
    from te_inductor.presentation.report import Site as Site
    from te_inductor.presentation.statistics import SampleLoss as SampleLoss
    from te_inductor.presentation.statistics import SlotStatistics as SlotStatistics
    from te_inductor.presentation.statistics import Statistics as Statistics
    from te_inductor.presentation.statistics import StepCounts as StepCounts
    from te_inductor.recipes.regions import autocast as autocast
    from te_inductor.runtime.gradients.deferred_wgrads import backward_dw as backward_dw

__version__ = "0.1.0"

_HOME = {  # of each name, the module that has it, or is it
    "accuracy_report": "te_inductor.api.accuracy",
    "AccuracyReport": "te_inductor.api.accuracy_figures",
    "assert_low_precision": "te_inductor.api.assertions",
    "autocast": "te_inductor.recipes.regions",
    "calibrate": "te_inductor.api.calibration",
    "Calibration": "te_inductor.api.calibration.policy",
    "CompileOptions": "te_inductor.api.options",
    "backward_dw": "te_inductor.runtime.gradients.deferred_wgrads",
    "eager_layers": "te_inductor.eager_layers",
    "errors": "te_inductor.errors",
    "explain": "te_inductor.api.explanation",
    "integrations": "te_inductor.integrations",
    "list_options": "te_inductor.api.options",
    "load_quantized": "te_inductor.api.checkpoints",
    "load_state_dict": "te_inductor.api.saved_state",
    "lower": "te_inductor.api.lowering",
    "quantize_": "te_inductor.api.quantization",
    "quantized_state_dict": "te_inductor.api.written_checkpoints",
    "distributed": "te_inductor.distributed",
    "quantization_config": "te_inductor.api.streaming",
    "recipes": "te_inductor.recipes",
    "refresh_rollout": "te_inductor.api.rollouts",
    "rollout": "te_inductor.api.rollouts",
    "state_dict": "te_inductor.api.saved_state",
    "statistics": "te_inductor.api.statistics",
    "stream_quantized": "te_inductor.api.streaming",
    "te": "te_inductor.backend",
    "Report": "te_inductor.presentation.report",
    "Site": "te_inductor.presentation.report",
    "SampleLoss": "te_inductor.presentation.statistics",
    "SlotStatistics": "te_inductor.presentation.statistics",
    "Statistics": "te_inductor.presentation.statistics",
    "StepCounts": "te_inductor.presentation.statistics",
}

_LIGHT = (  # which need no ops
    "te_inductor.api.options",
    "te_inductor.distributed",
    "te_inductor.errors",
    "te_inductor.integrations",
    "te_inductor.presentation",
    "te_inductor.recipes",
)

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not _HOME[name].startswith(_LIGHT):
        import_module("te_inductor.ops")  # Note [First uses in threads]
    module = import_module(_HOME[name])
    value = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted({name for name in globals() if name.startswith("__")} | set(__all__))


import_module("te_inductor.api.saved_programs")
