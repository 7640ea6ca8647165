"""A tiny vision transformer of timm, trained in FP8 with timm's optimizer, EMA and checkpoints; a CPU will do:

    python -m examples.timm_run --folder /tmp/run

One line is ours: `model.compile(…)`, in place, so that checkpoints stay those of the plain model. timm's own script
takes the name alone, `train.py --torchcompile te`; its recipe comes from the environment (TE_INDUCTOR_RECIPE). The patch
embedding is a convolution, which stays in high precision."""

import argparse
from pathlib import Path
from typing import Any

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.utils import CheckpointSaver, ModelEmaV3
from torch import nn

import te_inductor


def model(recipe: str = "current") -> nn.Module:
    """Compiled in place. The policy names the recipe once more, for GPUs, where so small layers gain nothing."""
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 16}
    vit: nn.Module = timm.create_model("vit_tiny_patch16_224", pretrained=False, **sizes)
    vit.to("cuda" if torch.cuda.is_available() else "cpu")
    vit.compile(backend="te", options={"recipe": recipe, "policy": {"*": recipe}})
    return vit


def images(vit: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    pixels, labels = torch.randn(8, 3, 32, 32, generator=generator), torch.randint(16, (8,), generator=generator)
    device = next(vit.parameters()).device
    return pixels.to(device), labels.to(device)


def trained(vit: nn.Module, folder: Path, steps: int) -> list[float]:
    """Losses on one batch, again and again. A checkpoint lies in the folder afterwards."""
    optimizer = create_optimizer_v2(vit, opt="adamw", lr=1e-3, weight_decay=0.05)
    ema = ModelEmaV3(vit, decay=0.9)
    saver = CheckpointSaver(vit, optimizer, model_ema=ema, checkpoint_dir=str(folder), recovery_dir=str(folder))
    pixels, labels = images(vit)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(vit(pixels).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(vit)
        losses.append(loss.item())
    saver.save_checkpoint(0, metric=-losses[-1])
    return losses


def ran(vit: nn.Module) -> Any:
    """Returns the layers that ran in low precision; raises if one did not."""
    return te_inductor.assert_low_precision(vit, images(vit)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    vit = model()
    print(trained(vit, args.folder, args.steps))
    print(ran(vit))


if __name__ == "__main__":
    main()
