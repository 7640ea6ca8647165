"""The code of a backward that leaves its weight gradients for later: it calls no GEMM of them, and keeps what they
need."""

import re

import pytest

from tests.offline.harness import generate


@pytest.mark.thorough
def test_generated():
    forward, backward = generate("mlp_training_deferred", 90).sources
    plain, plain_backward = generate("mlp_training", 90).sources
    assert forward.count(".run(") == plain.count(".run(")
    gemms = [code.count("extern_kernels._scaled_mm(") for code in (plain_backward, backward)]
    assert gemms[0] - gemms[1] == 2  # gate and up are one GEMM
    assert backward.count(".run(") == plain_backward.count(".run(")  # nothing is copied
    calls = re.findall(r"defer_wgrad\.default\(\[([^]]*)\], (\w+), (\w+), (\w+), (\w+), None, .*copy=False\)", backward)
    assert [len(tickets.split(",")) for tickets, *_ in calls] == [1, 2]
    kept = {name for _, *names in calls for name in names}
    assert not kept & set(re.findall(r"= (\w+); del \w+  # reuse", backward))
