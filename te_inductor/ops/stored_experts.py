"""`StoredExperts`: the weights of experts, one 3D parameter, stored in low precision; and `PickedExperts`, some of its
matrices, chosen by number and not read yet.

Like `StoredWeight`, of which it is one, such a parameter looks like the tensor it stands for, (E, N, K), or (E, K, N)
where it is `transposed`: what is stored is (E, N, K) with K contracted. A product becomes one op of ops/experts.py
where torch dispatches it: `torch._grouped_mm`, transformers' fallback for it, and `bmm`, also of `weight[ids]`.
Autograd sees the product as torch's own, so that a gradient of x is one with the weight's transpose. Whatever else is
done with a weight is done with the values that it stands for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor

from te_inductor import compat, ops
from te_inductor.errors import StoredWeightError
from te_inductor.numerics import microscaling, nvfp4
from te_inductor.ops import experts as ops_experts
from te_inductor.ops import stored_weight
from te_inductor.ops.permutations import take_bytes
from te_inductor.ops.stored_weight import Float8Weight, NVFP4Weight, StoredWeight
from te_inductor.recipes import Quantizer, Recipe
from te_inductor.recipes.formats import ROW

aten = torch.ops.aten


class StoredExperts(StoredWeight):
    """Base of the formats. `parts` have the experts as their first dimension."""

    MORE = ("transposed",)
    MATRIX: ClassVar[type[StoredWeight]]  # what one expert's weight is stored as
    transposed: bool = False  # whether it stands for (E, K, N)

    def __init__(self, parts: tuple[Tensor, ...], *given: Any) -> None:
        super().__init__(parts, *given)
        self.unread: WeakSet[_Picks] = WeakSet()  # what was picked of this memory, and is not read yet

    @classmethod
    def store(cls, weight: Tensor, recipe: Recipe, transposed: bool = False) -> "StoredExperts":  # type: ignore[override]
        """Quantize (E, N, K), or (E, K, N) where `transposed`, expert by expert."""
        parts: list[Tensor] = []
        for place, matrix in enumerate(weight):
            found = cls.MATRIX.store(matrix.t().contiguous() if transposed else matrix, recipe).parts
            parts = parts or [part.new_empty((weight.shape[0], *cls.squeezed(part).shape)) for part in found]
            for whole, part in zip(parts, found, strict=True):
                whole[place] = cls.squeezed(part)
        return cls(tuple(parts), weight.shape, weight.dtype, recipe, transposed)

    @classmethod
    def expected_parts(  # type: ignore[override]
        cls, shape: tuple[int, ...], recipe: Recipe, transposed: bool = False
    ) -> stored_weight.Layout:
        count, *matrix = shape
        made = cls.MATRIX.store(
            torch.empty(matrix[::-1] if transposed else matrix, dtype=torch.float32, device="meta"), recipe
        )
        return tuple((part.dtype, (count, *cls.squeezed(part).shape)) for part in made.parts)

    @classmethod
    def squeezed(cls, part: Tensor) -> Tensor:
        """A part of one expert, as it is among all experts'."""
        return part

    @property
    def k(self) -> int:
        """The size that a product contracts."""
        return self.shape[1] if self.transposed else self.shape[2]

    def product(self, x: Tensor, ends: Tensor | None, ids: Tensor | None) -> Tensor:
        """Rows of x (M, K) times their experts' matrices: (M, N)."""
        raise NotImplementedError

    def written_out(self, parts: Sequence[Tensor]) -> Tensor:
        """What parts of some of the experts stand for, (…, N, K)."""
        raise NotImplementedError

    def dequantize(self) -> Tensor:  # type: ignore[override]
        """What is stored, as a plain tensor of this tensor's shape and dtype."""
        whole = self.written_out(self.parts)
        return whole.transpose(1, 2) if self.transposed else whole

    def matrix(self, expert: int) -> Tensor:
        """One expert's: stored, where that is (N, K)."""
        shape = torch.Size(self.shape[:0:-1] if self.transposed else self.shape[1:])
        found = self.MATRIX(self.parts_of(expert), shape, self.dtype, self.recipe)
        return found.dequantize().t() if self.transposed else found

    def parts_of(self, expert: int) -> tuple[Tensor, ...]:
        """The parts of an expert as `MATRIX` has them."""
        return tuple(part[expert] for part in self.parts)

    def picked(self, ids: Tensor) -> Tensor:
        """What the experts of these numbers stand for, plain: (*ids.shape, N, K), or (…, K, N)."""
        whole = self.written_out([take_bytes(part, ids.flatten()) for part in self.parts])
        whole = whole.transpose(1, 2) if self.transposed else whole
        return whole.reshape(*ids.shape, *self.shape[1:])

    def turned(self) -> "StoredExperts":
        """Its transpose."""
        e, rows, columns = self.shape
        shape = torch.Size((e, columns, rows))
        return self._of_same_memory(type(self)(self.parts, shape, self.dtype, self.recipe, not self.transposed))

    def aliased(self) -> "StoredExperts":
        """The same memory once more."""
        return self._of_same_memory(self.with_parts(tuple(map(aten.alias.default, self.parts))))  # type: ignore[arg-type]

    def _of_same_memory(self, other: "StoredExperts") -> "StoredExperts":
        other.unread = self.unread
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, saved = super().__reduce_ex__(protocol)
        return rebuild, (*saved, *self.more)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _dispatched(
            op, args, kwargs, lambda: super(StoredExperts, cls).__torch_dispatch__(op, types, args, kwargs)
        )


class NVFP4Experts(StoredExperts):
    """Experts stored as `NVFP4Weight`, with an fp32 scale an expert."""

    PARTS = NVFP4Weight.PARTS
    MATRIX = NVFP4Weight
    stored: Tensor  # (E, N, K padded to 16, / 2) uint8
    block_scale: Tensor  # (E, N, K/16) e4m3
    tensor_scale: Tensor  # (E,) fp32

    def written_out(self, parts: Sequence[Tensor]) -> Tensor:
        return ops_experts.nvfp4_experts_dequantize(*parts, self.k, self.dtype)  # type: ignore[no-any-return]

    def product(self, x: Tensor, ends: Tensor | None, ids: Tensor | None) -> Tensor:
        return ops_experts.nvfp4_product(x, ends, ids, *self.parts)

    @property
    def quantizer(self) -> Quantizer:
        return nvfp4.QUANTIZER

    def saved(self) -> tuple[Tensor, ...]:
        count, rows, _ = self.stored.shape
        packed = microscaling.pack(nvfp4.codes(self.stored.flatten(0, 1)))
        return packed.view(count, rows, -1), self.block_scale, self.tensor_scale

    @classmethod
    def from_saved(cls, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        count, rows, _ = parts[0].shape
        return nvfp4.repack(parts[0].flatten(0, 1)).view(count, rows, -1), *parts[1:]


class Float8Experts(StoredExperts):
    """Experts stored as `Float8Weight`, each with the scales that a matrix would have."""

    PARTS = Float8Weight.PARTS
    MATRIX = Float8Weight
    values_: Tensor  # (E, N, K padded)
    scale_inv: Tensor  # (E,), (E, N), or (E, what the scope stores)

    def written_out(self, parts: Sequence[Tensor]) -> Tensor:
        return ops_experts.fp8_experts_dequantize(*parts, self.quantizer, self.k, self.dtype)  # type: ignore[no-any-return]

    def product(self, x: Tensor, ends: Tensor | None, ids: Tensor | None) -> Tensor:
        return ops_experts.fp8_product(x, ends, ids, self.recipe.slots(), *self.parts)

    @classmethod
    def squeezed(cls, part: Tensor) -> Tensor:
        return part.squeeze(1) if part.dtype == torch.float32 and part.dim() == 2 else part

    def parts_of(self, expert: int) -> tuple[Tensor, ...]:
        values, scale_inv = super().parts_of(expert)
        return values, scale_inv[:, None] if self.quantizer.granularity is ROW else scale_inv


@dataclass(eq=False)
class _Picks:
    """A choice of experts, by number; negative ones from the last on."""

    experts: StoredExperts
    ids: Tensor  # (S,)

    def read(self) -> None:
        """Copy the experts that were picked, as their weights are about to be written."""
        experts, ids = self.experts, self.ids
        parts = tuple(take_bytes(part, ids) for part in experts.parts)
        shape = torch.Size((ids.shape[0], *experts.shape[1:]))
        self.experts = type(experts)(parts, shape, experts.dtype, experts.recipe, experts.transposed)
        self.ids = torch.arange(ids.shape[0], device=ids.device, dtype=ids.dtype)


class PickedExperts(Tensor):
    """``experts[ids]``, (S, N, K) or (S, K, N): no weight is read before a product asks for it, or before it is
    written. Which ones is known from the begin: whoever writes the numbers later changes nothing, as with any index.
    """

    picks: _Picks

    @staticmethod
    def __new__(cls, experts: StoredExperts, ids: Tensor) -> "PickedExperts":
        shape = torch.Size((ids.shape[0], *experts.shape[1:]))
        return Tensor._make_wrapper_subclass(cls, shape, dtype=experts.dtype, device=experts.device)  # type: ignore[attr-defined]

    def __init__(self, experts: StoredExperts, ids: Tensor) -> None:
        self.picks = _Picks(experts, ids)
        experts.unread.add(self.picks)

    @property
    def experts(self) -> StoredExperts:
        return self.picks.experts

    @property
    def ids(self) -> Tensor:  # (S,)
        return self.picks.ids

    @classmethod
    def of(cls, experts: StoredExperts, ids: Tensor) -> "PickedExperts":
        """Picks experts by numbers that may be written later."""
        return cls(experts, ids.clone())

    def dequantize(self) -> Tensor:  # type: ignore[override]
        return self.experts.picked(self.ids)

    def turned(self) -> "PickedExperts":
        return PickedExperts(self.experts.turned(), self.ids)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PickedExperts({self.shape[0]} of {self.experts!r})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["experts", "ids"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Any], meta: Any, size: Any, stride: Any) -> "PickedExperts":
        return cls(parts["experts"], parts["ids"])

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        written = [one.name for one in op._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        given = dict(zip((one.name for one in op._schema.arguments), args, strict=False)) | (kwargs or {})
        if any(isinstance(given.get(name), PickedExperts) for name in written):
            raise StoredWeightError(
                f"{op} on experts picked from a weight stored in low precision, expected them to be read alone; dequantize()"
                " makes them plain"
            )

        def plain() -> Any:
            known = (PickedExperts, StoredWeight)
            given = torch.utils._pytree.tree_map_only(known, lambda one: one.dequantize(), (args, kwargs or {}))
            return op(*given[0], **given[1])

        return _dispatched(op, args, kwargs, plain)


Experts = (StoredExperts, PickedExperts)
for _kind in Experts:
    compat.never_compile(_kind.__torch_dispatch__, with_calls=True)
_OF_MATRIX: dict[type[StoredWeight], type[StoredExperts]] = {
    kind.MATRIX: kind for kind in (NVFP4Experts, Float8Experts)
}
_KINDS = {recipe: _OF_MATRIX[matrix] for recipe, matrix in stored_weight.KINDS.items()}


def store(weight: Tensor, recipe: Recipe, transposed: bool) -> StoredExperts:
    """The weights of experts (E, N, K), or (E, K, N) where `transposed`, stored as `recipe` says."""
    return kind_of(recipe).store(weight, recipe, transposed)


def kind_of(recipe: Recipe) -> type[StoredExperts]:
    """What experts' weights are stored as.

    Raises:
        RecipeError: a recipe whose weights cannot be known before it runs.
    """
    stored_weight.kind_of(recipe)
    return _KINDS[type(recipe)]


def rebuild(*saved: Any) -> StoredWeight:
    """What a pickled weight is loaded with; as of `stored_weight.rebuilt`, and whether it is transposed."""
    return stored_weight.rebuilt(_KINDS, *saved)


# ---- products, and the few ops on the way to them


def _dispatched(op: Any, args: Any, kwargs: Any, otherwise: Callable[[], Any]) -> Any:
    handler = _HANDLERS.get(op.name())
    found = NotImplemented if handler is None else handler(*args, **(kwargs or {}))
    return otherwise() if found is NotImplemented else found


def _grouped_mm(
    x: Any,
    weight: Any,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    known = isinstance(weight, StoredExperts) and not isinstance(x, Experts) and x.dim() == 2
    if not known or offs is None or bias is not None or out_dtype not in (None, x.dtype):
        return NotImplemented
    if not weight.transposed:  # as autograd has it for a gradient of x
        return ops_experts.plain_experts(x, offs.to(torch.int32), weight.dequantize().transpose(1, 2))
    return weight.product(x, offs.to(torch.int32), None)


def _bmm(a: Any, b: Any) -> Any:
    """Multiplies (B, R, K) by B matrices, or the other way round, which is the transpose."""
    if isinstance(a, Experts) and not isinstance(b, Experts):
        y = _bmm(b.transpose(1, 2), a.turned())
        return y if y is NotImplemented else y.transpose(1, 2)
    if isinstance(a, Experts):
        return NotImplemented
    whole = b.experts if isinstance(b, PickedExperts) else b
    if not whole.transposed:
        return NotImplemented
    count, rows, k = a.shape
    x = a.reshape(-1, k)
    if isinstance(b, PickedExperts):
        ids = b.ids if isinstance(rows, int) and rows == 1 else b.ids.repeat_interleave(rows)
        y = whole.product(x, None, ids)
    else:
        y = whole.product(x, ops.equal_groups(a, count, rows), None)
    return y.reshape(count, rows, y.shape[-1])


def _index(weight: Any, indices: Any) -> Any:
    if not isinstance(weight, StoredExperts) or len(indices) != 1 or not isinstance(indices[0], Tensor):
        return NotImplemented
    return _picks(weight, 0, indices[0])


def _picks(weight: Any, dim: int, ids: Tensor) -> Any:
    if not isinstance(weight, StoredExperts) or dim % 3 or ids.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    return PickedExperts.of(weight, ids) if ids.dim() == 1 else weight.picked(ids)


def _select(weight: Any, dim: int, index: int) -> Any:
    return weight.matrix(index) if isinstance(weight, StoredExperts) and dim % 3 == 0 else NotImplemented


def _transpose(weight: Any, first: int, second: int) -> Any:
    return weight.turned() if {first % 3, second % 3} == {1, 2} else NotImplemented


def _permute(weight: Any, dims: Sequence[int]) -> Any:
    found = [dim % 3 for dim in dims]
    return weight.turned() if found == [0, 2, 1] else NotImplemented


def _same_shape(weight: Any, size: Sequence[Any], **_: Any) -> Any:
    """A view of the same shape, as `matmul` makes."""
    whole = [mine if other == -1 else other for mine, other in zip(weight.shape, size, strict=False)]
    if len(size) != 3 or any(mine != other for mine, other in zip(weight.shape, whole, strict=True)):
        return NotImplemented
    return _alias(weight)


def _alias(weight: Any) -> Any:
    if isinstance(weight, PickedExperts):
        return PickedExperts(weight.experts, weight.ids)
    return weight.aliased()


def _copy(target: Any, source: Any, non_blocking: bool = False) -> Any:
    """What was picked of a weight that is written is read before that."""
    for picks in list(target.unread) if isinstance(target, StoredExperts) else ():
        picks.read()
    return NotImplemented


_HANDLERS: dict[str, Callable[..., Any]] = {
    "aten::_grouped_mm": _grouped_mm,
    "transformers::grouped_mm_fallback": _grouped_mm,
    "aten::bmm": _bmm,
    "aten::index.Tensor": _index,
    "aten::index_select": _picks,
    "aten::select.int": _select,
    "aten::transpose.int": _transpose,
    "aten::permute": _permute,
    **dict.fromkeys(("aten::expand", "aten::view", "aten::_unsafe_view", "aten::reshape"), _same_shape),
    **dict.fromkeys(("aten::detach", "aten::alias"), _alias),
    "aten::copy_": _copy,
}
