"""Weight gradients that wait for `backward_dw`, on the GPU: the memory that Inductor's code made is not written again,
and CUDA graphs are refused."""

import copy

import pytest
import torch
from torch import nn

from te_inductor import backward_dw, explain
from te_inductor.errors import DeferredWgradError
from tests.support.gpu_main_grads import te


def chain() -> nn.Sequential:
    """Every copy has the size of every other."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4))).cuda()


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "block", "mxfp8"])
def test_microbatches_in_flight(recipe):
    """Gradients in bf16 and by cuBLASLt (shapes that no table of CUTLASS kernels names) are the very bits of the
    immediate gradient."""
    twin = chain().bfloat16()
    model = copy.deepcopy(twin)
    run, plain = te(model, recipe, wgrad="deferred", fallback="silent"), te(twin, recipe, fallback="silent")
    x = torch.randn(4, 256, 256, device="cuda", dtype=torch.bfloat16)
    for each in (run, plain):
        ys = [each(x[0]), each(x[1])]
        ys[0].backward(x[2])
        ys.append(each(x[3]))
        ys[1].backward(x[3])
        ys[2].backward(x[0])
    assert not any(p.grad.any() for p in model.parameters() if p.dim() == 2)
    with pytest.raises(DeferredWgradError):
        torch.optim.SGD(model.parameters()).step()
    torch.randn(64, 2**20, device="cuda")  # the allocator's free memory is written
    assert backward_dw(model, backwards=1) == 4 and backward_dw(model) == 8
    for p, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, other.grad)


@pytest.mark.parametrize("options", [{"mode": "reduce-overhead"}, {"triton.cudagraphs": True}], ids=str)
def test_cuda_graphs_are_refused(options):
    model, x = chain(), torch.randn(64, 256, device="cuda")
    asked = {"policy": {"*": "current"}, "wgrad": "deferred", **options}
    assert {unmet.reason for unmet in explain(model, x, options=asked).unmet} == {
        "its operands would be in a CUDA graph's memory, which the next replay overwrites"
    }
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad()  # gradients lie in the graph's memory: none may live into the next step
        te(model, "current", **options, wgrad="deferred", fallback="silent")(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters()) and backward_dw() == 0
