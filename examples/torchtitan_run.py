"""torchtitan's debug model in FP8, a few steps on tokens of its own; one process on a CPU or a GPU will do:

    python -m examples.torchtitan_run --compile.enable --compile.backend te
    python -m examples.torchtitan_run --compile.enable --compile.backend te --checkpoint.enable --training.steps 8

It is torchtitan's own command with this module's configuration: `torchrun … -m torchtitan.train --module
examples.torchtitan_run --config debug` starts the same. The recipe comes from the environment (TE_INDUCTOR_RECIPE), as
torchtitan passes no options. Each block is compiled by itself, so globs of a policy start at a block.

Two things are ours. `Trainer` saves delayed scaling's state with the checkpoints. `DenseAttention` is a converter:
torchtitan's FlexAttention refuses all backends but Inductor by their names."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

if not torch.cuda.is_available():
    import examples.torchtitan_cpu  # noqa: F401

import torchtitan.trainer
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.train import main as train

from te_inductor.integrations.stateful import ScalingState

VOCABULARY = 2048  # of the debug model
LAYERS = 2  # of its six, each of which is compiled


class DenseAttention(ModelConfigConverter):  # type: ignore[misc]
    """FlexAttention becomes torch's scaled_dot_product_attention, causal over the whole sequence: for sequences of one
    document, as there is no mask between documents."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config) -> None:
        pass

    def convert(self, model_config: Any) -> Any:
        for _, _, parent, name in model_config.traverse(FlexAttention.Config):
            setattr(parent, name, ScaledDotProductAttention.Config())
        return model_config


class Tokens(BaseDataLoader):  # type: ignore[misc]
    """One batch of random tokens, again and again, so that nothing has to be fetched and the loss falls."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **given: Any) -> None:
        generator = torch.Generator().manual_seed(dp_rank)
        tokens = torch.randint(VOCABULARY, (local_batch_size, seq_len + 1), generator=generator)
        self.batch = {"input": tokens[:, :-1], "positions": torch.arange(seq_len).expand(local_batch_size, -1)}
        self.labels = tokens[:, 1:]

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            yield dict(self.batch), self.labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    """The tokens are numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError("tokens are numbers already")

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError("tokens are numbers already")

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Trainer(torchtitan.trainer.Trainer):  # type: ignore[misc]
    """torchtitan's, with the scales in its checkpoints, and the losses of a run at hand."""

    last: ClassVar["Trainer | None"] = None

    @dataclass(kw_only=True, slots=True)
    class Config(torchtitan.trainer.Trainer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.losses: list[float] = []
        Trainer.last = self

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict()
        return state | ScalingState(*self.model_parts).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        ScalingState(*self.model_parts).load_state_dict(state_dict)

    def forward_backward_step(self, **given: Any) -> Tensor:
        loss: Tensor = super().forward_backward_step(**given)
        self.losses.append(loss.item())
        return loss


def debug() -> Trainer.Config:
    """The configuration that `--config debug` names."""
    given = llama3_debugmodel()
    spec = model_registry("debugmodel", converters=[DenseAttention.Config()])
    del spec.model.layers[LAYERS:]
    return Trainer.Config(
        loss=given.loss,
        model_spec=spec,
        optimizer=given.optimizer,
        lr_scheduler=given.lr_scheduler,
        training=TrainingConfig(local_batch_size=2, seq_len=64, steps=4, disable_cuda_graphs=True),
        tokenizer=NoTokenizer.Config(),
        dataloader=Tokens.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(interval=2, last_save_model_only=False),
        dump_folder="out/torchtitan",
    )


def start(module: str) -> None:
    """torchtitan's command, as one process, with a module's configurations."""
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 0,
    }.items():
        os.environ.setdefault(name, str(value))
    config = [] if "--config" in sys.argv else ["--config", "debug"]
    sys.argv[1:1] = ["--module", module, *config]
    train()


def main() -> None:
    start("examples.torchtitan_run")


if __name__ == "__main__":
    main()
