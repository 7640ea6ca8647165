"""What `benchmarks.ranks` should show on H100s of one host, by bytes and rates: nothing here is measured on more than two.

GEMMs run at the size rule's rates (te_inductor/targets/sm90.py). What a step of four Llama-8B blocks takes besides is that
of FSDP2 on two H100s (docs/performance.md, "Weights gathered in FP8"), for each block and token; of experts it is not
known. NVLink is taken at its data sheet's rate. `hidden`: GEMMs hide all that is sent; `in sight`: nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import table
from benchmarks.ranks_job import MODELS, Job, shared_by

BF16_RATE, FP8_RATE = 650e12, 1250e12  # FLOP/s
NVLINK = 450e9  # bytes/s, each way
LOW, HIGH = "FP8", "bf16"
GATHERS = "FP8, gathered too"  # weights
MEASURED_MS = {HIGH: 83.9, LOW: 59.3}  # four blocks, 8192 tokens a rank, 2 H100, torch 2.11, 2026-11-25: bf16, delayed
MEASURED_BLOCKS, MEASURED_TOKENS = 4, 8192


@dataclass(frozen=True)
class Expected:
    """What is expected of one rank and step."""

    arm: str
    gemms_ms: float
    rest_ms: float | None
    received: float  # bytes

    @property
    def wire_ms(self) -> float:
        return self.received / NVLINK * 1e3

    @property
    def hidden_ms(self) -> float:
        return self.gemms_ms + (self.rest_ms or 0.0)


def rate(arm: str) -> float:
    return BF16_RATE if arm == HIGH else FP8_RATE


def rest_ms(arm: str, layers: int, tokens: float) -> float:
    """What blocks take besides GEMMs."""
    low = LOW if arm != HIGH else HIGH
    shape = MODELS["blocks"].llama
    gemms = 6 * MEASURED_BLOCKS * shape.linear_params * MEASURED_TOKENS / rate(arm) * 1e3
    return (MEASURED_MS[low] - gemms) * layers * tokens / (MEASURED_BLOCKS * MEASURED_TOKENS)


def predict(job: Job) -> Iterator[Expected]:
    """Predicts each kind of arm that the work has."""
    shape, tp, shards = job.shape, job.tp, job.replicas
    for arm in (HIGH, LOW, GATHERS) if job.work == "fsdp" else (HIGH, LOW):
        if job.work == "ep":
            yield _experts(arm, job)
            continue
        weights = shape.layers * shape.linear_params / tp
        gemms = 6 * weights * shape.tokens / rate(arm) * 1e3
        others = (shards - 1) / shards
        received = 0.0
        if job.work in ("fsdp", "fsdp_tp"):
            received += others * weights * (2 * (1 if arm == GATHERS else 2) + 2)  # gathered twice; gradients
        if job.work == "ddp":
            received += 2 * others * weights * 2
        if tp > 1:  # x and dy gathered, y and dx scattered: attention and MLP
            once = (tp - 1) / tp * shape.tokens * shape.dim * shape.layers
            received += once * ((4 + 7) * 2 if arm == HIGH else 4 * 1 + 4 * 2)
        yield Expected(arm, gemms, rest_ms(arm, shape.layers, shape.tokens / tp), received)


def _experts(arm: str, job: Job) -> Expected:
    """Rows go out twice, x and dy, and come back twice, y and dx."""
    shape = job.shape
    dense = 2 * shape.dim * (shape.heads + shape.kv_heads) * shape.head_dim
    active = dense + shape.each * 3 * shape.dim * shape.inner
    gemms = 6 * shape.layers * active * shape.tokens / rate(arm) * 1e3
    others = (job.world - 1) / job.world
    rows = others * shape.tokens * shape.each * shape.dim * shape.layers
    received = rows * (2 * (2 if arm == HIGH else 1) + 2 * 2) + 2 * others * shape.layers * dense * 2
    return Expected(arm, gemms, None, received)


def show(works: Sequence[str], model: str, ranks: Sequence[int], tokens: int, tp: int) -> None:
    rows: list[list[Any]] = []
    for work in works:
        for world in ranks:
            size = shared_by(work, world, tp)
            job = Job(work, "", model, "cuda", world, size, tokens)
            expected = list(predict(job))
            for one in expected:
                high = expected[0]
                hidden = high.hidden_ms / one.hidden_ms
                seen = (high.hidden_ms + high.wire_ms) / (one.hidden_ms + one.wire_ms)
                rows.append(
                    [
                        f"{work}, {job.replicas} x {size}",
                        one.arm,
                        table.number(one.gemms_ms, 0),
                        table.number(one.rest_ms, 0),
                        table.number(one.received, 1, 1e-9),
                        table.number(one.wire_ms, 0),
                        table.number(hidden),
                        table.number(seen),
                    ]
                )
    table.show(
        f"predicted, not measured: {model}, {tokens} tokens a rank, H100s of one host",
        ["work", "arm", "GEMMs ms", "other kernels ms", "GB received", "on the wire ms", "hidden", "in sight"],
        rows,
    )
