"""Peak memory of training steps by default: not above that of plain torch.compile, with few tokens."""

import pytest
import torch

from benchmarks import llama_blocks

pytestmark = pytest.mark.gpu


def peak(shape: llama_blocks.Shape, recipe: str | None) -> int:
    """Bytes of a step, forward and backward, behind two others."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = llama_blocks.Blocks(shape).to("cuda", torch.bfloat16)
    x = torch.randn(shape.batch, shape.seq, shape.dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    # Named by the policy, layers are in low precision whatever their size.
    given = {} if recipe is None else {"backend": "te", "options": {"policy": {"*": recipe}}}
    run = torch.compile(model, fullgraph=True, **given)
    for _ in range(3):
        model.zero_grad()
        x.grad = None
        torch.cuda.reset_peak_memory_stats()
        run(x).backward(dy)
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_no_more_than_in_high_precision():
    shape = llama_blocks.Shape(layers=6, batch=1, dim=2048, ffn=8192, heads=32, kv_heads=8)  # 4096 tokens
    most = peak(shape, None)
    found = {recipe: peak(shape, recipe) for recipe in ("current", "delayed", "rowwise", "block")}
    assert all(size <= most for size in found.values()), (most, found)
