"""The code that adds weight gradients to main_grad: fp32 out of the GEMM, and one kernel a parameter that adds in place."""

import re

from tests.offline.harness import generate


def test_generated():
    forward, backward = generate("mlp_training_main_grad", 90).sources
    plain, plain_backward = generate("mlp_training", 90).sources
    assert forward.count(".run(") == plain.count(".run(")
    assert backward.count("out_dtype=torch.float32") == 2  # gate and up are one GEMM
    added = re.findall(r"\.run\((?=[^)]*\b(primals_\d+)\b[^)]*\b\1, \d)[^)]*58720256, stream", backward)
    assert len(added) == len(set(added)) == 3 == backward.count(".run(") - plain_backward.count(".run(")
