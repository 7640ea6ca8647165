"""The code that adds weight gradients to main_grad: fp32 out of the GEMM, and one kernel a parameter that adds in
place; or CUTLASS's GEMMs, one a parameter, which add themselves."""

import re

import pytest

from tests.offline.harness import generate


def test_generated():
    forward, backward = generate("mlp_training_main_grad", 90).sources
    plain, plain_backward = generate("mlp_training", 90).sources
    assert forward.count(".run(") == plain.count(".run(")
    assert backward.count("out_dtype=torch.float32") == 2  # gate and up are one GEMM
    added = re.findall(r"\.run\((?=[^)]*\b(primals_\d+)\b[^)]*\b\1, \d)[^)]*58720256, stream", backward)
    assert len(added) == len(set(added)) == 3 == backward.count(".run(") - plain_backward.count(".run(")


@pytest.mark.thorough
def test_generated_for_cutlass():
    """No kernel adds, nothing is written in fp32, and the graph's inputs are what is changed."""
    _, backward = generate("cutlass_main_grad", 90).sources
    _, plain_backward = generate("mlp_training", 90).sources
    assert backward.count(".run(") == plain_backward.count(".run(")
    assert "out_dtype=torch.float32" not in backward
    call = (
        r"te_inductor\.cutlass_add_scaled_mm\.default\((primals_\d+), (?:reinterpret_tensor\()?(\w+)(?:.*?\), (\d+)\))?"
    )
    totals, gradients, places = zip(*re.findall(call, backward), strict=True)
    assert len(set(totals)) == 3
    # gate's and up's rows of one column copy of the gradients, 14336 x 16384 bytes each
    assert gradients[1] == gradients[2] != gradients[0] and places == ("", "0", str(14336 * 16384))
