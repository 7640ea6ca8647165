"""Generated code of attention by masks whose sizes or offsets a call tells, with biases, and of other forms: Inductor
lowers it, and holds no mask."""

import pytest
import torch

from te_inductor.runtime.attention import predicate
from tests.offline.cases.attention import SIZES, WINDOW
from tests.offline.harness import generate
from tests.support.interpreted import interpret


@pytest.mark.thorough
@pytest.mark.parametrize("case", ("attention_of_lengths", "attention_in_a_cache"))
def test_lengths_that_are_symbolic(case):
    generated = generate(case, 90)
    for source in generated.sources:
        assert "flex_attention" in source and "scaled_dot_product" not in source
    assert generated.sources[0].count("te_inductor.block_mask.default(") == 1  # for all layers


@pytest.mark.thorough
def test_block_masks(tmp_path):
    """The generated kernels find the same blocks, and none sorts, which Triton takes long to compile."""
    [source] = generate("block_masks", 90).sources
    assert "sort" not in source
    padding = (torch.rand(SIZES[0], SIZES[3]) > 0.2).long()
    padding[0, 300:] = padding[1, :150] = 0
    [found] = interpret(source, [[padding]], tmp_path)
    expected = predicate.block_mask(WINDOW, [padding], SIZES, padding.device)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.quick("attention_with_a_learned_bias")
@pytest.mark.parametrize(
    "case", ("attention_of_three_dimensions", "attention_with_a_learned_bias", "attention_of_wide_queries")
)
def test_forms(case):
    forward, backward = generate(case, 90).sources
    for source in (forward, backward):
        assert "flex_attention" in source and "scaled_dot_product" not in source and "bmm" not in source
    learned = "learned" in case
    assert ("tl.atomic_add" in backward) == learned  # the gradient of the bias, whose table both layers read


def test_what_a_call_asks():
    """It asks once, and computes what it may need once, for all layers, forward and backward."""
    forward, backward = generate("attention_that_asks", 90).sources
    for op in ("hides_nothing", "block_mask"):
        assert (forward.count(f"te_inductor.{op}.default("), backward.count(f"te_inductor.{op}.default(")) == (1, 0)
    assert forward.count("te_inductor.attend.default(") == backward.count("te_inductor.attend_backward.default(") == 2
