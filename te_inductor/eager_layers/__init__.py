"""The eager runtime's operations, to be called by hand: what a compiled layer is made of, without a compiler.

    norm, linear = RMSNorm(1e-6), Linear(recipes.Float8CurrentScaling())
    y = linear(norm(x, gain), weight, bias)

Each is an `Operation` (ops/differentiable.py): `compute`, `setup_context` and `backward`. Instances hold constants,
tensors and parameters are inputs, and a sequence of them is Python's own. High-precision ones call the kernels that
plain PyTorch's autograd calls, low-precision ones the package's eager ops, so that a sequence has the bits of the graph
that the backend makes of the same layers, run uncompiled. A gradient of a gradient is refused."""

from te_inductor.eager_layers.grouped import GroupedBias, GroupedLinear, WaitingGradients
from te_inductor.eager_layers.high_precision import (
    GELU,
    AllGather,
    AllReduce,
    Bias,
    ConstantScale,
    Dropout,
    GeGLU,
    Identity,
    L2Normalization,
    LayerNorm,
    ReduceScatter,
    ReLU,
    Reshape,
    RMSNorm,
    SiLU,
    SquaredReLU,
    SwiGLU,
)
from te_inductor.eager_layers.low_precision import Linear, Quantize
from te_inductor.ops.differentiable import Operation

__all__ = [
    "GELU",
    "AllGather",
    "AllReduce",
    "Bias",
    "ConstantScale",
    "Dropout",
    "GeGLU",
    "GroupedBias",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "Operation",
    "Quantize",
    "RMSNorm",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SiLU",
    "SquaredReLU",
    "SwiGLU",
    "WaitingGradients",
]
