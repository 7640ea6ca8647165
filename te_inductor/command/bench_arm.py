"""One arm of `te-inductor bench`: compile a model, time its steps, write what was measured to a file."""

import argparse
import contextlib
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from te_inductor import targets
from te_inductor.api.accuracy import scalar_of
from te_inductor.command.factory import Case, made


def run(arguments: argparse.Namespace) -> int:
    """Runs the arm of settings in JSON; a line ``step N`` is printed behind each step."""
    settings = json.loads(arguments.settings)
    case = made(settings["model"], settings["set"])
    arm = _Arm(case, settings)
    begin = time.perf_counter()
    first = arm.step()
    arm.wait()
    figures: dict[str, Any] = {"first_s": time.perf_counter() - begin, **_of_first(arm, first)}
    print("step 0", flush=True)
    del first
    for place in range(1, settings["warmup"]):
        arm.step()
        print(f"step {place}", flush=True)
    times = []
    for place in range(settings["steps"]):
        times.append(arm.timed_ms())
        print(f"step {settings['warmup'] + place}", flush=True)
    figures |= {"step_ms": statistics.median(times), "steps_ms": times, "peak_bytes": arm.peak()}
    figures |= {"device": arm.device_name(), "torch": torch.__version__, "forward": arm.forward, "dtype": arm.dtype}
    Path(settings["result"]).write_text(json.dumps(figures))
    return 0


class _Arm:
    def __init__(self, case: Case, settings: Any) -> None:
        self.case = case
        backend: Any = settings["backend"]
        if backend == "te":
            from te_inductor.backend import te as backend  # a checkout has no entry point
        self.run = torch.compile(case.model, backend=backend, options=settings["options"] or None)
        module = case.model if isinstance(case.model, torch.nn.Module) else None
        leaves = [one for one in pytree.tree_leaves([case.inputs, case.kwargs]) if isinstance(one, torch.Tensor)]
        self.parameters = [] if module is None else [one for one in module.parameters() if one.requires_grad]
        tensors = [*(module.parameters() if module is not None else ()), *leaves]
        self.device = next((one.device for one in tensors), torch.device("cpu"))
        self.trained = [*self.parameters, *(one for one in leaves if one.requires_grad)]
        self.forward = settings["forward"] or not self.trained
        wide = any(one.dtype == torch.float32 for one in (self.parameters or tensors))
        self.autocast = settings["autocast"] and wide
        dtypes = dict.fromkeys(str(one.dtype).removeprefix("torch.") for one in tensors if one.is_floating_point())
        self.dtype = "autocast to bfloat16" if self.autocast else ", ".join(dtypes)

    def step(self) -> torch.Tensor | None:
        """A forward, and its backward where there is something to train; the loss."""
        for one in self.trained:
            one.grad = None
        context = torch.autocast(self.device.type, torch.bfloat16) if self.autocast else contextlib.nullcontext()
        with context, torch.set_grad_enabled(not self.forward):
            loss = scalar_of(self.run(*self.case.inputs, **self.case.kwargs), self.case.loss)
        if not self.forward and loss is not None and loss.requires_grad:
            loss.sum().backward()
        return loss

    def timed_ms(self) -> float:
        """The milliseconds of one step, on the device's clock where it has one."""
        if self.device.type != "cuda":
            begin = time.perf_counter()
            self.step()
            return 1e3 * (time.perf_counter() - begin)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.step()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def wait(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak(self) -> int:
        """Bytes: of tensors on a GPU, else of the process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def device_name(self) -> str:
        return targets.described(self.device) if self.device.type == "cuda" else self.device.type.upper()


def _of_first(arm: _Arm, loss: torch.Tensor | None) -> dict[str, Any]:
    gradients = [one.grad for one in arm.trained if one.grad is not None]
    norm = torch.stack([one.float().norm() for one in gradients]).norm().item() if gradients else None
    return {"loss": None if loss is None else loss.sum().item(), "gradient_norm": norm}
