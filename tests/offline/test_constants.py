"""One graph that holds every family of kernels: its generated code finds each constant (`generate.check_constants`,
which every other case passes too)."""

import re

import pytest

from te_inductor.kernels.nvfp4_fp8 import NVFP4PromptConfig
from te_inductor.kernels.nvfp4_linear import NVFP4Config
from te_inductor.recipes.constants import source_name
from tests.offline.generate import check_constants
from tests.offline.harness import generate

pytest.importorskip("triton")

from te_inductor.kernels import fp8_small_m as small_m


def test_every_family_in_one_graph():
    source = generate("every_family", 90).sources[0]
    for op in ("nvfp4_partial_sums", "nvfp4_fp8_partial_sums", "nvfp4_recast", "fp8_partial_sums", "scaled_mm"):
        assert re.search(rf"te_inductor\.{op}\.default\(|extern_kernels\._?{op}\(", source), op
    for config in (small_m.SmallMConfig, NVFP4Config, NVFP4PromptConfig):
        assert f"{source_name(config)}(" in source
    kinds = re.findall(rf"{source_name(NVFP4Config)}\(kind='(\w+)'", source)
    assert sorted(kinds) == ["direct", "plain", "streamed"]


def test_a_name_that_stands_for_another_class_is_found():
    config = NVFP4PromptConfig(128, 1)
    source, names = config.__fx_repr__()
    check_constants(f"call({source})", names, {source: config})
    with pytest.raises(AssertionError, match="became"):
        check_constants(f"call({source})", {source_name(type(config)): lambda **_: None}, {source: config})
    with pytest.raises(NameError):
        check_constants(f"call({source})", {}, {source: config})
