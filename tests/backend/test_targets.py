"""What the package takes a device for. AMD GPUs, which torch calls "cuda" too, are refused by name."""

import ast
from dataclasses import fields

import pytest
import torch

from te_inductor import targets
from te_inductor.kernels import plain
from te_inductor.kernels.select import select
from te_inductor.targets import Ability, Target, sm90
from tests.house import nodes
from tests.support.kernels import dense, pretend

DEVICE = torch.device("cuda", 0)


def test_one_folder_asks_what_a_device_can_do():
    """Its capability, its name, and the CUDA or ROCm that torch was built for."""
    asked = {"get_device_capability", "get_device_properties", "get_device_name", "hip"}
    asking = {
        path.partition("/")[0]
        for path, node in nodes(ast.Attribute)
        if node.attr in asked or ast.unparse(node) == "torch.version.cuda"
    }
    assert asking == {"targets"}


@pytest.mark.parametrize("capability", [(9, 0), (9, 4), (9, 5), (10, 0)])
def test_refused_by_name(capability, monkeypatch):
    pretend(monkeypatch, capability)
    monkeypatch.setattr("te_inductor.kernels.cutlass_packages.missing", lambda: None)
    assert targets.of(DEVICE).refusal is None
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    found = targets.of(DEVICE)
    assert str(found.refusal) == "an AMD GPU (ROCm 6.4.1), the kernels are for NVIDIA's"
    assert found == Target("ROCm 6.4.1", refusal=found.refusal)  # nothing that it can do
    assert select(dense(16, 4096, 4096, target=found)).family is plain.EXACT


@pytest.mark.parametrize(
    ("capability", "cuda", "can"),
    [
        ((8, 9), "13.0", {"FP8"}),
        ((9, 0), "12.8", {"FP8", "GROUPED_KERNELS", "NVFP4_KERNELS", "HOPPER_KERNELS", "DECODE_ATTENTION", "cutlass",
                          "rates"}),
        ((9, 0), "12.9", {"FP8", "BLOCK_SCALES", "GROUPED_KERNELS", "NVFP4_KERNELS", "HOPPER_KERNELS", "DECODE_ATTENTION",
                          "cutlass", "rates"}),
        ((10, 0), "12.7", {"FP8", "NVFP4_KERNELS", "DECODE_ATTENTION", "cutlass"}),
        ((10, 0), "13.0", {"FP8", "microscaled_mm", "NVFP4_KERNELS", "DECODE_ATTENTION", "cutlass"}),
        ((10, 3), "13.0", {"FP8", "microscaled_mm", "NVFP4_KERNELS", "DECODE_ATTENTION"}),
        ((12, 0), "13.0", {"FP8", "NVFP4_KERNELS", "DECODE_ATTENTION", "cutlass"}),
        ((12, 1), "13.0", {"FP8", "NVFP4_KERNELS", "DECODE_ATTENTION"}),
        ((11, 0), "13.0", {"FP8", "NVFP4_KERNELS", "DECODE_ATTENTION"}),
        ((9, 0), None, {"FP8", "GROUPED_KERNELS", "NVFP4_KERNELS", "HOPPER_KERNELS", "DECODE_ATTENTION", "cutlass",
                          "rates"}),
    ],
)  # fmt: skip
def test_what_a_device_can_do(capability, cuda, can, monkeypatch):
    pretend(monkeypatch, capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.__config__, "show", lambda: "")  # without the library of grouped products
    found = targets.of(DEVICE)
    told = {"name", "capability", "cuda", "can", "product", "limits"}
    others = {field.name for field in fields(found) if getattr(found, field.name)} - told
    assert others | {ability.name for ability in Ability if ability in found.can} == can
    assert found.product == "NVIDIA H200" and found.limits == sm90.LIMITS  # what `pretend` says
    assert found.name == "compute capability {}.{}".format(*capability) and found.capability == capability
