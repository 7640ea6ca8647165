"""Gradients of experts' rows in the order of tokens (passes/joint/token_order.py), and rows put where experts have them:
generated code, read, compiled and interpreted."""

import re
from pathlib import Path

import pytest
import torch

from te_inductor.lowerings.codegen.tiles import PLACED
from te_inductor.recipes import Quantizer
from tests.bounds import assert_same_values
from tests.offline.harness import compile_to_cubin, generate
from tests.oracle import casts
from tests.support.contents import CONTENTS
from tests.support.cuda_code import spilled
from tests.support.interpreted import interpret

pytest.importorskip("triton")


def test_a_row_is_read_once_for_all_its_experts(tmp_path: Path) -> None:
    """The kernel of dy holds a row; what it reads again stays in the cache, what it reads once does not. Nothing is added
    by atomics, and each gradient is stored where it belongs."""
    made = generate("experts_delayed", 90)
    assert not any("tl.atomic_add" in one.body for one in made.kernels)
    [kernel] = [one for one in made.kernels if "tl.float8e5" in one.body and "r0_numel" in one.body]
    assert kernel.tile == {"XBLOCK": 1, "num_warps": 2}
    [dout] = re.findall(r"tl\.load\(in_ptr\d \+ \(r0_1 \+ 2048 \* \(x0 // 8\)\).*", kernel.body)
    [y] = re.findall(r"tl\.load\(in_ptr\d \+ \(r0_1 \+ 2048 \* tmp\d+\).*", kernel.body)
    assert "evict_last" in dout and "evict_first" in y
    assert re.search(r"tl\.store\(out_ptr\d \+ \(?tl\.broadcast_to\(r0_1 \+ 2048 \* tmp\d+, ", kernel.body)
    compiled = compile_to_cubin(kernel, 90, tmp_path)
    assert spilled(compiled) == 0
    stores = re.findall(r"st\.global\.(\S+)", compiled.asm["ptx"])
    assert "v4.b32" in stores and "v2.b32" not in stores


def test_rows_of_a_copy(tmp_path: Path) -> None:
    """x's, in the forward: 16 bytes a load and a store, and the place is not waited for by a load."""
    kernel = generate("experts_delayed", 90).kernel("place_rows")
    assert kernel.tile == PLACED and len(re.findall(r"tl\.load\(.*tmp", kernel.body)) == 0
    compiled = compile_to_cubin(kernel, 90, tmp_path)
    ptx = compiled.asm["ptx"]
    assert spilled(compiled) == 0 and set(re.findall(r"st\.global\.(\S+)", ptx)) == {"v4.b32"}
    assert "ld.global.v4.b32" in ptx


@pytest.mark.thorough
def test_interpreted(tmp_path: Path) -> None:
    """Bit for bit, also of rows of no expert, which count for no amax."""
    generated = generate("placed_rows", 90)
    [kernel] = [one for one in generated.kernels if "r0_numel" in one.body]
    assert "tl.float8e5" in kernel.body and "tl.atomic_max" in kernel.body  # all in one
    quantizer, scale = Quantizer("e5m2"), torch.tensor(16.0)
    for name in ("random", "nan and infinite"):
        order = torch.randperm(12)
        places, ends = torch.argsort(order), torch.tensor([3, 9], dtype=torch.int32)
        dout, y = CONTENTS[name](6, 1104).bfloat16(), torch.randn(12, 1104).bfloat16()
        w = torch.rand(12).bfloat16()
        given = [places.view(-1, 2), dout, ends, w, torch.tensor(0.0), scale, order, y]
        [(dots, copy, rows, of_tokens, amax)] = interpret(generated.sources[0], [given], tmp_path)
        wide = dout.float().repeat_interleave(2, 0)
        dy = torch.where((places < 9)[:, None], wide * w.float()[:, None], 0.0)
        assert_same_values(copy, casts.quantize_known(dy[order], scale.item(), quantizer)[0])
        assert torch.equal(rows.view(torch.uint8), of_tokens.view(torch.uint8)[order // 2])
        expected, dot = dy.abs().max(), (wide * y[places].float()).amax(1).bfloat16()
        assert amax.item() == expected or (amax.isnan() and expected.isnan())
        assert torch.equal(dots.nan_to_num(7.0), dot.nan_to_num(7.0))
