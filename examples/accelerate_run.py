"""A loop of one's own by Accelerate, in FP8 with delayed scaling: gradients are accumulated over two batches, and a run
goes on from what another has saved. A CPU will do:

    python -m examples.accelerate_run --folder /tmp/run
    python -m examples.accelerate_run --folder /tmp/run --steps 4 --resume

Three lines are ours: `register`, by which Accelerate knows the backend's name, the plugin, which takes options, and
`register_for_checkpointing`, by which `save_state` holds the scales."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import te_inductor
from te_inductor.integrations.accelerate import register
from te_inductor.integrations.stateful import ScalingState

register()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return y


def trained(folder: Path, steps: int, resume: bool = False, recipe: str = "delayed") -> tuple[nn.Module, list[float]]:
    """The model as it was before Accelerate had it, and the losses. The state lies in the folder afterwards. The policy
    names the recipe once more, for GPUs, where so small layers gain nothing."""
    torch.manual_seed(0)
    plugin = TorchDynamoPlugin(backend="te", options={"recipe": recipe, "policy": {"*": recipe}})
    accelerator = Accelerator(gradient_accumulation_steps=2, dynamo_plugin=plugin, cpu=not torch.cuda.is_available())
    model = Classifier()
    data = TensorDataset(torch.randn(64, 64), torch.randint(64, (64,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16))
    accelerator.register_for_checkpointing(ScalingState(model))
    if resume:
        accelerator.load_state(str(folder))
    losses = []
    for _ in range(steps):
        for x, labels in batches:
            with accelerator.accumulate(run):
                loss = nn.functional.cross_entropy(run(x).float(), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.save_state(str(folder))
    return model, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4, help="passes over the data")
    parser.add_argument("--resume", action="store_true", help="go on from what the folder holds")
    args = parser.parse_args()
    model, losses = trained(args.folder, args.steps, args.resume)
    print(losses)
    print(f"{len(te_inductor.state_dict(model))} tensors of scaling state")


if __name__ == "__main__":
    main()
