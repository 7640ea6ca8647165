"""torchtitan's GraphTrainer in FP8, a few steps of a debug model on tokens of its own; one process on a CPU or a GPU
will do:

    python -m examples.torchtitan_graph
    python -m examples.torchtitan_graph --compile.pass_pipeline default --compile.memory_policy default
    python -m examples.torchtitan_graph --config experts

The first and the last train Llama 3 and a mixture of experts (Qwen3) in FP8, the second Llama 3 without te_inductor. It
is torchtitan's own command with this module's configurations. Wants torch 2.14.

GraphTrainer has no backend: it traces forward, loss and backward as one graph, and a pipeline of passes changes that.
`te_inductor.integrations.torchtitan.register` makes such a pipeline known."""

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

if not torch.cuda.is_available():
    import examples.torchtitan_cpu  # noqa: F401

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import TrainingConfig
from torchtitan.experiments.graph_trainer import llama3, qwen3
from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig, to_graph_trainer_config
from torchtitan.experiments.graph_trainer.trainer import GraphTrainer
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

from examples.torchtitan_run import LAYERS, DenseAttention, NoTokenizer, Tokens, start
from te_inductor.integrations.torchtitan import register

register({"recipe": os.environ.get("TE_INDUCTOR_RECIPE", "rowwise")})
# On a CPU nobody knows the bandwidth that one asks for, and the other is about CUDA.
NOT_ON_CPU = ["joint_transformer_block_bucketing_reordering_pass", "cudagraph_pass"]


class Trainer(GraphTrainer):  # type: ignore[misc]
    """torchtitan's, with the losses of a run and its graph at hand."""

    last: ClassVar["Trainer | None"] = None

    @dataclass(kw_only=True, slots=True)
    class Config(GraphTrainer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.losses: list[float] = []
        Trainer.last = self

    def close(self) -> None:
        super().close()
        print("losses", [round(loss, 4) for loss in self.losses])

    def forward_backward_step(self, **given: Any) -> Tensor:
        loss: Tensor = super().forward_backward_step(**given)
        self.losses.append(loss.item())
        return loss


def debug() -> Trainer.Config:
    """The configuration that `--config debug` names."""
    return _of(to_graph_trainer_config(llama3_debugmodel(), llama3.model_registry))


def experts() -> Trainer.Config:
    """The configuration that `--config experts` names."""
    return _of(to_graph_trainer_config(qwen3_moe_debug(), qwen3.model_registry))


def _of(given: GraphTrainer.Config) -> Trainer.Config:
    DenseAttention(DenseAttention.Config()).convert(given.model_spec.model)
    del given.model_spec.model.layers[LAYERS:]
    return Trainer.Config(
        loss=given.loss,
        model_spec=given.model_spec,
        optimizer=given.optimizer,
        lr_scheduler=given.lr_scheduler,
        parallelism=given.parallelism,
        training=TrainingConfig(local_batch_size=2, seq_len=64, steps=4, disable_cuda_graphs=True),
        tokenizer=NoTokenizer.Config(),
        dataloader=Tokens.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=False),
        compile=GraphTrainerCompileConfig(
            enable=True,
            pass_pipeline="te",
            memory_policy="te",  # type: ignore[arg-type]
            disable_passes=[] if torch.cuda.is_available() else NOT_ON_CPU,
        ),
        dump_folder="out/torchtitan",
    )


def main() -> None:
    start("examples.torchtitan_graph")


if __name__ == "__main__":
    main()
