"""Generated code of attention by masks whose sizes or offsets a call tells: Inductor lowers it, and holds no mask."""

import pytest

from tests.offline.harness import generate


@pytest.mark.parametrize("case", ("attention_of_lengths", "attention_in_a_cache"))
def test_lengths_that_are_symbolic(case):
    generated = generate(case, 90)
    for source in generated.sources:
        assert "flex_attention" in source and "scaled_dot_product" not in source
    assert generated.sources[0].count("te_inductor.block_mask.default(") == 1  # for all layers
