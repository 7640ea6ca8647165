"""The C++ of a package for sm_90: it calls cuBLASLt by its shim, and nothing of this package."""

import re

import pytest

from tests.offline.harness import server, shim

thorough = pytest.mark.thorough


@pytest.mark.parametrize(
    ("recipe", "rows", "products"),
    [
        ("rowwise", 8, 2),
        pytest.param("current", 8192, 2, marks=thorough),
        pytest.param("block", 8192, 2, marks=thorough),
        pytest.param("block", 8, 2, marks=thorough),
        pytest.param("mxfp8", 8192, 0, marks=thorough),  # emulated: exact values in bf16
        pytest.param("stored:rowwise", 8, 2, marks=thorough),
        pytest.param("stored:block", 8192, 2, marks=thorough),
        pytest.param("stored:nvfp4_weight_only", 8, 0, marks=thorough),
        pytest.param("stored:nvfp4_weight_only", 8192, 2, marks=thorough),  # recast to E4M3
    ],
)
def test_a_package_calls_nothing_of_ours(recipe, rows, products, tmp_path):
    shim()
    done = server().run("tests.offline.packages", "90", recipe, str(rows), str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    wrapper = (tmp_path / "wrapper.cpp").read_text()
    code = re.sub(r"//[^\n]*", "", wrapper)  # comments name the ops that kernels were made of
    assert len(re.findall(r"aoti_torch_cuda__scaled_mm\w*\(", code)) == products
    assert "proxy_executor_call_function" not in code
    assert "te_inductor" not in (tmp_path / "extern.json").read_text()


@pytest.mark.parametrize(
    ("arch", "recipe", "product"),
    [
        ("90", "rowwise", "aoti_torch_cuda__scaled_grouped_mm"),
        pytest.param("90", "current", "aoti_torch_cuda__scaled_grouped_mm", marks=thorough),
        pytest.param("90", "mxfp8", "aoti_torch_cuda__grouped_mm", marks=thorough),  # emulated: exact values in bf16
        pytest.param("90", "nvfp4", "aoti_torch_cuda__grouped_mm", marks=thorough),
        pytest.param("90", "block", "aoti_torch_cuda__grouped_mm", marks=thorough),  # refused
        pytest.param("100", "mxfp8", "aoti_torch_cuda__scaled_grouped_mm", marks=thorough),
        pytest.param("100", "nvfp4", "aoti_torch_cuda__grouped_mm", marks=thorough),  # emulated, as on Hopper
    ],
)
def test_a_package_of_experts(arch, recipe, product, tmp_path):
    """torch's grouped products, one a layer, by their shims."""
    shim()
    done = server().run("tests.offline.packages", arch, f"experts:{recipe}", "256", str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    code = re.sub(r"//[^\n]*", "", (tmp_path / "wrapper.cpp").read_text())
    assert re.findall(r"(aoti_torch_cuda_\w*grouped_mm)\w*\(", code) == [product]
    assert "proxy_executor_call_function" not in code
    assert "te_inductor" not in (tmp_path / "extern.json").read_text()
