"""Constants of ours in graphs and schemas: torch 2.15 renamed what registers them."""

from torch._library import opaque_object

try:  # 2.15
    from torch._custom_class_base import CustomClassBaseMeta as ConstantMeta
except ImportError:  # 2.11 needs the metaclass, 2.13 accepts it
    from torch._opaque_base import OpaqueBaseMeta as ConstantMeta

__all__ = ["ConstantMeta", "constant_type_name", "register_constant"]


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
