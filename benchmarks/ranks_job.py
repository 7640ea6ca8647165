"""What the ranks of `benchmarks.ranks` are asked to do, and how each tells how far it is."""

import contextlib
import faulthandler
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.expert_blocks import ExpertShape
from benchmarks.llama_blocks import Shape

SEQUENCE = 2048


@dataclass(frozen=True)
class Model:
    """Sizes of a model for each kind of block."""

    llama: Shape
    experts: ExpertShape


MODELS = {
    "blocks": Model(Shape(layers=4, seq=SEQUENCE), ExpertShape(layers=4, seq=SEQUENCE)),
    "llama8b": Model(Shape(layers=32, seq=SEQUENCE), ExpertShape(layers=48, seq=SEQUENCE)),  # Qwen3-30B-A3B's
    "tiny": Model(
        Shape(layers=2, batch=1, seq=64, dim=256, ffn=512, heads=4, kv_heads=4),
        ExpertShape(layers=1, batch=1, seq=64, dim=128, heads=4, kv_heads=4, head_dim=32, experts=8, each=2, inner=128),
    ),
}


def shared_by(work: str, world: int, tp: int) -> int:
    """How many ranks share one model's layers; `tp` is what the command says."""
    return {"tp": world, "fsdp_tp": min(tp, world)}.get(work, 1)


@dataclass(frozen=True)
class Job:
    """One arm of one work."""

    work: str
    arm: str  # NAME or NAME:RECIPE
    model: str  # a key of MODELS
    device: str  # "cuda" or "cpu"
    world: int
    tp: int = 1  # ranks among which one model's layers are sharded
    tokens: int = 0  # of a rank: those of `tp` ranks are one batch, of which each has its part; 0: the model's
    sequence: int = 0  # tokens of one; 0: the model's
    layers: int = 0  # 0: the model's
    whole: bool = False  # compiled as one graph
    async_tp: bool = False
    uncut: bool = False  # Dynamo does not cut graphs at DDP's buckets
    iters: int = 2
    warmup: int = 2
    steps: int = 0  # of training, behind the measurement
    profile: int = 0  # slowest kernels to tell
    patience: float = 45.0  # seconds of one phase until the stacks of all threads are written
    begun: float = field(default_factory=time.time)  # the command

    @property
    def name(self) -> str:
        return self.arm.partition(":")[0]

    @property
    def recipe(self) -> str:
        return self.arm.partition(":")[2]

    @property
    def replicas(self) -> int:
        """How many models see data of their own."""
        return self.world // self.tp

    @property
    def shape(self) -> Any:
        """The shape of the work's blocks and the batch of one model."""
        model = MODELS[self.model]
        shape: Any = model.experts if self.work == "ep" else model.llama
        tokens = (self.tokens or shape.tokens) * self.tp
        length = min(self.sequence or shape.seq, tokens)
        return replace(shape, batch=tokens // length, seq=length, layers=self.layers or shape.layers)


class Progress:
    """Says on stderr which phase a rank is in and how long each took; of one that takes long, where all threads are. So a
    run that is cut tells the cause."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.seconds = job, rank, dict[str, float]()

    def say(self, text: str) -> None:
        at = time.time() - self.job.begun
        # In one write, as ranks share the terminal.
        sys.stderr.write(f"{at:7.1f} s  rank {self.rank}  {self.job.work} {self.job.arm}  {text}\n")
        sys.stderr.flush()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.say(f"{name} ...")
        begun = time.perf_counter()
        faulthandler.dump_traceback_later(self.job.patience, repeat=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self.seconds[name] = time.perf_counter() - begun
        self.say(f"{name}: {self.seconds[name]:.1f} s")
