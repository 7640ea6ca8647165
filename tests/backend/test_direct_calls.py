"""Ops of ours that Inductor does not lower: which functions generated code calls in their place."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from te_inductor import ops
from te_inductor.lowerings.codegen import direct_calls
from te_inductor.recipes import Quantizer
from te_inductor.runtime.definition import KERNELS, WRITTEN_OUT

QUANTIZER = Quantizer("e4m3")


def quantized(x, ends):
    return ops.quantize_experts(x.view(2, 16, 32).contiguous(), QUANTIZER)


@pytest.fixture
def compiled():
    from te_inductor import lowerings

    torch._dynamo.reset()
    wrap = lowerings.install()

    def backend(gm, inputs):
        from te_inductor import compat

        return compat.compile_fx(gm, inputs, {"fx_graph_cache": False}, wrap_inner=wrap)

    return lambda function: torch.compile(function, backend=backend, fullgraph=True)


def test_generated_code_calls_the_kernel_itself(compiled):
    x = torch.randn(32, 32)
    found, [code] = run_and_get_code(compiled(quantized), x, None)
    assert "extern_kernels.te_inductor_cpu.quantize_experts(" in code
    assert "torch.ops.te_inductor.quantize_experts.default(" not in code
    assert "te_inductor_constant_" in code and "Quantizer(" not in code
    for one, other in zip(found, quantized(x, None), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_a_call_without_a_tensor_calls_the_op():
    node = type("Node", (), {"op_overload": ops.quantize_experts, "inputs": []})()
    assert direct_calls._device(node) is None


def test_a_device_without_kernels_calls_ops():
    at_xpu = type("Input", (), {"get_device": lambda self: torch.device("xpu")})()
    node = type("Node", (), {"op_overload": ops.quantize_experts, "inputs": [at_xpu]})()
    assert direct_calls._device(node) is None


@pytest.mark.parametrize("device", KERNELS)
def test_kernels_have_their_ops_arguments(device):
    """A call means what it means for the op, by position and by name."""
    pytest.importorskip("triton")
    import te_inductor.templates.triton.grouped_ops
    import te_inductor.templates.triton.scale_updates
    import te_inductor.templates.triton.stored_ops
    import te_inductor.templates.triton.token_losses  # noqa: F401

    apart = {
        direct_calls._short_name(op)
        for op in WRITTEN_OUT
        if not direct_calls._takes_as(getattr(KERNELS[device], direct_calls._short_name(op)), op)
    }
    # What a decorator hides goes through the dispatcher.
    assert apart <= {"cutlass_add_scaled_mm", "cutlass_gated_gradient"}
