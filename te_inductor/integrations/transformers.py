"""transformers' Trainer: the state of delayed scaling in its checkpoints, and statistics of a run.

Source: transformers 5.23 (5.17 is alike), trainer.py, trainer_callback.py; trainer_utils.py has the folders' names."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from te_inductor.api.saved_state import load_state_dict, state_dict
from te_inductor.integrations.statistics_log import StatisticsLog
from te_inductor.integrations.versions import parts_of

with parts_of("transformers"):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

FILE = "te_inductor_state.pt"


class ScalingStateCallback(TrainerCallback):  # type: ignore[misc]
    """Saves delayed scaling's state beside each checkpoint of a Trainer, and loads it where training is resumed from
    one. Without it a resumed run takes the scales of its first step from that step's own tensors.

    On several ranks the first one writes: FSDP and tensor parallel keep state equal on all, others may differ.
    """

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Called behind each checkpoint."""
        found = state_dict(_model(given))
        if found and state.is_world_process_zero:
            torch.save(found, _folder(args, state) / FILE)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Called before the first step, with the state of the checkpoint that training goes on from."""
        path = _folder(args, state) / FILE
        if state.global_step and path.exists():
            load_state_dict(_model(given), torch.load(path, map_location="cpu"))


class StatisticsCallback(TrainerCallback):  # type: ignore[misc]
    """Writes statistics of the model that trains: ``StatisticsCallback(StatisticsLog("statistics.jsonl"))``."""

    def __init__(self, log: StatisticsLog) -> None:
        self.log = log

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Called behind each step of the optimizer."""
        self.log.note(_model(given), state.global_step, state.is_world_process_zero)


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _model(given: dict[str, Any]) -> nn.Module:
    model: nn.Module = given["model"]
    return model
