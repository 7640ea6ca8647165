"""The state of delayed scaling for frameworks that save objects with a `state_dict` and a `load_state_dict`."""

import io
from typing import Any

import torch
from torch import nn

from te_inductor.api.saved_state import load_state_dict, state_dict
from te_inductor.errors import StateError

KEY = "te_inductor_state"


class ScalingState:
    """The scales of models as one object with `state_dict` and `load_state_dict`: for Accelerate's
    `register_for_checkpointing`, for `torch.distributed.checkpoint` and what builds on it (torchtitan).

        accelerator.register_for_checkpointing(ScalingState(model))
        torch.distributed.checkpoint.save({"model": …, "scales": ScalingState(model)}, checkpoint_id=folder)

    The value is bytes under one key, whatever the models' layers: what reads a checkpoint asks an object that has not
    run yet for the keys to read. Each model's entries stand under its place in the list. On several ranks of a
    distributed checkpoint one rank's bytes are kept: FSDP and tensor parallel keep state equal on all, others may
    differ.
    """

    def __init__(self, *models: nn.Module) -> None:
        self.models = models

    def state_dict(self) -> dict[str, bytes]:
        """``{"te_inductor_state": …}``; also of models without state."""
        file = io.BytesIO()
        torch.save([state_dict(model) for model in self.models], file)
        return {KEY: file.getvalue()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, before the models' first call or after it.

        Raises:
            StateError: the state is that of other models, or of another number of them.
        """
        found = torch.load(io.BytesIO(state[KEY]), map_location="cpu", weights_only=True)
        if len(found) != len(self.models):
            raise StateError(
                f"the checkpoint has scales of {len(found)} models, expected {len(self.models)}; save and load with the"
                " same number of model parts"
            )
        for model, entries in zip(self.models, found, strict=True):
            if entries:
                load_state_dict(model, entries)
