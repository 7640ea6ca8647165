"""The code for experts whose rows come from other ranks, of which only a run tells how many there are."""

import re

import pytest

from te_inductor.lowerings.codegen.tiles import FLAT, FLAT_OF_THREE, UNKNOWN
from tests.offline.harness import Kernel, generate

A_PROGRAM = 2**17  # elements, that one program may reduce


def unknown(kernel: Kernel) -> bool:
    """Whether its number of elements is: of a size that is known, generated code has the number."""
    return not re.search(r"\bxnumel = \d", kernel.body) and "r0_numel" not in kernel.meta["signature"]


@pytest.mark.parametrize("recipe", [pytest.param("current", marks=pytest.mark.thorough), "delayed"])
def test_no_program_reduces_a_whole_tensor(recipe: str) -> None:
    """Inductor does not cut a reduction of which it knows no size: two seconds, of 65536 rows of 2048."""
    for source in generate(f"exchanged_{recipe}", 90).sources:
        for outputs, reduced in re.findall(r"reduction\(\s*size_hints=\{'x': (\d+), 'r0_': (\d+)\}", source):
            assert int(reduced) <= A_PROGRAM or int(outputs) > 132


def test_what_is_cast_is_read_once() -> None:
    """SwiGLU and its gradient are cast and looked at by one kernel each, as if their sizes were known."""
    code = generate("exchanged_delayed", 90)
    both = [k for k in code.kernels if unknown(k) and "tl.float8" in k.body and "atomic_max" in k.body]
    assert [k.tile for k in both] == [FLAT, FLAT_OF_THREE] and all("silu" in k.name for k in both)
    assert both[1].body.count("tl.store(") == 3  # both halves, and SwiGLU's copy again
    alone = [k for k in code.kernels if unknown(k) and "atomic_max" in k.body and "tl.float8" not in k.body]
    assert not alone


def test_bytes_of_rows_are_written_once() -> None:
    """Rows from other ranks are ordered and masked by one kernel, which writes what GEMMs and transposes read."""
    forward, backward = generate("exchanged_delayed", 90).sources
    for source in (forward, backward):
        assert len(re.findall(r"^def triton_\w*mask_copy\w*\(", source, re.MULTILINE)) >= 1
        masks = re.findall(r"^def (triton_\w*where_zeros\w*)\(", source, re.MULTILINE)
        assert all("silu" in name or "transpose_groups" in name for name in masks), masks


def test_rows_are_gathered_both_ways() -> None:
    """Nothing of a whole row is added by atomics, but where rows are put into the order in which ranks want them."""
    forward, backward = generate("exchanged_delayed", 90).sources
    for source in (forward, backward):
        assert not re.search(r"aten\.index_add|aten\.scatter_add", source)
    adds = [k for k in generate("exchanged_delayed", 90).kernels if "tl.atomic_add" in k.body and unknown(k)]
    assert len(adds) == 1 and "tl.atomic_add" not in forward


def test_tiles_of_unknown_sizes() -> None:
    """torch 2.11 would have two elements a thread."""
    kernels = [k for k in generate("exchanged_delayed", 90).kernels if unknown(k)]
    assert len(kernels) > 8 and all(k.tile in (UNKNOWN, FLAT, FLAT_OF_THREE) for k in kernels), [
        (k.name, k.tile) for k in kernels
    ]
