"""What differs between torch 2.11 and 2.15, each difference in one function. Nothing else asks for torch's version."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._library import opaque_object

try:  # 2.15
    from torch._custom_class_base import CustomClassBaseMeta as ConstantMeta
except ImportError:  # 2.11 needs the metaclass, 2.13 accepts it
    from torch._opaque_base import OpaqueBaseMeta as ConstantMeta

__all__ = ["ConstantMeta", "compile_fx", "constant_type_name", "has_block_scaled_mm", "register_constant"]


def register_constant(cls: type) -> None:
    """Let instances of `cls` stand in `fx.Node.args` and in an op's schema, compared by value."""
    if hasattr(opaque_object, "register_custom_class"):  # 2.15 renamed both the function and the kind
        opaque_object.register_custom_class(cls, typ="constant")
    else:
        opaque_object.register_opaque_type(cls, typ="value")


def constant_type_name(cls: type) -> str:
    """The name by which a schema refers to a registered class."""
    name: str = opaque_object.get_opaque_type_name(cls)
    return name


def has_block_scaled_mm(device: torch.device) -> bool:
    """Whether torch._scaled_mm takes scales of 1 x 128 and 128 x 128 blocks there: cuBLASLt of CUDA 12.9 on Hopper."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    major, minor = torch.version.cuda.split(".")[:2]
    return (int(major), int(minor)) >= (12, 9)


def compile_fx(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
    wrap_inner: Callable[[Callable[..., Any]], Callable[..., Any]],
    region: str | None = None,
) -> Any:
    """Inductor's `compile_fx`, its compiler of single graphs wrapped; 2.13 and later can name the compiled region."""
    from torch._inductor.compile_fx import compile_fx as inductor
    from torch._inductor.compile_fx import compile_fx_inner

    named: dict[str, Any] = {"compile_region_name": region} if region is not None else {}
    if named and "compile_region_name" not in inspect.signature(inductor).parameters:
        named = {}
    return inductor(gm, inputs, wrap_inner(compile_fx_inner), config_patches=dict(patches), **named)
