"""Some of these tests compile with Inductor alone, whose cache key does not see our lowerings: a pass that does nothing
brings the digest of the package's sources, as the backend's own passes do."""

import pytest


@pytest.fixture(autouse=True)
def sources_in_the_key():
    from torch._inductor import config

    from te_inductor.passes.graph.custom_pass import GraphPass

    with config.patch(post_grad_custom_pre_pass=GraphPass(None, ())):
        yield


@pytest.fixture
def known_seeds(monkeypatch):
    """Random bits that the oracle can have too: a row copy is made before its column copy."""
    import itertools

    import torch

    from tests.support.oracle_layers import SEEDS

    made = itertools.cycle(SEEDS)
    monkeypatch.setattr(
        "te_inductor.ops.casts.new_seed", lambda device: torch.full((), next(made), dtype=torch.int64, device=device)
    )
