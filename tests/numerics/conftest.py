"""Some of these tests compile with Inductor alone, whose cache key does not see our lowerings: a pass that does nothing
brings the digest of the package's sources, as the backend's own passes do."""

import pytest


@pytest.fixture(autouse=True)
def sources_in_the_key():
    from torch._inductor import config

    from te_inductor.passes.graph.custom_pass import GraphPass

    with config.patch(post_grad_custom_pre_pass=GraphPass(None, ())):
        yield
