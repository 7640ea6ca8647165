"""Write the C++ that AOTInductor would generate of a lowered program for a CUDA device, on a machine without one.

Runs as a program of its own, as `generate.py` does and with its patches::

    python -m tests.offline.packages ARCH RECIPE ROWS OUT

RECIPE is a recipe's name, or `stored:` and the name of one whose weights are stored, or `experts:` and one. OUT gets
`wrapper.cpp`, and `extern.json`, the calls of the proxy executor.
"""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

from tests.offline.generate import pretend


class PackageDone(Exception):
    """Raised where the C++ would be compiled."""


def model(recipe: str, dtype: Any) -> Any:
    """Two layers behind a norm; or experts, a layer each."""
    from torch import nn

    from tests.experts import FixedExperts

    made: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    if recipe.startswith("experts:"):
        experts = FixedExperts(2048, 1024, 4)
        experts.weight = nn.Parameter(experts.weight.new_empty(experts.weight.shape, **made))
        return nn.Sequential(nn.RMSNorm(2048, **made), experts).requires_grad_(False).eval()
    up, down = nn.Linear(2048, 4096, **made), nn.Linear(4096, 2048, bias=False, **made)
    layers = [_stored(one, recipe) for one in (up, down)] if recipe.startswith("stored:") else [up, down]
    return nn.Sequential(nn.RMSNorm(2048, **made), layers[0], nn.SiLU(), layers[1]).requires_grad_(False).eval()


def _stored(layer: Any, recipe: str) -> Any:
    """The parts of its weight as buffers: export takes no fake subclass. A scale is an input of the graph, as Inductor
    reads a constant of one element."""
    from torch import nn

    from te_inductor import recipes
    from te_inductor.ops import stored
    from te_inductor.ops.stored_weight import store

    resolved: Any = recipes.resolve(recipe.removeprefix("stored:"))

    class Stored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number, part in enumerate(store(layer.weight, resolved).parts):
                self.register_buffer(f"part{number}", part)

        def forward(self, x: Any) -> Any:
            if not recipe.endswith("nvfp4_weight_only"):
                return stored.fp8_weight(x, self.part0, self.part1, layer.bias, resolved.slots().to_text(), x.dtype)
            scale = x.float().sum()
            return stored.nvfp4_weight_only(x, self.part0, self.part1, scale, layer.bias, resolved.prefill, x.dtype)

    return Stored()


def main(arch: int, recipe: str, rows: int, out: Path) -> None:
    import torch
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.codecache import AotCodeCompiler
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    def keep(graph: Any, wrapper: str, kernels: str, extern: str, **_: Any) -> None:
        for name, text in (("wrapper.cpp", wrapper), ("extern.json", extern)):
            (out / name).write_text(text or "")
        raise PackageDone

    torch.autograd.set_multithreading_enabled(False)
    patches = [
        *pretend(arch),
        mock.patch.object(AotCodeCompiler, "compile", keep),
        # What would run kernels, and what asks for their cubins.
        mock.patch.object(PythonWrapperCodegen, "generate_and_run_autotune_block", lambda self: None),
        mock.patch("torch._inductor.codegen.cpp_wrapper_gpu.DeferredTritonCallWrapper.generate", lambda *_: None),
    ]
    for patch in patches:
        patch.start()
    from te_inductor import lower

    settings: dict[str, Any] = {
        "compile_threads": 1,
        "force_disable_caches": True,
        "joint_graph_constant_folding": False,
    }
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(tracked_fakes=[]))
    with mode, config.patch(settings), torch.no_grad():
        x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
        with tracing(TracingContext(mode)):
            program = torch.export.export(model(recipe, x.dtype), (x,))
        name = "none" if recipe.startswith("stored:") else recipe.removeprefix("experts:")
        options = {"policy": {"*": name}, "fallback": "silent"}
        program = lower(program, options)
        try:
            torch._inductor.aot_compile(program.module(), (x,), options={"triton.autotune_at_compile_time": True})
        except Exception as error:
            if not isinstance(getattr(error, "inner_exception", error), PackageDone):
                raise
            return
    raise SystemExit("the package was compiled without reaching generated code")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
