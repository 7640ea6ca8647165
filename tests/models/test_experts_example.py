"""examples/experts.py: its curves of a few steps."""

import json

import pytest

from examples import experts

pytestmark = [pytest.mark.thorough, pytest.mark.codegen]


def test_curves(tmp_path, capsys):
    """The curves are within the example's tolerances of bf16, and learn."""
    assert experts.main(["--steps", "16", "--recipes", "rowwise", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("\n") == 4
    losses = json.loads((tmp_path / "experts.json").read_text())["losses"]
    assert list(losses) == ["bf16", "rowwise"]
    for curve in losses.values():
        assert len(curve) == 16 and curve[-1] < 0.7 * curve[0]
    assert losses["rowwise"] != losses["bf16"]
