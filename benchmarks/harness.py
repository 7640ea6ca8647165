"""What the benchmarks share: arguments, timing, kernel profiles, one process an arm, facts about the machine, JSON."""

import argparse
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
CALLS = 32  # at least so many are timed at once
HERE = "cuda" if torch.cuda.is_available() else "cpu"


def arguments(
    text: str | None, name: str | None = None, device: str | None = HERE, **numbers: int
) -> argparse.ArgumentParser:
    """The parser of a benchmark whose module has this text, with what most of them take: `--json`, where the benchmark has
    a name, `--device`, where it runs on others than CUDA, and whole numbers by their names."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if name is not None:
        parser.add_argument("--json", type=Path, default=Path(f"out/{name}.json"))
    if device is not None:
        parser.add_argument("--device", default=device)
    for number, default in numbers.items():
        parser.add_argument(f"--{number.replace('_', '-')}", type=int, default=default)
    return parser


def environment(device: str) -> dict[str, Any]:
    """What a number must be quoted with."""
    cuda = device.startswith("cuda")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "capability": "sm_{}{}".format(*torch.cuda.get_device_capability()) if cuda else None,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "torchao": _version("torchao"),
        "python": platform.python_version(),
        "commit": _commit(),
    }


def importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:  # a folder on PYTHONPATH has no metadata
        return "present" if importable(package) else None


def _commit() -> str | None:
    try:
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:  # no git, as where only the working tree was copied
        return None


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def times_ms(
    step: Callable[[], Any], device: str, iters: int, warmup: int, between: Callable[[], Any] = lambda: None
) -> list[float]:
    """Device time of each of `iters` calls, in ms; the host runs ahead, as in a training loop. `between`, before each
    call, is not timed."""
    for _ in range(warmup):
        between()
        step()
    synchronize(device)
    if not device.startswith("cuda"):
        return [_wall_ms(step, between) for _ in range(iters)]
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(iters)]
    for start, end in events:
        between()
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def captured(step: Callable[[], Any], device: str, warmup: int = 3) -> Callable[[], Any]:
    """A call that replays a step's CUDA graph, once the step has run a few times; elsewhere the step."""
    if not device.startswith("cuda"):
        return step
    for _ in range(warmup):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def peak_bytes(device: str, step: Callable[[], Any]) -> int | None:
    """The most memory that is allocated while a step runs; None where the device does not tell."""
    if not device.startswith("cuda"):
        step()
        return None
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def call_us(calls: Sequence[Callable[[], Any]], device: str, replays: int, warmup: int = 3) -> float:
    """Median device time of one call, in us, out of `calls` that do the same work on different inputs.

    A launch costs the host more than these kernels run for, so the calls are captured in one CUDA graph and replayed,
    often enough that the graph's own start and end, about 6 us, do not count; inputs that rotate through more memory
    than the L2 cache holds keep it from serving them."""
    for _ in range(warmup):
        for call in calls:
            call()
    synchronize(device)
    if not device.startswith("cuda"):
        return 1e3 * statistics.median(_wall_ms(call) for _ in range(replays) for call in calls)
    graph = torch.cuda.CUDAGraph()
    rounds = -(-CALLS // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return 1e3 * statistics.median(times_ms(graph.replay, device, replays, warmup)) / (rounds * len(calls))


def _wall_ms(step: Callable[[], Any], between: Callable[[], Any] = lambda: None) -> float:
    between()
    start = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - start)


# First match wins. Inductor's Triton kernels say what they fuse, so a cast's name may contain "mm" or "attention";
# cuBLASLt's nvjet kernels spell the operand types, t for bf16, q for e4m3 and r for e5m2.
CLASSES = (
    ("triton", r"triton_tem_.*quantize"),
    ("fp8 GEMM", r"triton_tem_.*scaled_mm|(te_inductor|triton)_(templates?_)?scaled_mm"),
    ("bf16 GEMM", r"triton_tem_.*mm"),
    # Ours through quack: the profiler cuts the name off before the operand types.
    ("fp8 GEMM", r"GemmMod_(row_)?scaled|BlockScaledGemm|GatedGradientGemm|^grouped$"),
    ("triton", r"^_(cast|amax|scale)_kernel$"),  # of experts
    ("triton", r"^triton_|^kept_weights_"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("copy", r"^Mem(cpy|set)"),
    ("fp8 GEMM", r"nvjet_(sm\d+_)?[qr][qr]|(gemm|cutlass|cute|xmma).*(e4m3|e5m2|f8|float8|fp8)|f8f8bf16"),
    ("bf16 GEMM", r"nvjet|gemm|cutlass|cute|xmma|cublas|^aten::(mm|bmm|addmm|_scaled_mm)$|mkl"),
    ("triton", r"^[a-z_0-9]*kernel[a-z_0-9]*$"),  # no C++ signature: hand-written Triton
)


def classify(name: str) -> str:
    return next((label for label, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE)), "other")


def kernels(step: Callable[[], Any], device: str, steps: int = 3) -> list[dict[str, Any]]:
    """Kernels of one step by name, slowest first: class, calls, mean, total. On CPU, operators by their own time."""
    from torch.profiler import ProfilerActivity, profile

    step()
    synchronize(device)
    cuda = device.startswith("cuda")
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        synchronize(device)
    if cuda:
        found = _traced(profiler)
    else:
        found = {
            row.key: {"durations": [row.self_cpu_time_total / row.count] * row.count} for row in profiler.key_averages()
        }
    rows: list[dict[str, Any]] = []
    for name, entry in found.items():
        durations = entry.pop("durations")
        total = sum(durations) / steps
        row = {"name": name, "class": classify(name), "calls": len(durations) / steps, "total_us": total}
        rows.append({**row, "mean_us": sum(durations) / len(durations), **entry})
    return sorted(rows, key=lambda row: -row["total_us"])


def _traced(profiler: Any) -> dict[str, dict[str, Any]]:
    """Device activity by name, from the trace file: it alone tells kernels from annotations that span them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            arguments = event.get("args", {})
            launch = {key: arguments.get(key) for key in ("grid", "block", "registers per thread", "shared memory")}
            entry = found.setdefault(event["name"], {"durations": [], "launch": launch})
            entry["durations"].append(event["dur"])
    return found


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """Norm of the difference over the reference's norm, and the cosine. NaN stays NaN."""
    value, reference = value.detach().float().flatten(), reference.detach().float().flatten()
    norm, other = torch.linalg.vector_norm(reference), torch.linalg.vector_norm(value)
    difference = torch.linalg.vector_norm(value - reference)
    return {"relative": float(difference / norm), "cosine": float((value * reference).sum() / (norm * other))}


def run_arm(module: str, arguments: Sequence[str], **env: str) -> dict[str, Any]:
    """What one arm finds, in a process of its own: `python -m module arguments --json FILE`, from the repository. If it
    failed, the end of what it wrote, as "failed"."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "arm.json")
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments, "--json", str(path)],
            cwd=ROOT, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return json.loads(path.read_text())  # type: ignore[no-any-return]
    return {"failed": "\n".join(done.stdout.strip().splitlines()[-12:]) or f"exit {done.returncode}"}


def write_json(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def te_backend() -> Any:
    """The backend itself: `backend="te"` would want the package installed, and this runs from a checkout too."""
    from te_inductor.backend import te

    return te
