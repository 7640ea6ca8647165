"""A tiny Llama in Lightning, by its Trainer or by Fabric, in FP8 with delayed scaling; a CPU will do:

    python -m examples.lightning_run --folder /tmp/run
    python -m examples.lightning_run --folder /tmp/run --steps 8 --resume /tmp/run/step=4.ckpt
    python -m examples.lightning_run --fabric

What is ours: one line that compiles the model, and the callback that saves the scales with each checkpoint. The model
is compiled inside the LightningModule, in place, so that its `state_dict` has the keys of the plain model."""

import argparse
from pathlib import Path
from typing import Any

import lightning  # before torch.compile is called: it takes note of what Fabric is to compile again
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from examples.llama import Llama, LlamaConfig, loss
from te_inductor.integrations.lightning import ScalingStateCallback

CONFIG = LlamaConfig(vocab=64, dim=64, layers=2, heads=2, hidden=128, context=16)


class Model(LightningModule):  # type: ignore[misc]
    """Predicts the next token."""

    def __init__(self, recipe: str = "delayed") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.llama = Llama(CONFIG)
        self.llama.compile(backend="te", options={"recipe": recipe, "policy": {"*": recipe}})
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (tokens,) = batch
        value = loss(self.llama, tokens[:, :-1], tokens[:, 1:])
        self.losses.append(value.item())
        return value

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def data() -> DataLoader[Any]:
    """Random tokens, so that nothing has to be fetched. All batches are equal: where a run goes on from a checkpoint in
    an epoch, a plain loader begins with the first batch again."""
    tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(1)).repeat(8, 1)
    return DataLoader(TensorDataset(tokens), batch_size=8)


def trained(folder: Path, steps: int, resume: Path | None = None, recipe: str = "delayed") -> Model:
    """Trains by Lightning's Trainer, with a checkpoint behind every second step."""
    gpu, model = torch.cuda.is_available(), Model(recipe)
    checkpoints = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = Trainer(
        max_steps=steps,
        accelerator="gpu" if gpu else "cpu",
        devices=1,
        precision="bf16-mixed" if gpu else "32-true",
        callbacks=[checkpoints, ScalingStateCallback()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model, data(), ckpt_path=resume)
    return model


def trained_by_fabric(steps: int, recipe: str = "delayed") -> tuple[Any, list[float]]:
    """Trains by Fabric: compile first, then `setup`, which compiles what it has wrapped by the same arguments."""
    gpu = torch.cuda.is_available()
    fabric = lightning.Fabric(
        accelerator="gpu" if gpu else "cpu", devices=1, precision="bf16-mixed" if gpu else "32-true"
    )
    torch.manual_seed(0)
    llama = Llama(CONFIG)
    options: dict[str, Any] = {"recipe": recipe, "policy": {"*": recipe}}
    compiled = torch.compile(llama, backend="te", options=options)
    model, optimizer = fabric.setup(compiled, torch.optim.AdamW(llama.parameters(), 1e-3))
    losses = []
    for _, (tokens,) in zip(range(steps), fabric.setup_dataloaders(data()), strict=False):
        value = loss(model, tokens[:, :-1], tokens[:, 1:])
        fabric.backward(value)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return model, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("out"))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--fabric", action="store_true", help="by Fabric in place of the Trainer")
    args = parser.parse_args()
    if args.fabric:
        print(trained_by_fabric(args.steps)[1])
    else:
        print(trained(args.folder, args.steps, args.resume).losses)


if __name__ == "__main__":
    main()
