"""Fixtures of several files of tests. Imports nothing large, as pytest-xdist's first process runs no test."""

import pytest


@pytest.fixture
def casts(monkeypatch):
    """How many weights have been cast anew."""
    from te_inductor.runtime.weights import cached_weights

    made, make = [], cached_weights._make
    monkeypatch.setattr(cached_weights, "_make", lambda *args: (made.append(args[0]), make(*args)))
    return made


@pytest.fixture
def one_rank():
    """A group of one process, and its mesh."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
