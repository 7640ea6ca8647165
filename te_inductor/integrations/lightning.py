"""Lightning's Trainer: the state of delayed scaling in its checkpoints, and statistics of a run.

Sources: lightning 2.6, pytorch/callbacks/callback.py, pytorch/trainer/connectors/checkpoint_connector.py (a callback's
`on_load_checkpoint` comes after the weights are loaded)."""

from typing import Any

from te_inductor.api.saved_state import load_state_dict, state_dict
from te_inductor.integrations.statistics_log import StatisticsLog
from te_inductor.integrations.versions import parts_of

with parts_of("lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer

KEY = "te_inductor_state"


class ScalingStateCallback(Callback):  # type: ignore[misc]
    """Saves delayed scaling's state in each checkpoint of a Trainer, and loads it where training goes on from one.
    Without it a resumed run takes the scales of its first step from that step's own tensors.

    A checkpoint without such state, of another recipe or of high precision, is loaded as it is.
    """

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Called while a checkpoint is made, on each rank."""
        found = state_dict(pl_module)
        if found:
            checkpoint[KEY] = found

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Called with the checkpoint that training goes on from."""
        if KEY in checkpoint:
            load_state_dict(pl_module, checkpoint[KEY])


class StatisticsCallback(Callback):  # type: ignore[misc]
    """Writes statistics of the model that trains: ``StatisticsCallback(StatisticsLog("statistics.jsonl"))``."""

    def __init__(self, log: StatisticsLog) -> None:
        self.log = log

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Called behind each batch, of which several may be one step."""
        self.log.note(pl_module, trainer.global_step, trainer.is_global_zero)
