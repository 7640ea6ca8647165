"""AOTInductor's packages of lowered programs on a GPU: loaded in a process without te_inductor, rows of any number."""

import zipfile

import pytest
import torch

from tests.package import make, run

FP8 = ["current", "rowwise", "block", "stored:current", "stored:rowwise", "stored:block", "stored:nvfp4_weight_only"]
CAST_OTHERWISE = ["current", "stored:nvfp4_weight_only"]
hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.skipif(not hopper, reason="needs compute capability 9.0")
def test_a_package_runs_without_te_inductor(recipe, tmp_path):
    """A package runs as its program does, run by the eager kernels, but for roundings to bf16 and, where one of those
    decides, to FP8: below 2^-5 of the largest output. More where a cast differs: a package multiplies stored NVFP4
    weights in bf16 where its program casts prompts to FP8, and under `current` one rounding may change the scale of all
    values. A cast to E4M3 changes a value by 2^-4 of it at most (H200: 0.057 with 1000 rows, 0.033)."""
    make(tmp_path, "cuda", torch.bfloat16, recipe)
    with zipfile.ZipFile(tmp_path / "model.pt2") as package:
        (library,) = (package.read(name) for name in package.namelist() if name.endswith(".so"))
    if b"libstdc++.so" not in library:
        pytest.skip(
            "this C++ compiler links libstdc++ statically; torch crashes where it loads any such package: set CXX"
        )
    run([tmp_path], 2.0 ** (-4 if recipe in CAST_OTHERWISE else -5))
