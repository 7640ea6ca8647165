"""FP8 between two GPUs, over NCCL (`gpu2`): weights that a graph gathers, rows of experts."""

import pytest

from tests.ranks import ranks_on_gpus

EXPECTED = {
    "graph_fsdp": ["the graph gathers its weight in e4m3"] * 2,
    "experts": ["rows between ranks go in e4m3 to the experts", "gradients between ranks go in e5m2 to the experts"],
}


@pytest.mark.gpu2
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("kind", EXPECTED)
def test_training_is_as_exact_as_with_bf16_between_ranks(kind, recipe):
    case = f"trains {kind} {recipe}"
    for told in ranks_on_gpus("tests.gpu.wire_ranks", 2, case, timeout=500)[case]:
        assert told["wires"] == EXPECTED[kind]
        for error, alone in zip(told["error"], told["error in bf16"], strict=True):
            assert error < 1.5 * alone + 2**-8
