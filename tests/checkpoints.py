"""Writers of published checkpoint formats, in plain torch and apart from the package: what its reader is held to.

Each takes a weight (N, K) and returns the tensors that stand for it, by suffix, and the fp32 values that they mean, in
the order of operations that docs/numerics.md states."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Written = tuple[dict[str, Tensor], Tensor]


def fp8(weight: Tensor, scale: Tensor, wide: Tensor, suffix: str) -> Written:
    """`wide` is the scale of each value."""
    data = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"": data, suffix: scale}, data.float() * wide


def fp8_tensor(weight: Tensor, suffix: str = "_scale", shape: tuple[int, ...] = ()) -> Written:
    scale = (weight.abs().amax() / 448).reshape(shape)
    return fp8(weight, scale, scale.reshape(()), suffix)


def fp8_channel(weight: Tensor, dtype: torch.dtype = torch.bfloat16) -> Written:
    """Scales in the model's dtype, as many checkpoints have them."""
    scale = (weight.abs().amax(1, keepdim=True) / 448).to(dtype)
    return fp8(weight, scale, scale.float(), "_scale")


def fp8_blocks(weight: Tensor, suffix: str = "_scale_inv", dtype: torch.dtype = torch.float32) -> Written:
    n, k = weight.shape
    padded = F.pad(weight, (0, -k % 128, 0, -n % 128))
    blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    if dtype is torch.float8_e8m0fnu:
        scale = 2.0 ** scale.log2().ceil()
    scale = scale.to(dtype)
    wide = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
    return fp8(weight, scale, wide, suffix)


def _nvfp4(weight: Tensor, tensor_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # packed, block scales, values
    n, k = weight.shape
    blocks = weight.view(n, k // 16, 16)
    scale = (blocks.abs().amax(-1) / 6 / tensor_scale).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    x = blocks / (scale.float() * tensor_scale)[..., None]
    codes = (x.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (x < 0)
    values = E2M1[codes % 8] * (1 - 2 * (codes // 8)) * scale.float()[..., None] * tensor_scale
    pairs = codes.view(n, k // 2, 2).to(torch.uint8)
    return pairs[..., 0] | pairs[..., 1] << 4, scale, values.view(n, k)


def nvfp4_modelopt(weight: Tensor) -> Written:
    tensor_scale = weight.abs().amax() / (6 * 448)
    packed, scale, values = _nvfp4(weight, tensor_scale)
    return {"": packed, "_scale": scale, "_scale_2": tensor_scale}, values


def nvfp4_compressed(weight: Tensor) -> Written:
    factor = 448 * 6 / weight.abs().amax()
    packed, scale, values = _nvfp4(weight, 1.0 / factor)
    return {"_packed": packed, "_scale": scale, "_global_scale": factor.reshape(1)}, values


WRITERS: dict[str, tuple[Callable[[Tensor], Written], str]] = {  # and the recipe that their weights are stored as
    "fine_grained": (fp8_blocks, "block"),
    "fine_grained_e8m0": (lambda w: fp8_blocks(w, dtype=torch.float8_e8m0fnu), "block"),
    "fine_grained_tensor": (lambda w: fp8_tensor(w, "_scale_inv"), "current"),
    "compressed_tensor": (lambda w: fp8_tensor(w, shape=(1,)), "current"),
    "compressed_channel": (fp8_channel, "rowwise"),
    "compressed_blocks": (lambda w: fp8_blocks(w, "_scale", torch.bfloat16), "block"),
    "compressed_nvfp4": (nvfp4_compressed, "nvfp4_weight_only"),
    "modelopt_tensor": (fp8_tensor, "current"),
    "modelopt_nvfp4": (nvfp4_modelopt, "nvfp4_weight_only"),
}


def write(
    model: nn.Module, writer: Callable[[Tensor], Written], ignored: tuple[str, ...] = ()
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint whose linear layers are quantized but for the ignored ones; and what each parameter means."""
    tensors, values = {}, {}
    linear = {f"{path}.weight".strip(".") for path, one in model.named_modules() if isinstance(one, nn.Linear)}
    for name, tensor in model.state_dict().items():
        if name in linear and name.removesuffix(".weight") not in ignored:
            parts, values[name] = writer(tensor.float())
            tensors |= {name + suffix: part for suffix, part in parts.items()}
        else:
            tensors[name] = values[name] = tensor.clone()
    return tensors, values


EXPERTS = 3, 256, 96  # how many, rows of gate and up, columns


class Experts(nn.Module):
    def __init__(self, n: int = EXPERTS[1]) -> None:
        super().__init__()
        count, _, k = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(count, n, k))
        self.down_proj = nn.Parameter(torch.randn(count, k, n // 2))


class ExpertsModel(nn.Module):
    def __init__(self, n: int = EXPERTS[1]) -> None:
        super().__init__()
        self.experts = Experts(n)
        self.norm = nn.LayerNorm(EXPERTS[2])
