"""Ops that Inductor does not lower, called by generated code as the functions that they are.

# Note [Calls without a dispatcher]
torch's dispatcher takes 10 us to call a kernel that is written in Python, most of it for arguments that become torch's
values and Python's again; the call itself takes 0.1. Generated code knows what the dispatcher would find: plain tensors
of one device, and gradients off. So it calls the kernel of that device. Ops keep their dispatcher for all other callers:
eager code, programs that are saved as packages, C++ wrappers.

Likewise, Inductor writes a constant as the expression that makes it, which each call evaluates, with the checks of what
it makes. Generated code has the constant itself under a name, which says all that the expression does, so that keys of
caches tell two constants apart as before."""

import hashlib
import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import _ops
from torch._inductor import ir
from torch._inductor.codegen import wrapper
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.virtualized import V

from te_inductor import compat
from te_inductor.recipes.constants import Constant
from te_inductor.runtime import definition

for _device_type, _kernels in definition.KERNELS.items():  # also for code that a cache returns
    setattr(extern_kernels, f"te_inductor_{_device_type}", _kernels)


def called_directly() -> AbstractContextManager[None]:
    """Have code call kernels by their names where it is generated while this context holds."""
    original = ir.ExternKernel.set_python_kernel_name

    def set_python_kernel_name(node: Any, name: str | None) -> None:
        original(node, name)
        if name is None and not V.graph.cpp_wrapper and (device := _device(node)) is not None:
            node.python_kernel_name = f"extern_kernels.te_inductor_{device}.{_short_name(node.op_overload)}"

    return compat.patch("torch._inductor.ir.ExternKernel.set_python_kernel_name", set_python_kernel_name)


def constants_named() -> AbstractContextManager[None]:
    """Have code name constants of ours where it is generated while this context holds. They cannot change. A release
    that writes them by another function makes them at each call."""
    original: Any = getattr(wrapper, "get_opaque_obj_repr", None)
    if original is None:
        return nullcontext()

    def get_opaque_obj_repr(value: Any) -> tuple[str, dict[str, Any]]:
        source, names = original(value)
        if not isinstance(value, Constant) or V.graph.cpp_wrapper:
            return source, names
        name = f"te_inductor_constant_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
        return name, {name: value}

    return compat.patch("torch._inductor.codegen.wrapper.get_opaque_obj_repr", get_opaque_obj_repr)


def _device(node: Any) -> str | None:
    """The kind of device whose kernel a call may name: None where the op is not ours, or asks for a dispatcher."""
    op = node.op_overload
    if not isinstance(op, _ops.OpOverload) or op.namespace != "te_inductor":
        return None
    kinds = {device.type for one in node.inputs if (device := one.get_device()) is not None}
    if len(kinds) != 1:
        return None
    [kind] = kinds
    kernel = getattr(definition.KERNELS.get(kind), _short_name(op), None)
    return kind if kernel is not None and _takes_as(kernel, op) else None


def _takes_as(kernel: Any, op: Any) -> bool:
    """Whether a kernel has its op's arguments, by name, in order and with defaults, and needs no others."""
    found = list(inspect.signature(kernel, follow_wrapped=False).parameters.values())
    wanted = [(one.name, one.has_default_value()) for one in op._schema.arguments]
    own = found[len(wanted) :]
    return [(one.name, one.default is not one.empty) for one in found[: len(wanted)]] == wanted and all(
        one.default is not one.empty for one in own
    )


def _short_name(op: Any) -> str:
    return str(op._schema.name.partition("::")[2])
