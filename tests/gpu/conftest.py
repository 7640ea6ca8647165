"""Tests that need a CUDA device with FP8 tensor cores: `pytest -m gpu`; those that need two: `pytest -m gpu2`."""

from pathlib import Path

import pytest
import torch

from te_inductor.kernels import cutlass_tables as tables


@pytest.fixture(autouse=True)
def one_table_for_all_devices(monkeypatch):
    """The H200's, so that CUTLASS's kernels run on each Hopper, whether they are faster there or not; also at shapes that
    lie between measured ones."""
    of = tables.of
    monkeypatch.setattr(tables, "of", lambda device: of("NVIDIA H200"))
    monkeypatch.setattr(tables, "SAME", tables.NEAR)


@pytest.fixture
def compile_every_size():
    """Lifts the recompile limit, past which Dynamo would run the function eagerly, and nothing compiled would be
    tested."""
    with torch._dynamo.config.patch(recompile_limit=1000, fail_on_recompile_limit_hit=True):
        yield


@pytest.fixture
def many_graphs():
    """Prompts of few rows and of many, one row and several, of each batch: more than torch's limit."""
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    capable = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    for item in items:
        if here not in item.path.parents:
            continue
        two = item.get_closest_marker("gpu2") is not None
        if not two:
            item.add_marker(pytest.mark.gpu)
        if not capable:
            item.add_marker(pytest.mark.skip(reason="no CUDA device with FP8 tensor cores"))
        elif two and torch.cuda.device_count() < 2:
            item.add_marker(pytest.mark.skip(reason="one CUDA device, the test needs two"))
