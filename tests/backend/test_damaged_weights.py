"""Stored weights of files that were cut or changed: each part of each format, cut and doubled, in every way to load one.

Kernels read as much of a part as the weight's shape says, so that one that is too small is read beyond its end."""

import io
import itertools
import re

import pytest
import torch
from torch import nn

from te_inductor import load_quantized, quantize_, recipes
from te_inductor.errors import CheckpointError, RecipeError, StoredWeightError
from te_inductor.ops import stored_experts, stored_weight
from tests.checkpoints import WRITERS, write

RECIPES = ("nvfp4_weight_only", "rowwise", "current", "block")
N, K, EXPERTS = 256, 384, 4


class Forged:
    """What a file may say in the place of a weight."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def loaded(value, weights_only=True):
    file = io.BytesIO()
    torch.save({"weight": value}, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)["weight"]


KINDS = tuple(itertools.product(RECIPES, ("linear", "experts", "transposed experts")))


@pytest.fixture
def weight(recipe, kind):
    if kind == "linear":
        return stored_weight.store(torch.randn(N, K), recipes.resolve(recipe))
    return stored_experts.store(torch.randn(EXPERTS, N, K), recipes.resolve(recipe), kind.startswith("transposed"))


def resized(shape):
    """Each dimension cut and doubled; of a scalar two."""
    if not shape:
        yield (2,)
    for place, times in itertools.product(range(len(shape)), (0.5, 2)):
        if shape[place] * times >= 1:
            yield (*shape[:place], int(shape[place] * times), *shape[place + 1 :])


def of_bytes(shape, dtype):
    return torch.zeros(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8), dtype, tuple(shape)


def forgeries(parts):
    """Yields, for each part, another shape, another dtype, other bytes than it says, one byte repeated, and no part."""
    for place, (data, dtype, shape) in enumerate(parts):
        other = torch.float32 if dtype != torch.float32 else torch.bfloat16
        repeated = data[:1].expand(data.shape)
        for part in (
            *(of_bytes(size, dtype) for size in resized(shape)),
            of_bytes(shape, other),
            (data[: len(data) // 2], dtype, shape),
            (torch.cat([data, data]), dtype, shape),
            *([(repeated, dtype, shape)] if len(data) > 1 else []),
        ):
            yield [*parts[:place], part, *parts[place + 1 :]]
        yield parts[:place] + parts[place + 1 :]


@pytest.mark.parametrize(("recipe", "kind"), KINDS)
def test_pickled_parts(weight):
    function, (kind, parts, *rest) = weight.__reduce_ex__(2)
    assert torch.equal(loaded(weight).dequantize(), weight.dequantize())
    forged = list(forgeries(parts))
    assert len(forged) >= 13
    for changed in forged:
        with pytest.raises(StoredWeightError, match="expected"):
            loaded(Forged(function, kind, changed, *rest))


@pytest.mark.parametrize(("recipe", "kind"), KINDS)
def test_pickled_shapes_and_kinds(weight):
    function, (kind, parts, shape, dtype, recipe, *rest) = weight.__reduce_ex__(2)
    *same, n, k = shape
    matrices = (n, 2 * k), (2 * n, k), (k, n), (2**24, k), (0, k)
    for other in (*((*same, *matrix) for matrix in matrices), (n * k,), (1, *shape)):
        with pytest.raises(StoredWeightError, match="expected"):
            loaded(Forged(function, kind, parts, other, dtype, recipe, *rest))
    with pytest.raises(StoredWeightError, match=r"expected .* floating-point"):
        loaded(Forged(function, kind, parts, shape, torch.int64, recipe, *rest))
    others = {"NVFP4Weight", "Float8Weight", "NVFP4Experts", "Float8Experts", "Tensor"} - {kind}
    for other in others:
        with pytest.raises(
            StoredWeightError, match=re.escape(f"{other!r} for {type(recipe).__name__}, expected one of")
        ):
            loaded(Forged(function, other, parts, shape, dtype, recipe, *rest))


def test_the_error_names_part_and_shapes():
    weight = stored_weight.store(torch.randn(64, 128), recipes.resolve("nvfp4_weight_only"))
    function, (kind, parts, *rest) = weight.__reduce_ex__(2)
    parts[1] = of_bytes((64, 4), torch.float8_e4m3fn)
    with pytest.raises(StoredWeightError) as raised:
        loaded(Forged(function, kind, parts, *rest))
    assert str(raised.value) == (
        "block_scale of a weight of 64 x 128 that is stored as nvfp4_weight_only is torch.float8_e4m3fn [64, 4] on cpu,"
        " expected torch.float8_e4m3fn [64, 8], contiguous and on cpu; the file is damaged or was changed: save the"
        " model again"
    )


def test_pickled_recipes_are_checked_as_new_ones():
    for name, field in (
        ("nvfp4_weight_only", "prefill"),
        ("block", "fp8_quant_fwd_weight"),
        ("rowwise", "power_2_scale"),
    ):
        recipe = recipes.resolve(name)
        assert loaded(recipe) == recipe
        vars(recipe)[field] = "nonsense"
        with pytest.raises(RecipeError, match=field):
            loaded(recipe)
    recipe = recipes.resolve("current")
    vars(recipe)["another"] = 1
    with pytest.raises(TypeError, match="another"):
        loaded(recipe)


@pytest.mark.parametrize(("recipe", "kind"), KINDS)
def test_copies_do_not_repeat_parts(weight):
    """A model is filled by `load_state_dict`."""
    state = {"weight": nn.Parameter(weight, requires_grad=False)}
    model = nn.ParameterDict({"weight": loaded(state["weight"])})
    model.load_state_dict(state)
    for place in range(len(weight.parts)):
        parts = [part.clone() for part in weight.parts]
        parts[place] = parts[place].flatten()[:1]
        with pytest.raises(RuntimeError, match=f"copy_ of {weight.PARTS[place]} .*, expected"):
            model.load_state_dict({"weight": weight.with_parts(tuple(parts))})


@pytest.mark.parametrize("name", WRITERS)
def test_published_parts(name):
    """The checkpoint is others', which has no code of ours in it."""
    model = nn.Linear(K, N, bias=False)
    tensors, values = write(model, WRITERS[name][0])
    count = 0
    for key, part in tensors.items():
        changed = [torch.zeros(size).to(part.dtype) for size in resized(part.shape)]
        changed = [one for one in changed if one.numel() != part.numel()]
        sparse = [part.float().to_sparse()] if part.dim() else []
        for other in (*changed, part.to(torch.int32), *sparse, "text"):
            with pytest.raises(CheckpointError, match=r"found .* expected"):
                load_quantized(model, tensors | {key: other})
            count += 1
    assert count >= 8
    strided = {key: part.t().contiguous().t() if part.dim() == 2 else part for key, part in tensors.items()}
    assert all(part.is_contiguous() for part in load_quantized(model, strided).weight.parts)
    torch.testing.assert_close(model.weight.dequantize(), values["weight"], rtol=1e-6, atol=0)


def test_sides_that_kernels_count_to():
    with pytest.raises(StoredWeightError, match="expected 2 sizes from 1 to 8388608"):
        stored_weight.NVFP4Weight.of((), (2**24, 64), torch.bfloat16, recipes.resolve("nvfp4_weight_only"))
    assert quantize_(nn.Linear(64, 64)).weight.shape == (64, 64)
