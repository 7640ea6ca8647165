"""The code of a tensor-parallel MLP whose products torch overlaps with their collectives (`_micro_pipeline_tp`)."""

import re

import pytest

from tests.offline.harness import generate

GATHER = "symm_mem.fused_all_gather_scaled_matmul.default("
SCATTER = "symm_mem.fused_scaled_matmul_reduce_scatter.default("
PLAIN = ("all_gather_into_tensor", "reduce_scatter_tensor")


@pytest.mark.parametrize(
    "case, bias", [("async_tp_delayed", False), pytest.param("async_tp_bias", True, marks=pytest.mark.thorough)]
)
def test_products_are_one_with_their_collectives(case, bias):
    """gate and up with x's gather, down with its sums' scatter; in the backward down's dgrad with dy's gather, and gate
    and up's with dx's scatter. wgrads are GEMMs of their own."""
    forward, backward = generate(case, 90).sources
    for source, fast in ((forward, True), (backward, False)):
        assert not any(f"_c10d_functional.{name}" in source for name in PLAIN)
        [gather] = re.findall(rf"= torch\.ops\.{re.escape(GATHER)}(.*)\)", source)
        [scatter] = re.findall(rf"= torch\.ops\.{re.escape(SCATTER)}(.*)\)", source)
        biases = r"\[buf\d+\]" if bias and fast else r"\[None\]"
        assert re.search(rf", 0, '0', {biases}, \[None\], \[torch.bfloat16\], \[{fast}\]$", gather), gather
        assert re.search(rf", 'sum', 0, 0, '0', \[\d+, 4096\], None, None, torch.bfloat16, {fast}$", scatter), scatter
    assert forward.count("_scaled_mm(") == 0
    assert backward.count("extern_kernels._scaled_mm(") == 2


@pytest.mark.thorough
def test_nothing_changes_where_nobody_asks():
    for source in generate("tp_delayed", 90).sources:
        assert "symm_mem" not in source
        assert all(source.count(f"_c10d_functional.{name}") for name in PLAIN)
