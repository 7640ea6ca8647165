"""torchtitan on a machine without a GPU: imported before any of torchtitan's modules. torchtitan 0.3 takes "cuda" where
there is no accelerator, and asks it for its memory."""

from typing import Any

import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]

from torchtitan.components import metrics  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402


class NoMemory(metrics.DeviceMemoryMonitor):  # type: ignore[misc]
    """A CPU reports no memory."""

    def __init__(self) -> None:
        self.device_name = "cpu"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(*[0.0] * len(metrics.DeviceMemStats._fields))

    def reset_peak_stats(self) -> None:
        pass


metrics.build_device_memory_monitor = NoMemory
utils.set_pg_timeouts = lambda **given: None
