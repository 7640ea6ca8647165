"""What `train_step` prints and draws from its results."""

import statistics
from pathlib import Path
from typing import Any

from benchmarks import floor, table
from benchmarks.llama_blocks import Shape

median = statistics.median
GIB, MIB = 2.0**30, 2.0**20


def summary(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The numbers of each arm that ran, over its rounds; ratios are medians of ratios within a round."""
    rows = {}
    shape = Shape(**results["shape"])
    base = results["runs"].get("bf16", [])
    for name, runs in results["runs"].items():
        if not runs:
            continue
        medians = [median(run["step_ms"]) for run in runs]
        step = median(medians)
        rows[name] = {
            "step_ms": step,
            "spread_ms": max(medians) - min(medians) if len(medians) > 1 else None,
            "over_bf16": _over(base, runs, "step_ms"),
            "forward_ms": median(median(run["forward_ms"]) for run in runs),
            "forward_over_bf16": _over(base, runs, "forward_ms"),
            "peak_bytes": runs[0]["peak_bytes"],
            "saved_bytes_per_layer": runs[0]["saved_bytes_per_layer"],
            "first_step_s": runs[0]["first_step_s"],
            "model_tflops": (floor.gemm_flops(shape) + floor.attention_flops(shape)) / step / 1e9,
            "floor_ms": results["floor_ms"][name]["total"],
            "errors": runs[0]["errors"],
        }
    return rows


def _over(base: list[dict[str, Any]], runs: list[dict[str, Any]], key: str) -> float | None:
    pairs = list(zip(base, runs, strict=False))  # an arm that failed in a later round has fewer
    return median(median(b[key]) / median(r[key]) for b, r in pairs) if pairs else None


def show(results: dict[str, Any], top: int) -> None:
    rows = results["summary"]
    _steps(results, rows)
    _errors(rows)
    for name, runs in results["runs"].items():
        if runs and "kernels" in runs[0]:
            kernels(name, runs[0], top, floor.gemm_flops(Shape(**results["shape"])))
        for warning in runs[0]["warnings"] if runs else []:
            print(f"{name}: {warning}")
    for name, failure in results["failed"].items():
        print(f"{name} did not run: {failure}")


def _steps(results: dict[str, Any], rows: dict[str, dict[str, Any]]) -> None:
    shape = results["shape"]
    title = (
        f"{shape['layers']} blocks, {shape['batch']} x {shape['seq']} tokens, forward + backward; "
        + table.headline(results["environment"])
    )
    columns = (
        "arm", "step ms", "rounds differ by", "over bf16", "forward ms", "over bf16", "peak GiB", "saved MiB/layer",
        "first step s", "TF/s", "floor ms", "of floor",
    )  # fmt: skip
    cells = [
        (
            name,
            table.number(row["step_ms"]),
            table.number(row["spread_ms"]),
            table.number(row["over_bf16"], 3),
            table.number(row["forward_ms"]),
            table.number(row["forward_over_bf16"], 3),
            table.number(row["peak_bytes"], 2, 1 / GIB),
            table.number(row["saved_bytes_per_layer"], 0, 1 / MIB),
            table.number(row["first_step_s"], 1),
            table.number(row["model_tflops"], 0 if row["model_tflops"] > 10 else 3),
            table.number(row["floor_ms"]),
            f"{row['floor_ms'] / row['step_ms']:.0%}",
        )
        for name, row in rows.items()
    ]
    caption = (
        "TF/s: GEMMs and causal attention over the step. Floor: FLOPs and fewest bytes over an H200's measured rates, "
        "benchmarks/floor.py."
    )
    table.show(title, columns, cells, caption)


def _errors(rows: dict[str, dict[str, Any]]) -> None:
    cells = []
    for name, row in rows.items():
        errors = row["errors"]
        if errors is None:
            cells.append((name, *["own weights"] * 3, None))
            continue
        shown = (f"{error['relative']:.4f} / {error['cosine']:.5f}" for error in _picked(errors))
        suspect, more = errors["suspect"], len(errors["suspect"]) - 3
        verdict = f"SUSPECT: {', '.join(suspect[:3])}" + (f" and {more} more" if more > 0 else "") if suspect else "ok"
        cells.append((name, *shown, errors["worst"][2:], verdict))
    columns = ("arm", "out", "dx", "furthest weight gradient", "of", "")
    table.show("against eager bf16 on the same weights: relative error / cosine", columns, cells)


def _picked(errors: dict[str, Any]) -> list[dict[str, float]]:
    return [errors["all"][name] for name in ("out", "dx", errors["worst"])]


def kernels(name: str, run: dict[str, Any], top: int, gemm_flops: float | None = None) -> None:
    """An arm's kernels, by class and the longest by name; `gemm_flops` of a step, where they are known."""
    found = run["kernels"]
    totals: dict[str, list[float]] = {}
    for kernel in found:
        for label in (kernel["class"], "all"):
            entry = totals.setdefault(label, [0.0, 0.0])
            entry[0] += kernel["calls"]
            entry[1] += kernel["total_us"]
    ranked = sorted(totals.items(), key=lambda item: (item[0] == "all", -item[1][1]))
    cells = [(label, f"{calls:g}", f"{total:.0f}") for label, (calls, total) in ranked]
    gemm = sum(total for label, (_, total) in totals.items() if label.endswith("GEMM"))
    rate = f"GEMMs {gemm_flops / gemm / 1e6:.0f} TF/s; " if gemm and gemm_flops else ""
    idle = 1e3 * median(run["step_ms"]) - totals.get("all", [0.0, 0.0])[1]
    caption = f"{rate}step less kernels: {idle:.0f} us"
    table.show(f"{name}: kernels of a step by class", ("class", "calls", "us"), cells, caption)
    for title, chosen in (
        ("longest Triton kernels", [kernel for kernel in found if kernel["class"] == "triton"]),
        ("longest other kernels", [kernel for kernel in found if kernel["class"] != "triton"]),
    ):
        cells = [
            (k["name"][:110], k["class"], f"{k['calls']:g}", f"{k['mean_us']:.1f}", f"{k['total_us']:.0f}")
            for k in chosen[:top]
        ]
        if cells:
            table.show(f"{name}: {title}", ("kernel", "class", "calls", "mean us", "us a step"), cells)


def plot(results: dict[str, Any], path: Path) -> None:
    rows = results["summary"]
    names = list(rows)
    panels = [("step, ms", names, [rows[name]["step_ms"] for name in names])]
    if all(rows[name]["over_bf16"] for name in names):
        panels.append(("speed over bf16", names, [rows[name]["over_bf16"] for name in names]))
    if all(rows[name]["peak_bytes"] for name in names):
        panels.append(("peak memory, GiB", names, [rows[name]["peak_bytes"] / GIB for name in names]))
    table.bars(path, table.headline(results["environment"]), panels)
