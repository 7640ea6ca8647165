"""`StoredWeight`: a linear layer's weight that is stored in low precision and looks like the tensor it stands for.

A tensor subclass, as the module's parameter: no module is swapped, `state_dict` has the model's own keys, and
`F.linear` on it becomes one op of ours, in eager code and in Dynamo's graph alike. Compilers see the tensors inside
(`__tensor_flatten__`), which are inputs of the graph like any parameter, so that CUDA graphs do not copy them. A
parametrization would have changed the modules' classes and the keys; buffers would have wanted a forward of their own.

It is a constant: it asks for no gradient and is changed in place by `copy_` alone, which is how `load_state_dict` fills
it, from another stored weight or from one in high precision.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils._triton import has_triton_package

from te_inductor import compat, ops
from te_inductor.diagnostics import say
from te_inductor.errors import RecipeError, StoredWeightError
from te_inductor.numerics import microscaling, nvfp4
from te_inductor.ops import stored as ops_stored
from te_inductor.recipes import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    NVFP4WeightOnly,
    Quantizer,
    Recipe,
)
from te_inductor.recipes.formats import LONGEST
from te_inductor.runtime.hooks import check_before_each
from te_inductor.runtime.weights.followed_weights import follow

aten = torch.ops.aten

Layout = tuple[tuple[torch.dtype, tuple[int, ...]], ...]  # the dtype and the shape of each part


@functools.cache
def register_kernels() -> None:
    """Stored weights' own, before anything calls them: eager code, generated code, and such as a compile cache
    returns."""
    if has_triton_package():
        from te_inductor.templates.triton import stored_ops  # noqa: F401


class StoredWeight(Tensor):
    """Base of the formats: (N, K), of the dtype it had. Subclasses name the tensors they hold in `PARTS`, and in `MORE`
    the constants that say how those lie, which have defaults."""

    PARTS: tuple[str, ...] = ()
    MORE: tuple[str, ...] = ()
    recipe: Recipe

    @staticmethod
    def __new__(cls, parts: tuple[Tensor, ...], shape: torch.Size, dtype: torch.dtype, *_: Any) -> "StoredWeight":
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=parts[0].device)  # type: ignore[attr-defined]

    def __init__(
        self, parts: tuple[Tensor, ...], shape: torch.Size, dtype: torch.dtype, recipe: Recipe, *more: Any
    ) -> None:
        for name, part in (*zip(self.PARTS, parts, strict=True), *zip(self.MORE, more, strict=False)):
            setattr(self, name, part)
        self.recipe = recipe
        if parts[0].is_cuda:
            register_kernels()

    @classmethod
    def store(cls, weight: Tensor, recipe: Recipe, *more: Any) -> "StoredWeight":
        """Quantize a weight (N, K)."""
        raise NotImplementedError

    @classmethod
    def shared(cls, weights: Sequence[Tensor]) -> tuple[Any, ...]:
        """What `store` is given of weights that are multiplied as one matrix, so that they can be."""
        return ()

    @classmethod
    def expected_parts(cls, shape: tuple[int, ...], recipe: Recipe, *more: Any) -> Layout:
        """What the parts of a weight of this shape are: as those that `store` makes, of one without values."""
        made = cls.store(torch.empty(shape, dtype=torch.float32, device="meta"), recipe)
        return tuple((part.dtype, tuple(part.shape)) for part in made.parts)

    @classmethod
    def of(
        cls, parts: tuple[Tensor, ...], shape: Sequence[int], dtype: torch.dtype, recipe: Recipe, *more: Any
    ) -> "StoredWeight":
        """The weight of parts that others have made, as a checkpoint's.

        Raises:
            StoredWeightError: they are not what kernels take them for, which read as much as the shape says.
        """
        check(cls, parts, shape, dtype, recipe, *more)
        return cls(parts, torch.Size(shape), dtype, recipe, *more)

    def dequantize(self) -> Tensor:  # type: ignore[override]
        """What is stored, as a plain (N, K) tensor of this tensor's dtype."""
        raise NotImplementedError

    def restored(self, plain: Tensor) -> "StoredWeight":
        """Another weight of this shape, stored as this one is."""
        return self.store(plain, self.recipe, *self.more)

    def linear(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """``x @ self.T + bias``"""
        raise NotImplementedError

    @property
    def quantizer(self) -> Quantizer:
        """What the parts are cast by."""
        return self.recipe.slots().weight

    @property
    def form(self) -> object:
        """What the parts mean: those of two weights of one form can be exchanged."""
        return self.quantizer, self.more

    @property
    def more(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.MORE)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self.PARTS)

    @property
    def stored_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts)

    def saved(self) -> tuple[Tensor, ...]:
        """The parts as they are pickled."""
        return self.parts

    @classmethod
    def from_saved(cls, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return parts

    def with_parts(self, parts: tuple[Tensor, ...], dtype: torch.dtype | None = None) -> "StoredWeight":
        return type(self)(parts, self.shape, dtype or self.dtype, self.recipe, *self.more)

    def __repr__(self) -> str:  # type: ignore[override]
        sizes = " x ".join(map(str, self.shape))
        return f"{type(self).__name__}({sizes}, {self.recipe.name}, for {self.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.PARTS), (self.dtype, self.recipe, *self.more)

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> "StoredWeight":
        return cls(tuple(parts[name] for name in cls.PARTS), size, *meta)

    def _stable_hash_for_caching(self) -> str:
        """The key for AOTAutograd's cache: everything that its graph depends on but the parts' own metadata."""
        return repr((type(self).__name__, tuple(self.shape), self.dtype, self.recipe, *self.more))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Parts as bytes: plain pickle knows no FP8 storage. A parameter stays one."""
        parts = [(part.contiguous().view(-1).view(torch.uint8), part.dtype, tuple(part.shape)) for part in self.saved()]
        is_parameter = isinstance(self, torch.nn.Parameter)
        return rebuild, (type(self).__name__, parts, tuple(self.shape), self.dtype, self.recipe, is_parameter)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not compat.is_compiling():
            follow(args)
        if function is torch.nn.functional.linear:
            return _linear(*args, **kwargs)
        asked = function in (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
        if asked and (args[1:] or (kwargs.get("requires_grad", True),))[0]:
            raise StoredWeightError(
                f"a gradient is asked of a weight stored as {args[0].recipe.name}, expected a constant; train the"
                " weight in high precision, with the recipe as a compile option, or an adapter beside it (before "
                "load_state_dict(assign=True), call requires_grad_(False) on the model)"
            )
        if function == Tensor.element_size:  # a fraction: of get_memory_footprint and the like
            return args[0].stored_bytes / args[0].numel()
        if function == Tensor.nbytes.__get__:  # type: ignore[attr-defined]
            return args[0].stored_bytes
        if function in _OF_ONE_STORAGE:
            raise StoredWeightError(
                f"{function.__name__} of a weight stored as {args[0].recipe.name}, which is several tensors, as where"
                " safetensors or save_pretrained write it; expected those of te_inductor.quantized_state_dict(model), which"
                " load_quantized reads, or torch.save(model.state_dict()), which load_state_dict does behind quantize_; for"
                " save_pretrained store weights by from_pretrained(…,"
                " quantization_config=te_inductor.integrations.pretrained.StoredWeightsConfig(…)) in place of quantize_"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        handler = _HANDLERS.get(op)
        if handler is not None:
            return handler(*args, **kwargs)
        if op._schema.is_mutable and any(isinstance(arg, StoredWeight) for arg in args):
            raise StoredWeightError(
                f"{op} on a weight stored in low precision, expected copy_ alone to change it; dequantize() makes it"
                " plain, and te_inductor.integrations.peft.merge_and_unload(model) merges adapters"
            )
        args, kwargs = torch.utils._pytree.tree_map_only(StoredWeight, lambda w: w.dequantize(), (args, kwargs))
        return op(*args, **kwargs)


# A frame that torch.compile gave up calls them as they are, also for a product: a graph of that alone would have symbolic
# sizes, of layers that differ.
for _function in (StoredWeight.__torch_function__, StoredWeight.__torch_dispatch__):
    compat.never_compile(_function, with_calls=True)
_OF_ONE_STORAGE = (Tensor.storage, Tensor.data_ptr, Tensor.share_memory_)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, StoredWeight):
        raise StoredWeightError("F.linear of a stored weight as input or bias, expected it as the weight")
    if torch.compiler.is_exporting():  # what compiles the program later, as AOTInductor, does not know of us
        for prepare in compat.before_lowering:
            prepare()
    device = input.device.type
    out_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
    return weight.linear(input, bias, out_dtype)


class NVFP4Weight(StoredWeight):
    """E2M1 values, an E4M3 scale for 16 of them along K, an fp32 scale: 4.5 bits a value. `stored` is in the order of
    Note [Order of a stored block]; a pickled one is in NVFP4's own."""

    PARTS = ("stored", "block_scale", "tensor_scale")

    stored: Tensor  # (N, K padded to 16, / 2) uint8
    block_scale: Tensor  # (N, K/16) e4m3
    tensor_scale: Tensor  # () fp32
    recipe: NVFP4WeightOnly

    @classmethod
    def store(cls, weight: Tensor, recipe: Recipe, amax: Tensor | None = None) -> "NVFP4Weight":  # type: ignore[override]
        codes, block_scale, tensor_scale = nvfp4.quantize(weight, amax)
        return cls((nvfp4.store(codes), block_scale, tensor_scale), weight.shape, weight.dtype, recipe)

    @classmethod
    def shared(cls, weights: Sequence[Tensor]) -> tuple[Any, ...]:
        return (torch.stack([nvfp4.amax_of(weight) for weight in weights]).amax(),)

    def dequantize(self) -> Tensor:  # type: ignore[override]
        return ops_stored.nvfp4_dequantize(*self.parts, self.shape[1], self.dtype)  # type: ignore[no-any-return]

    def linear(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        multiply = ops_stored.product_of(ops_stored.nvfp4_weight_only)
        return multiply(  # type: ignore[no-any-return]
            x, self.stored, self.block_scale, self.tensor_scale, bias, self.recipe.prefill, out_dtype
        )

    @property
    def quantizer(self) -> Quantizer:
        return nvfp4.QUANTIZER

    def saved(self) -> tuple[Tensor, ...]:
        return microscaling.pack(nvfp4.codes(self.stored)), self.block_scale, self.tensor_scale

    @classmethod
    def from_saved(cls, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return nvfp4.repack(parts[0]), *parts[1:]


class Float8Weight(StoredWeight):
    """FP8 values with the scales that the recipe's weights have; activations are cast as the recipe says."""

    PARTS = ("values_", "scale_inv")
    values_: Tensor  # (N, K padded)
    scale_inv: Tensor
    recipe: Float8CurrentScaling | Float8RowwiseScaling | Float8BlockScaling

    @classmethod
    def store(cls, weight: Tensor, recipe: Recipe, *_: Any) -> "Float8Weight":
        return cls(ops.quantize(weight, recipe.slots().weight), weight.shape, weight.dtype, recipe)

    def dequantize(self) -> Tensor:  # type: ignore[override]
        return ops.dequantize(*self.parts, self.quantizer, self.dtype)[:, : self.shape[1]]  # type: ignore[no-any-return]

    def linear(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        multiply = ops_stored.product_of(ops_stored.fp8_weight)
        return multiply(x, self.values_, self.scale_inv, bias, self.recipe.slots().to_text(), out_dtype)  # type: ignore[no-any-return]


KINDS: dict[type[Recipe], type[StoredWeight]] = {
    NVFP4WeightOnly: NVFP4Weight,
    Float8CurrentScaling: Float8Weight,
    Float8RowwiseScaling: Float8Weight,
    Float8BlockScaling: Float8Weight,
}


def store(weight: Tensor, recipe: Recipe, *shared: Any) -> StoredWeight:
    """The weight (N, K), stored as `recipe` says, with what it shares with others."""
    return kind_of(recipe).store(weight, recipe, *shared)


def kind_of(recipe: Recipe) -> type[StoredWeight]:
    """What its weights are stored as.

    Raises:
        RecipeError: a recipe whose weights cannot be known before it runs.
    """
    if recipe.backward is not None:
        raise RecipeError(f"weights are stored for {recipe}, expected a recipe without backward: they are constants")
    if type(recipe) not in KINDS:
        names = ", ".join(kind.name for kind in KINDS)
        raise RecipeError(f"weights cannot be stored for recipe {recipe.name!r}, expected one of {names}")
    return KINDS[type(recipe)]


def rebuild(*saved: Any) -> StoredWeight:
    """What a pickled weight is loaded with; as of `rebuilt`."""
    return rebuilt(KINDS, *saved)


def rebuilt(
    kinds: Mapping[type[Recipe], type[StoredWeight]],
    kind: str,
    parts: Sequence[tuple[Tensor, torch.dtype, tuple[int, ...]]],  # bytes, what they are, their shape
    shape: tuple[int, ...],
    dtype: torch.dtype,
    recipe: Recipe,
    is_parameter: bool,
    *more: Any,
) -> StoredWeight:
    """The weight of one of these kinds, by the recipe that it was stored for.

    Raises:
        StoredWeightError: as of `StoredWeight.of`.
    """
    cls = kinds.get(type(recipe))
    if cls is None or cls.__name__ != kind:
        expected = ", ".join(f"{cls.__name__} for {of.__name__}" for of, cls in kinds.items())
        raise StoredWeightError(f"a saved weight is {kind!r} for {type(recipe).__name__}, expected one of {expected}")
    viewed = tuple(_viewed(*part) for part in parts)
    check(cls, viewed, shape, dtype, recipe, *more)
    weight = cls(cls.from_saved(viewed), torch.Size(shape), dtype, recipe, *more)
    return as_parameter(weight) if is_parameter else weight  # type: ignore[return-value]


def as_parameter(weight: Tensor) -> torch.nn.Parameter:
    """The weight as a module holds it. From now on an optimizer that has one is told that it stays as it is."""
    check_before_each(_say_what_stays)
    return torch.nn.Parameter(weight, requires_grad=False)


@dataclass(frozen=True)
class _Shown:
    """What `print` shows of a module, as it was when its weights were stored. A method of the module's would be a cycle,
    which keeps its memory."""

    text: str

    def __call__(self) -> str:
        return self.text


def show_stored(module: torch.nn.Module) -> None:
    """Have `print(module)` name the recipes of its stored weights; of a module that has none, what it shows anyway."""
    if not isinstance(module.__dict__.get("extra_repr"), _Shown | None):
        return  # the program's own
    module.__dict__.pop("extra_repr", None)
    weights: Mapping[str, Any] = module._parameters
    stored = [f"{name}={weight.recipe.name}" for name, weight in weights.items() if isinstance(weight, StoredWeight)]
    if stored:
        module.extra_repr = _Shown(", ".join(filter(None, (module.extra_repr(), *stored))))  # type: ignore[method-assign]


_told: WeakSet[Optimizer] = WeakSet()


def _say_what_stays(optimizer: Optimizer) -> None:
    """Warn once of an optimizer that was given stored weights: torch passes by what has no gradient without a word."""
    if compat.is_compiling() or optimizer in _told:
        return
    _told.add(optimizer)
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    stored = [parameter for parameter in given if isinstance(parameter, StoredWeight)]
    if stored:
        say(
            f"te_inductor: {len(stored)} of the {len(given)} parameters of {type(optimizer).__name__} are weights stored in"
            " low precision, expected none: they are constants, which have no gradients, and no step changes them; train"
            " them in high precision, with the recipe as an option of torch.compile, or train adapters, and give the"
            " optimizer the parameters that require gradients alone",
            "warn",
        )


def _viewed(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A saved part, of its bytes."""
    expected = math.prod(shape) * dtype.itemsize
    if data.dtype != torch.uint8 or data.shape != (expected,) or not data.is_contiguous():
        raise StoredWeightError(
            f"a part of a saved weight is {_described(data)}, expected {expected} contiguous bytes, as of"
            f" {dtype} {list(shape)}; {_CHANGED}"
        )
    return data.view(dtype).view(shape)


_CHANGED = "the file is damaged or was changed: save the model again"


def check(
    cls: type[StoredWeight],
    parts: Sequence[Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    recipe: Recipe,
    *more: Any,
) -> None:
    """Whether these parts are those of a weight of this shape.

    Raises:
        StoredWeightError: one is of another dtype, shape or layout, or on another device; or the shape is none.
    """
    dims = 3 if more else 2
    sides = all(isinstance(size, int) and 0 < size <= LONGEST for size in shape)
    if len(shape) != dims or not sides or not dtype.is_floating_point:
        raise StoredWeightError(
            f"a weight of shape {list(shape)} for {dtype} is stored as {recipe.name}, expected {dims} sizes from 1 to"
            f" {LONGEST} and a floating-point dtype"
        )
    layout = _expected_parts(cls, tuple(shape), recipe, *more)
    if len(parts) != len(layout):
        raise StoredWeightError(f"{len(parts)} parts of a {cls.__name__}, expected {', '.join(cls.PARTS)}")
    for name, part, (of, size) in zip(cls.PARTS, parts, layout, strict=True):
        whole = part.layout == torch.strided and part.is_contiguous() and part.device == parts[0].device
        if part.dtype != of or part.shape != size or not whole:
            raise StoredWeightError(
                f"{name} of a weight of {' x '.join(map(str, shape))} that is stored as {recipe.name} is"
                f" {_described(part)}, expected {of} {list(size)}, contiguous and on {parts[0].device}; {_CHANGED}"
            )


@functools.lru_cache(1024)
def _expected_parts(cls: type[StoredWeight], *given: Any) -> Layout:
    return cls.expected_parts(*given)


def _described(part: Tensor) -> str:
    where = "" if part.layout == torch.strided and part.is_contiguous() else ", not contiguous,"
    return f"{part.dtype} {list(part.shape)}{where} on {part.device}"


# ---- the few ops that a weight meets between its birth and F.linear


def _each(op: Any) -> Any:
    return lambda weight, *args, **kwargs: weight.with_parts(tuple(op(part, *args, **kwargs) for part in weight.parts))


def _to(weight: StoredWeight, *, dtype: torch.dtype | None = None, **kwargs: Any) -> StoredWeight:
    """A new dtype is that of what it stands for; the stored values stay."""
    kwargs = {key: value for key, value in kwargs.items() if key in ("device", "non_blocking")}
    return weight.with_parts(tuple(aten._to_copy.default(part, **kwargs) for part in weight.parts), dtype)


def _empty_like(weight: StoredWeight, *, dtype: torch.dtype | None = None, **kwargs: Any) -> StoredWeight:
    kwargs = {key: value for key, value in kwargs.items() if key == "device"}
    return weight.with_parts(tuple(torch.empty_like(part, **kwargs) for part in weight.parts), dtype)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, StoredWeight):
        return target.copy_(source.dequantize() if isinstance(source, StoredWeight) else source)
    if target.shape != source.shape:
        raise StoredWeightError(f"copy_ from shape {tuple(source.shape)}, expected {tuple(target.shape)}")
    if type(source) is not type(target) or source.form != target.form:
        plain = source.dequantize() if isinstance(source, StoredWeight) else source
        source = target.restored(plain.to(target.device))
    for name, mine, theirs in zip(target.PARTS, target.parts, source.parts, strict=True):
        if mine.shape != theirs.shape:  # which copy_ would repeat
            raise StoredWeightError(f"copy_ of {name} {list(theirs.shape)}, expected {list(mine.shape)}")
        mine.copy_(theirs, non_blocking=non_blocking)
    return target


_HANDLERS = {
    aten.detach.default: _each(aten.detach.default),
    aten.alias.default: _each(aten.alias.default),
    aten.clone.default: _each(aten.clone.default),
    aten._to_copy.default: _to,
    aten.empty_like.default: _empty_like,
    aten.copy_.default: _copy,
}
