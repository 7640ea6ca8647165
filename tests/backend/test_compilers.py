"""The C++ compiler behind Inductor on a CPU: which vectors it compiles right."""

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn

from te_inductor import compat
from te_inductor.compat.inductor import is_gcc_wrong

pytestmark = pytest.mark.usefixtures("vectors")


@pytest.mark.parametrize(
    ("version", "tuning", "wrong"),
    [
        ("12\n", "  -march=    \t\tcooperlake\n  -mtune=      \t\tgeneric\n", True),
        ("12.2.0\n", "  -mtune=      \t\tgeneric\n", True),
        ("12\n", "  -mtune=      \t\tsapphirerapids\n", False),
        ("12\n", "  -mtune-ctrl=  \t\tgeneric\n", False),
        ("13\n", "  -mtune=      \t\tgeneric\n", False),
        ("", "", False),
    ],
)
def test_which_gcc_is_wrong(version: str, tuning: str, wrong: bool):
    assert is_gcc_wrong(version, tuning) is wrong


@torch._inductor.config.patch({"cpp.cxx": (None, "/nowhere/g++")})
def test_no_compiler_is_no_error():
    assert compat.width_of_right_vectors.__wrapped__() is None


class TwoTransposes(nn.Module):
    """A layer, and beside it two tensors of 16 bits that one kernel transposes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(128, 128, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layer(x), a.t().float().contiguous(), b.t().float().contiguous()


def test_transposes_on_this_cpu():
    torch.manual_seed(0)
    x, a, b = (torch.randn(64, width, dtype=torch.bfloat16) for width in (128, 96, 96))
    options = {"recipe": "current", "policy": {"*": "current"}, "fallback": "error"}
    compiled = torch.compile(TwoTransposes(), backend="te", options=options)
    with torch.no_grad():
        _, found_a, found_b = compiled(x, a, b)
    assert torch.equal(found_a, a.t().float()) and torch.equal(found_b, b.t().float())
