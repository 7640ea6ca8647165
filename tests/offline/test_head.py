"""The code for a language model's last layer and its loss on Hopper: the loss's gradient is made once."""

import re

import pytest

from te_inductor.lowerings.codegen.tiles import OF_ROWS
from tests.offline.harness import generate


@pytest.mark.quick("delayed", "block")
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
