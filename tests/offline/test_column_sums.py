"""Bias gradients in the kernels that cast dy: the generated code, interpreted, and how many bytes it no longer moves."""

import re

import pytest
import torch

from te_inductor.lowerings.codegen.column_sums import ROWS
from te_inductor.recipes import Quantizer
from tests.bounds import assert_same_values
from tests.offline.harness import compile_to_cubin, generate
from tests.oracle import casts
from tests.support.contents import CONTENTS
from tests.support.cuda_code import launches
from tests.support.interpreted import interpret

E4M3 = Quantizer("e4m3")


def assert_sums(found, x):
    """An error of a few roundings of fp32, of the sum of magnitudes; NaN and infinities where they are."""
    expected, magnitude = x.double().sum(0), x.double().abs().sum(0)
    special = ~expected.isfinite()
    assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(
        found[special].isinf(), expected[special].isinf()
    )
    assert ((found.double() - expected).abs() <= 2.0**-21 * magnitude)[~special].all()


@pytest.mark.parametrize("case", ["column_sums", "column_sums_transposed"])
def test_sums_and_both_copies_of_any_contents(case, tmp_path):
    """Sizes that no tile divides; of tensors that lie in columns, where pairs of rows change places in the tile."""
    generated = generate(case, 90)
    [cast] = [kernel for kernel in generated.kernels if "tl.float8e4nv" in kernel.body]
    assert cast.body.count("tl.sum(") == 1 and "atomic_add(" not in "".join(generated.sources)
    compile_to_cubin(cast, 90, tmp_path)
    scale, runs, expected = torch.tensor(4.0), [], []
    for name in ("random", "nan and infinite", "rows apart"):
        transposed = case.endswith("transposed")
        size = (144, 208) if transposed else (208, 144)
        dy = CONTENTS[name](*size).bfloat16()
        others = [torch.randn(*size).bfloat16() for _ in range(2 if transposed else 1)]
        mask, rest = others[0] > (others[1] if transposed else 0), dy.abs()
        dx = torch.where(mask, dy, rest if transposed else torch.where(others[0] < 0, rest, 0.5))
        expected.append(dx.t() if transposed else dx)
        runs.append([*others, dy, scale])
    for x, (data, data_t, sums) in zip(expected, interpret(generated.sources[0], runs, tmp_path), strict=True):
        assert_same_values(data, casts.quantize_known(x, scale.item(), E4M3)[0])
        assert_same_values(data_t, casts.quantize_known(x.t(), scale.item(), E4M3)[0])
        assert_sums(sums, x)


def test_padded_rows_are_one_kernel(tmp_path):
    """Both copies, the amax and the sums, of contents that the rows of zeros change nothing of."""
    generated = generate("column_sums_padded", 90)
    [cast] = [kernel for kernel in generated.kernels if "tl.float8e4nv" in kernel.body]
    assert cast.body.count("tl.sum(") == 1 and "atomic_max(" in cast.body
    compile_to_cubin(cast, 90, tmp_path)
    runs, expected = [], []
    for name in ("random", "nan and infinite", "rows apart"):
        x, dy = torch.randn(201, 144).bfloat16(), CONTENTS[name](201, 144).bfloat16()
        dx = torch.where(x > 0, dy, torch.where(x < 0, dy.abs(), 0.5))
        expected.append(dx)
        runs.append([x, dy, torch.zeros(()), torch.tensor(4.0)])
    for x, (data, data_t, sums, amax) in zip(expected, interpret(generated.sources[0], runs, tmp_path), strict=True):
        assert_same_values(data, casts.quantize_known(x, 4.0, E4M3)[0])
        assert_same_values(data_t, casts.quantize_known(x.t(), 4.0, E4M3)[0])
        assert_sums(sums, x)
        assert_same_values(amax, x.float().abs().max())


def test_sums_of_pieces(tmp_path):
    generated = generate("column_sums_of_pieces", 90)
    kernels = {kernel.name: kernel.body for kernel in generated.kernels}
    bodies = [kernels[name] for name in launches(generated.sources[0])]
    assert sum(body.count("tl.sum(tl.") for body in bodies if "float8" in body) == 2
    q, k = (torch.randn(208, 144).bfloat16() for _ in range(2))
    [(data, data_t, *sums)] = interpret(generated.sources[0], [[q, k, torch.tensor(4.0)]], tmp_path)
    whole = torch.cat([q, k], 1).abs()
    assert_same_values(data, casts.quantize_known(whole, 4.0, E4M3)[0])
    assert_same_values(data_t, casts.quantize_known(whole.t(), 4.0, E4M3)[0])
    for found, piece in zip(sums, (q, k), strict=True):
        assert_sums(found, piece.abs())


@pytest.mark.parametrize("case", ["combined_column_sums", "column_sums_of_a_list"])
def test_kernels_of_ours_are_no_parts_of_others(case):
    """Inductor combines the rest still."""
    generated = generate(case, 90)
    kernels = {kernel.name: kernel.body for kernel in generated.kernels}
    bodies = [kernels[name] for name in launches(generated.sources[0])]
    combined = [body for body in bodies if "pid_offset" in body]
    assert [body.count("pid_offset =") for body in combined] == [2] and "float8" not in combined[0]
    assert sum(body.count("tl.sum(tl.") == 1 and "float8" in body for body in bodies) == 2


@pytest.mark.parametrize(
    "case", ["biased_gelu_delayed", pytest.param("biased_gelu_current", marks=pytest.mark.thorough)]
)
def test_a_bias_gradient_reads_nothing_large(case, tmp_path):
    """Both are sums over tiles of what is cast: no kernel that reduces columns reads as much as dy. What adds up is one
    row for each 32 tokens."""
    generated = generate(case, 90)
    backward = generated.sources[1]
    kernels = {kernel.name: kernel for kernel in generated.kernels}
    sums = [kernels[name] for name in launches(backward) if "column_sums" in name or "_sum_" in name]
    fused = [kernel for kernel in sums if "tl.float8" in kernel.body]
    assert len(fused) == 2 and all(kernel.body.count("tl.sum(tl.") == 1 for kernel in fused)
    assert all("gelu" not in kernel.name or "bf16" not in str(kernel.meta["signature"].get("in_ptr0"))
               for kernel in sums if kernel not in fused)  # fmt: skip
    parts = re.findall(rf"empty_strided_cuda\(\(({8192 // ROWS}), (\d+)\), [^)]*\), torch.float32\)", backward)
    assert sorted(int(columns) for _, columns in parts)[-2:] == [4096, 16384]
    for kernel in fused:
        compile_to_cubin(kernel, 90, tmp_path)


def test_relus_mask_is_found_again(tmp_path):
    """It is found in what the up projection wrote: the forward reads it once, to write the row copy, and stores no
    mask; the backward reads it beside dh, and writes the column copy of ReLU's output, both of the gradient, and the
    sums."""
    forward, backward = generate("biased_relu_delayed", 90).sources
    assert "torch.bool" not in forward + backward
    kernels = {kernel.name: kernel for kernel in generate("biased_relu_delayed", 90).kernels}
    [relu] = [kernels[name] for name in launches(forward) if "relu" in name]
    [back] = [kernels[name] for name in launches(backward) if "threshold" in name and "float8" in kernels[name].body]
    kinds = [kind for name, kind in relu.meta["signature"].items() if kind.startswith("*")]
    assert sorted(kinds) == ["*bf16", "*fp32", "*fp32", "*fp8e4nv"]  # scale and amax
    kinds = [kind for name, kind in back.meta["signature"].items() if kind.startswith("*")]
    assert sorted(kind for kind in kinds if kind != "*fp32") == ["*bf16"] * 2 + ["*fp8e4nv"] + ["*fp8e5"] * 2
    compile_to_cubin(back, 90, tmp_path)
