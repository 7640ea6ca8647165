"""Train one arm of the demo. Arms differ in how the model is compiled, and in nothing else."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from examples.corpus import Corpus
from examples.llama import Llama, LlamaConfig, loss


@dataclass(frozen=True)
class Arm:
    """A name and the arguments of `torch.compile`; None runs the model as it is. `dtype` is of its activations, if not
    the settings'."""

    name: str
    compile: Mapping[str, Any] | None = None
    dtype: torch.dtype | None = None

    def build(self, model: nn.Module) -> Callable[..., Any]:
        return model if self.compile is None else torch.compile(model, **self.compile)


@dataclass(frozen=True)
class Settings:
    """What all arms share. The defaults train in half a minute an arm on two CPU cores."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32  # of activations; parameters are float32, as under torch.autocast
    model: LlamaConfig = field(default_factory=LlamaConfig)
    steps: int = 300
    batch: int = 8
    warmup: int = 20
    learning_rate: float = 1e-3
    validation_batches: int = 32
    last: int = 50  # the final training loss is the mean of this many steps
    seed: int = 0

    def autocast(self, dtype: torch.dtype | None = None) -> AbstractContextManager[Any]:
        dtype = dtype or self.dtype
        return torch.autocast(self.device, dtype, enabled=dtype != torch.float32)

    def new_model(self) -> Llama:
        torch.manual_seed(self.seed)
        return Llama(self.model).to(self.device)

    def batches(self, corpus: Corpus, split: str, steps: int) -> Tensor:
        windows = corpus.batches(split, steps=steps, batch=self.batch, context=self.model.context, seed=self.seed)
        return windows.to(self.device)


@dataclass(frozen=True)
class Result:
    arm: str
    losses: list[float]  # of every step
    final: float  # mean of the last steps
    validation: float  # on held-out files, in the arm's own precision
    step_ms: float  # median; the first step, which compiles, does not move it
    wall_s: float  # everything, compilation included


def train(arm: Arm, settings: Settings, corpus: Corpus, progress: Callable[[float], None]) -> Result:
    """Train a new model from the same seed on the same batches; `progress` hears the loss of every step."""
    torch.compiler.reset()  # arms share code objects, and Dynamo stops recompiling one after eight graphs
    begin = time.perf_counter()
    model = settings.new_model()
    forward = arm.build(model)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warm_cosine(step, settings))
    losses, times = [], []
    for tokens in settings.batches(corpus, "train", settings.steps):
        start = time.perf_counter()
        with settings.autocast(arm.dtype):
            value = loss(forward, tokens[:, :-1], tokens[:, 1:])
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(value.item())  # waits for the device, so the clock below is honest
        times.append(time.perf_counter() - start)
        progress(losses[-1])
    validation = _validate(forward, arm, settings, corpus)
    wall = time.perf_counter() - begin
    return Result(arm.name, losses, fmean(losses[-settings.last :]), validation, 1e3 * median(times), wall)


def _validate(forward: Callable[..., Any], arm: Arm, settings: Settings, corpus: Corpus) -> float:
    batches = settings.batches(corpus, "validation", settings.validation_batches)
    with torch.no_grad(), settings.autocast(arm.dtype):
        return fmean(loss(forward, tokens[:, :-1], tokens[:, 1:]).item() for tokens in batches)


def _warm_cosine(step: int, settings: Settings) -> float:
    """Linear warmup, then half a cosine down to a tenth."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return 0.55 + 0.45 * math.cos(math.pi * done)
