"""The code for layers whose weights FSDP2 gathered in FP8, and for the casts of shards, on Hopper."""

import re
from pathlib import Path

import pytest

from tests.offline.harness import compile_to_cubin, generate


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["gathered_mlp", "gathered_mlp_block"])
def test_gemms_read_what_was_gathered(case):
    """gate, up and down, each by itself: the forward as it is, the backward its transpose, made by a kernel that moves
    bytes. Nothing casts a weight."""
    generated = generate(case, 90)
    forward, backward = generated.sources
    assert (forward.count("extern_kernels._scaled_mm("), backward.count("extern_kernels._scaled_mm(")) == (3, 6)
    weights = re.findall(r"_scaled_mm\(\w+, reinterpret_tensor\((\w+), ", forward)
    assert len(weights) == 3 and all(weight.startswith("primals_") for weight in weights)
    transposes = [kernel for kernel in generated.kernels if "clone" in kernel.name]
    for kernel in transposes:
        types = set(kernel.meta["signature"].values()) - {"i32", "constexpr"}
        assert types == {"*fp8e4nv"} or (case == "gathered_mlp_block" and types == {"*fp32"}), kernel.name
        assert ".to(" not in kernel.body
    assert sum("*fp8e4nv" in kernel.meta["signature"].values() for kernel in transposes) == 2  # gate's and up's is one


def test_a_shard_is_cast_in_one_pass(tmp_path: Path):
    """One kernel each, which rounds to the dtype of the gather first."""
    kernels = generate("shard_casts", 90).kernels
    assert len(kernels) == 2
    for kernel in kernels:
        assert list(kernel.meta["signature"].values())[:3] == ["*fp32", "*fp32", "*u8"]
        assert kernel.body.index("tl.bfloat16") < kernel.body.index("tl.float8e4nv")
        compile_to_cubin(kernel, 90, tmp_path)


def test_a_graph_gathers_bytes():
    """The bytes are those of a weight's cast, which fprop reads; by default, as the size rule has it."""
    forward, backward = generate("graph_fsdp", 90).sources
    [gathered] = re.findall(r"(\w+) = torch\.ops\._c10d_functional\.all_gather_into_tensor\.default\((.*)\)\n", forward)
    assert re.fullmatch(r"aten\.view\.dtype\(\w+, torch\.uint8\), 2, '0'", gathered[1])
    assert re.search(rf"_scaled_mm\(\w+, aten\.view\.dtype\(reinterpret_tensor\({gathered[0]}, ", forward)
    assert backward.count("extern_kernels._scaled_mm(") == 2
