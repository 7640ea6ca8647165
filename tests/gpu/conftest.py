"""Tests that need a CUDA device with FP8 tensor cores: `pytest -m gpu`."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    capable = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not capable:
                item.add_marker(pytest.mark.skip(reason="no CUDA device with FP8 tensor cores"))
