"""Fields of recipes: each has an effect or is refused, and which tensors it reaches."""

import dataclasses
import functools

import pytest

from te_inductor import errors, recipes
from tests.recipes import every_recipe


@pytest.mark.parametrize(
    "make",
    [
        lambda: recipes.QParams(power_2_scale=1),
        lambda: recipes.QParams(amax_epsilon="0"),
        lambda: recipes.QParams(amax_epsilon=-1.0),
        lambda: recipes.QParams(amax_epsilon=float("nan")),
        lambda: recipes.MMParams(use_split_accumulator=None),
        lambda: recipes.Quantizer("e4m4"),
        lambda: recipes.Quantizer("e4m3", scope="column"),
        lambda: recipes.Float8CurrentScaling(fp8_format="HYBRID"),
        lambda: recipes.Float8CurrentScaling(fp8_gemm_dgrad=True),
        lambda: recipes.Float8RowwiseScaling(fp8_format="E4M3"),
        lambda: recipes.Float8RowwiseScaling(power_2_scale=1),
        lambda: recipes.Float8RowwiseScaling(amax_epsilon=-1.0),
        lambda: recipes.Float8RowwiseScaling(amax_epsilon=True),
        lambda: recipes.Float8BlockScaling(fp8_format="E4M3"),
        lambda: recipes.Float8BlockScaling(fp8_quant_fwd_inp=True),
        lambda: recipes.Float8BlockScaling(x_block_scaling_dim=3),
        lambda: recipes.Float8BlockScaling(w_block_scaling_dim=0),
        lambda: recipes.Float8BlockScaling(grad_block_scaling_dim=True),
        lambda: recipes.Float8BlockScaling(x_block_scaling_dim="1"),
        lambda: recipes.Float8BlockScaling(x_block_scaling_dim=2),
        lambda: recipes.Float8BlockScaling(grad_block_scaling_dim=2),
        lambda: recipes.Float8BlockScaling(w_block_scaling_dim=1, x_block_scaling_dim=2, grad_block_scaling_dim=2),
        lambda: recipes.Float8BlockScaling(fp8_gemm_fprop=recipes.MMParams(use_split_accumulator=False)),
        lambda: recipes.Float8BlockScaling(fp8_gemm_wgrad=recipes.MMParams(use_split_accumulator=False)),
        lambda: recipes.Float8CurrentScaling(fp8_format=recipes.Format.E2M1),
        lambda: recipes.DelayedScaling(fp8_format=recipes.Format.E2M1),
        lambda: recipes.MXFP8BlockScaling(fp8_format=recipes.Format.E2M1),
        lambda: recipes.MXFP8BlockScaling(margin=1),
        lambda: recipes.NVFP4BlockScaling(disable_rht=1),
        lambda: recipes.NVFP4BlockScaling(row_scaled_activation=True),
        lambda: recipes.NVFP4BlockScaling(nvfp4_4over6="all"),
        lambda: recipes.NVFP4BlockScaling(nvfp4_4over6="activations"),
        lambda: recipes.NVFP4BlockScaling(nvfp4_4over6="gradients", disable_rht=True),
        lambda: recipes.NVFP4BlockScaling(nvfp4_4over6="weights", nvfp4_4over6_e4m3_use_256="256"),
        lambda: recipes.NVFP4BlockScaling(nvfp4_4over6="weights", nvfp4_4over6_err_mode="mae"),
        lambda: recipes.NVFP4BlockScaling(nvfp4_4over6_e4m3_use_256="none"),
        lambda: recipes.NVFP4BlockScaling(nvfp4_4over6_err_mode="MSE"),
        lambda: recipes.NVFP4BlockScaling(fp4_format=recipes.Format.E4M3),
        lambda: recipes.NVFP4BlockScaling(fp8_format=recipes.Format.HYBRID),
        lambda: recipes.NVFP4BlockScaling(fp8_mha=True),
        lambda: recipes.NVFP4BlockScaling(backward_override="high_precision"),
        lambda: recipes.MXFP8BlockScaling(margin=False),
        lambda: recipes.MXFP8BlockScaling(fp8_dpa=True),
        lambda: recipes.MXFP8BlockScaling(fp8_mha=True),
        lambda: recipes.MXFP8BlockScaling(backward_override="dequantized"),
        lambda: recipes.MXFP8BlockScaling(enable_2d_quantization=1),
    ],
)
def test_recipe_fields_are_checked(make):
    with pytest.raises(errors.RecipeError, match="expected"):
        make()


# How the state of delayed scaling is updated, which no slot shows: numerics/test_delayed.py; test_ranks.py of
# reduce_amax.
OF_THE_UPDATE = {
    "margin",
    "amax_history_len",
    "amax_compute_algo",
    "scaling_factor_compute_algo",
    "reduce_amax",
}


def others(value: object) -> list[object]:
    """Values that a field might have in place of its default."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, recipes.QParams):
        return [recipes.QParams(not value.power_2_scale), recipes.QParams(value.power_2_scale, 0.5)]
    if isinstance(value, recipes.MMParams):
        return [recipes.MMParams(not value.use_split_accumulator)]
    if isinstance(value, recipes.Format):
        return [other for other in recipes.Format if other is not value]
    candidates = {int: [1, 2, 3], float: [0.5], str: ["other"], type(None): ["other", 0]}[type(value)]
    return [other for other in candidates if other != value]


@every_recipe
def test_no_field_is_ignored(name):
    """Each value that is not the default changes the quantizers or GEMMs, or is refused."""
    default = recipes.resolve(name)
    for field in dataclasses.fields(default):
        if name == "delayed" and field.name in OF_THE_UPDATE:
            continue
        for value in others(getattr(default, field.name)):
            try:
                other = dataclasses.replace(default, **{field.name: value})
            except errors.RecipeError:
                continue
            assert other.slots() != default.slots(), f"{field.name}={value!r} changes nothing"


def test_every_field_of_block_scaling_has_an_effect():
    """TransformerEngine's fields and defaults; each that may be changed changes what the ops are given."""
    default = recipes.Float8BlockScaling()
    slots = default.slots()
    assert slots.input == recipes.Quantizer("e4m3", power_2_scale=True, scope="1x128") == slots.grad_output
    assert slots.weight == recipes.Quantizer("e4m3", power_2_scale=True, scope="128x128")
    gemms = (slots.fprop, slots.dgrad, slots.wgrad)
    assert [gemm.scopes for gemm in gemms] == [("1x128", "128x128"), ("1x128", "128x128"), ("1x128", "1x128")]
    assert not any(gemm.fast_accum for gemm in gemms)
    loose, one = recipes.QParams(amax_epsilon=0.5), recipes.Float8BlockScaling
    variants = [
        one(fp8_format=recipes.Format.HYBRID),
        one(fp8_quant_fwd_inp=loose),
        one(fp8_quant_fwd_weight=loose),
        one(fp8_quant_bwd_grad=loose),
        one(w_block_scaling_dim=1),
        one(w_block_scaling_dim=1, x_block_scaling_dim=2),
        one(w_block_scaling_dim=1, grad_block_scaling_dim=2),
    ]
    assert len({default.slots(), *(variant.slots() for variant in variants)}) == len(variants) + 1


def test_every_field_of_mxfp8_has_an_effect():
    default = recipes.MXFP8BlockScaling()
    slots = default.slots()
    assert slots.input == slots.weight == slots.grad_output == recipes.Quantizer("e4m3", scope="1x32")
    assert {gemm.scopes for gemm in (slots.fprop, slots.dgrad, slots.wgrad)} == {("1x32", "1x32")}
    variants = [recipes.MXFP8BlockScaling(fp8_format=recipes.Format.HYBRID)]
    variants += [recipes.MXFP8BlockScaling(enable_2d_quantization=True)]
    assert len({slots, *(variant.slots() for variant in variants)}) == 3


def test_which_tensors_go_to_4_or_6():
    """TransformerEngine's names of tensors; gradients never do. GEMMs know the largest scales of their operands."""
    make = functools.partial(recipes.NVFP4BlockScaling, disable_rht=True)
    plain = make().slots()
    seen = {plain}
    for which, touched in (("weights", {"weight"}), ("activations", {"input"}), ("all", {"input", "weight"})):
        for use_256 in ("none", "weights", "activations", "all"):
            slots = make(nvfp4_4over6=which, nvfp4_4over6_e4m3_use_256=use_256).slots()
            assert {
                name for name in ("input", "weight", "grad_output") if getattr(slots, name).candidates == (6.0, 4.0)
            } == touched
            maxima = {}
            for name, tensor in (("input", "activations"), ("weight", "weights")):
                maxima[name] = 256.0 if name in touched and use_256 in (tensor, "all") else 448.0
                assert getattr(slots, name).scale_max == maxima[name]
            assert slots.grad_output == plain.grad_output
            assert slots.fprop.scale_maxima == (maxima["input"], maxima["weight"])
            assert slots.dgrad.scale_maxima == (448.0, maxima["weight"])
            assert slots.wgrad.scale_maxima == (448.0, maxima["input"])
            assert recipes.Slots.from_text(slots.to_text()) == slots
        other = make(nvfp4_4over6=which, nvfp4_4over6_err_mode="MSE").slots()
        assert other not in seen and slots not in seen
        seen |= {other, slots}


def test_rows_of_activations_have_factors():
    slots = recipes.NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True).slots()
    plain = recipes.NVFP4BlockScaling(disable_rht=True).slots()
    assert slots == dataclasses.replace(plain, input=recipes.Quantizer("e2m1", scope="1x16", factor_scope="row"))
    for name in ("weight", "grad_output"):
        with pytest.raises(errors.RecipeError, match="expected input alone"):
            dataclasses.replace(plain, **{name: slots.input})


def test_transforms_and_random_rounding_where_they_make_sense():
    slots = recipes.NVFP4BlockScaling().slots()
    plain, moved = dataclasses.replace(slots.input, hadamard=False), slots.input
    random = dataclasses.replace(plain, stochastic=True)
    for changed in ({"input": plain}, {"grad_output": plain}, {"weight": moved}):
        with pytest.raises(errors.RecipeError, match="expected input and grad_output alike"):
            dataclasses.replace(slots, **changed)
    for changed in ({"input": random, "grad_output": plain}, {"weight": random}):
        with pytest.raises(errors.RecipeError, match="expected grad_output alone"):
            dataclasses.replace(slots, **changed)


def test_every_field_of_nvfp4_has_an_effect():
    one = recipes.NVFP4BlockScaling
    slots = one().slots()
    nv = functools.partial(recipes.Quantizer, "e2m1")
    assert slots.input == nv(scope="1x16", hadamard=True) and slots.weight == nv(scope="16x16")
    assert slots.grad_output == nv(scope="1x16", hadamard=True, stochastic=True)
    assert slots.fprop.scopes == slots.dgrad.scopes == ("1x16", "16x16") and slots.wgrad.scopes == ("1x16", "1x16")
    names = ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization")
    assert len({slots, *(one(**{name: True}).slots() for name in names)}) == len(names) + 1
