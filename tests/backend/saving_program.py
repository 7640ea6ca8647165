"""A step under option `saved`, run in processes of its own:

    python -m tests.backend.saving_program '<options as JSON>'

Prints one line of JSON: what it was told, and the hits in AOTAutograd's cache and in Inductor's."""

import json
import sys
import warnings


def main(options: str) -> None:
    import torch
    from torch import nn
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._dynamo.utils import counters

    from te_inductor.errors import FallbackError

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)).bfloat16()  # the backward spreads what it reads
    given = {"recipe": "none", "saved": "low_precision", **json.loads(options)}
    compiled = torch.compile(model, backend="te", options=given)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            compiled(torch.randn(64, 128).bfloat16()).sum().backward()
            error = ""
        except BackendCompilerFailed as failed:
            assert isinstance(failed.inner_exception, FallbackError)
            error = str(failed.inner_exception)
    told = [str(one.message) for one in said if "te_inductor" in str(one.message)]
    hits = counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"]
    print(json.dumps({"told": told, "error": error, "hits": hits}))


if __name__ == "__main__":
    main(*sys.argv[1:])
