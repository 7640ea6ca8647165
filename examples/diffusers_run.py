"""A tiny Flux transformer of diffusers in FP8, block by block: some training steps, then some denoising ones; a CPU will
do:

    python -m examples.diffusers_run

One line is ours: `compile_repeated_blocks` hands its arguments to each block's `compile`. A pipeline's transformer is
compiled likewise: `pipe.transformer.compile_repeated_blocks(backend="te", options={…})`. Equal blocks share one
compiled graph, so globs of a policy start at a block: `attn.to_q`, not `transformer_blocks.0.attn.to_q`. What stands
outside of the blocks (embedders, the last projection) stays as it is."""

import argparse
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

from te_inductor import assert_low_precision

IMAGE, TEXT, CHANNELS = 16, 8, 16  # tokens of an image, tokens of its text, channels of a latent


def model(recipe: str = "current") -> FluxTransformer2DModel:
    """Compiled block by block. The policy names the recipe once more, for GPUs, where so small layers gain nothing."""
    torch.manual_seed(0)
    flux = FluxTransformer2DModel(
        in_channels=CHANNELS,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(8, 12, 12),
    )
    flux.compile_repeated_blocks(backend="te", options={"recipe": recipe, "policy": {"*": recipe}})
    return flux.to("cuda" if torch.cuda.is_available() else "cpu")


def call(flux: FluxTransformer2DModel, latents: Tensor, time: Tensor) -> Tensor:
    """The velocity at `latents` (B, IMAGE, CHANNELS) and `time` (B,), for a text of zeros."""
    batch, device = len(latents), latents.device
    grid = torch.stack([torch.zeros(IMAGE), torch.arange(IMAGE) // 4, torch.arange(IMAGE) % 4], -1)
    velocity: Tensor = flux(
        latents,
        encoder_hidden_states=torch.zeros(batch, TEXT, 32, device=device),
        pooled_projections=torch.zeros(batch, 32, device=device),
        timestep=time,
        img_ids=grid.to(device),
        txt_ids=torch.zeros(TEXT, 3, device=device),
        return_dict=False,
    )[0]
    return velocity


def trained(flux: FluxTransformer2DModel, steps: int) -> list[float]:
    """Losses of flow matching: the velocity from an image to noise."""
    optimizer = torch.optim.AdamW(flux.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(4, IMAGE, CHANNELS, generator=generator).to(flux.device)
    noise = torch.randn(4, IMAGE, CHANNELS, generator=generator).to(flux.device)
    time = torch.rand(4, generator=generator).to(flux.device)
    losses = []
    for _ in range(steps):
        mixed = torch.lerp(images, noise, time[:, None, None])
        loss = (call(flux, mixed, time) - (noise - images)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def denoised(flux: FluxTransformer2DModel, steps: int) -> Tensor:
    """Goes from noise to an image, by Euler's method."""
    latents = torch.randn(1, IMAGE, CHANNELS, generator=torch.Generator().manual_seed(2)).to(flux.device)
    for time in torch.linspace(1, 0, steps + 1)[:-1]:
        latents = latents - call(flux, latents, time.repeat(1).to(flux.device)) / steps
    return latents


def ran(flux: FluxTransformer2DModel) -> Any:
    """Returns the layers that ran in low precision; raises if one of a block did not."""
    latents = torch.randn(2, IMAGE, CHANNELS, device=flux.device)
    outside = ["x_embedder", "context_embedder", "time_text_embed.*", "norm_out.linear", "proj_out"]
    return assert_low_precision(lambda: call(flux, latents, torch.ones(2, device=flux.device)), high_precision=outside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    flux = model()
    print(trained(flux, args.steps))
    print(denoised(flux, args.steps).shape)
    print(ran(flux))


if __name__ == "__main__":
    main()
