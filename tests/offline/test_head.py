"""The code for a language model's last layer and its loss on Hopper: the loss's gradient is made once."""

import math
import re
from pathlib import Path

import pytest

from te_inductor.lowerings.codegen.tiles import OF_ROWS
from tests.offline.harness import INTERPRETER, generate
from tests.support.cuda_code import compiled, disassembled, spilled

pytest.importorskip("triton")

from te_inductor.templates.triton import token_losses


@pytest.mark.quick("delayed")
@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "block"])
def test_a_loss_gradient_is_computed_once(recipe: str) -> None:
    """One kernel of the backward does, which writes it over the logits; amaxes and casts read it."""
    _, backward = generate(f"head_{recipe}", 90).sources
    kernels = re.findall(r"^def triton_\w+\((.*?)\):\n(.*?)^'''", backward, re.DOTALL | re.MULTILINE)
    softmax = [arguments for arguments, body in kernels if "libdevice.exp" in body]
    assert len(softmax) == 1 and "in_out_ptr0" in softmax[0]


def test_a_loss_alone_has_no_logits() -> None:
    """It is one op of the forward, and the backward multiplies what that has left."""
    forward, backward = generate("output_loss_delayed", 90).sources
    assert forward.count("te_inductor.scaled_token_losses.default(") == 1
    assert "(16384, 128256)" not in forward + backward
    assert "libdevice.exp" not in forward + backward


def test_its_casts_take_many_rows_a_warp() -> None:
    """Casts do under delayed scaling, where the kernel that computes it casts it both ways."""
    [kernel] = [k for k in generate("head_delayed", 90).kernels if "libdevice.exp" in k.body and "tl.float8" in k.body]
    assert kernel.tile == {"YBLOCK": OF_ROWS[0], "XBLOCK": OF_ROWS[1], "num_warps": OF_ROWS[2]}


def test_interpreted() -> None:
    """The kernels of a loss alone do what plain torch does."""
    done = INTERPRETER.run("tests.offline.loss_kernels")
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_common_loss_pays_for_no_other(tmp_path: Path) -> None:
    """Whole tiles, no smoothing, factor or cap: 16 instructions an element, the largest accesses there are, and words of
    four tokens where a tile is transposed."""
    words = {
        "IGNORES": True,
        "SMOOTHS": False,
        "SCALES": False,
        "CAPS": False,
        "SUMS": False,
        "SHARED": False,
        "WHOLE": True,
        "FOURS": True,
    }
    constants = {"LARGEST": 57344.0, "TOKENS": token_losses.TILE[0], "WORDS": token_losses.TILE[1], **words}
    numbers = dict.fromkeys(("scale", "smoothing", "inner", "outer"), "fp32")
    types = {"logits": "*bf16", "labels": "*i64", "sums": "*fp32", "row": "*fp8e5", "column": "*fp8e5", **numbers}
    multiples = ("tokens", "words", "width", "stride", "row_stride", "column_stride")
    made = compiled(token_losses.casts_of_tiles, constants, types, {"num_warps": 8}, multiples)
    code = disassembled(made.asm["cubin"], tmp_path)
    held = math.prod(token_losses.TILE) // (8 * 32)  # elements of a thread
    assert spilled(made) == 0 and len([line for line in code if not line.startswith("NOP")]) <= 16.5 * held
    ptx = made.asm["ptx"]
    assert len(re.findall(r"st\.shared\.b32", ptx)) == held // 4 and "st.shared.b8" not in ptx
    assert set(re.findall(r"st\.global\.(\S+)", ptx)) == {"v4.b32"}
