"""`GatheredWeight`: a linear layer's weight (N, K) as FSDP2, or a graph (`ops/sharded_weight.py`), gathered it in low
precision. It trains: its gradient has the dtype of what it stands for, and goes to the shards by FSDP's own reduction.

A tensor subclass, as `fsdp_post_all_gather` may return one: the module's parameter while it is gathered. The backend
multiplies by what it holds (`ops/layers`). Anything else that reads it, in eager code or behind another backend,
reads the values that it stands for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from te_inductor import compat
from te_inductor.errors import GatherError
from te_inductor.ops.casts import Copy, dequantize
from te_inductor.recipes import Quantizer, Recipe

aten = torch.ops.aten


class GatheredWeight(Tensor):
    """Invariant: ``self ~= values.float() * expand(scale_inv)``; both sizes are multiples of the scope's alignment."""

    values_: Tensor  # (N, K), in memory that FSDP lets go of and fills again
    scale_inv: Tensor  # as the recipe's weights store it: (), or (N/128 * K/128,)
    recipe: Recipe | None  # None: that of the site in whose graph it was gathered
    quantizer: Quantizer

    @staticmethod
    def __new__(cls, values: Tensor, scale_inv: Tensor, shape: torch.Size, dtype: torch.dtype, *_: Any) -> Any:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=values.device)  # type: ignore[attr-defined]

    def __init__(
        self,
        values: Tensor,
        scale_inv: Tensor,
        shape: torch.Size,
        dtype: torch.dtype,
        recipe: Recipe | None,
        quantizer: Quantizer | None = None,
    ) -> None:
        self.values_, self.scale_inv, self.recipe = values, scale_inv, recipe
        self.quantizer = quantizer or recipe.slots().weight  # type: ignore[union-attr]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def dequantize(self) -> Tensor:  # type: ignore[override]
        """What was gathered, as a plain (N, K) tensor of this tensor's dtype."""
        return dequantize(self.values_, self.scale_inv, self.quantizer, self.dtype)  # type: ignore[no-any-return]

    def copies(self, columnwise: bool) -> tuple[Copy, Copy | None]:
        """The operands of fprop and dgrad. The second is the transpose of what was gathered, not cast again."""
        row = Copy(self.values_, self.scale_inv)
        return row, Copy(self.values_.t().contiguous(), self._transposed_scales()) if columnwise else None

    def _transposed_scales(self) -> Tensor:
        scope = self.quantizer.granularity
        if scope.whole:
            return self.scale_inv
        return self.scale_inv.view(scope.blocks(*self.shape)).t().contiguous().view(-1)

    def like(self) -> "GatheredWeight":
        """Another tensor of the same memory."""
        return GatheredWeight(self.values_, self.scale_inv, self.shape, self.dtype, self.recipe, self.quantizer)

    def __repr__(self) -> str:  # type: ignore[override]
        n, k = self.shape
        how = self.recipe.name if self.recipe else self.quantizer.element
        return f"GatheredWeight({n} x {k}, {how}, for {self.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values_", "scale_inv"], (self.dtype, self.recipe, self.quantizer)

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> "GatheredWeight":
        return cls(parts["values_"], parts["scale_inv"], size, *meta)

    def _stable_hash_for_caching(self) -> str:
        """The key for AOTAutograd's cache: everything that its graph depends on but the parts' own metadata."""
        return repr((type(self).__name__, tuple(self.shape), self.dtype, self.recipe, self.quantizer))

    def __reduce_ex__(self, protocol: Any) -> Any:
        if isinstance(self.values_, FakeTensor):  # for a cache's key, by a torch that knows no _stable_hash_for_caching
            return str, (self._stable_hash_for_caching(),)
        raise GatherError(
            "a weight that FSDP has gathered in low precision is pickled, expected the module's own parameters, which"
            " are its shards; call reshard() on the module first"
        )

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if op in _SAME or (op in _VIEWS and _VIEWS[op](*args, **kwargs)):
            return args[0].like()
        if op._schema.is_mutable and isinstance(args[0], GatheredWeight):
            raise GatherError(
                f"{op} on a weight that FSDP has gathered in low precision, expected its shard to be changed; do so"
                " outside of the forward, where the module holds the shard"
            )
        args, kwargs = torch.utils._pytree.tree_map_only(GatheredWeight, lambda w: w.dequantize(), (args, kwargs))
        return op(*args, **kwargs)


# FSDP's hooks call it. Dynamo (2.11) runs them as they are, and would compile it by itself.
compat.never_compile(GatheredWeight.__torch_dispatch__, with_calls=True)
_SAME = (aten.detach.default, aten.alias.default)


def _has_its_shape(weight: Tensor, size: Any) -> bool:
    """Whether a view has the shape of the weight, as the local tensor of a DTensor comes out of `to_local`."""
    return tuple(size) == tuple(weight.shape)


def _is_whole(weight: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> bool:
    """Whether a view is all of the weight, as FSDP makes one of each that it gathers."""
    return tuple(size) == tuple(weight.shape) and tuple(stride) == weight.stride() and not storage_offset


_VIEWS: dict[Any, Callable[..., bool]] = {aten.as_strided.default: _is_whole, aten.view.default: _has_its_shape}
