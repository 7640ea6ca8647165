"""Kernels run where their tensors are: on cuda:1 while cuda:0 is current (marked `gpu2`), and on streams of their own.

What one device computes while it is current is what it has to compute otherwise, bit for bit.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn

import te_inductor
from te_inductor.kernels import cutlass_packages as cutlass
from te_inductor.kernels import fp8_small_m as small_m
from te_inductor.numerics import nvfp4
from te_inductor.ops import stored as ops_stored
from te_inductor.recipes import Float8RowwiseScaling, Gemm

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not hopper, reason="kernels of compute capability 9.0")
Build = Callable[[str], tuple[Callable[..., Tensor], tuple[Tensor, ...]]]


def on(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The same numbers on each device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def stored(device: str, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    codes, block_scale, tensor_scale = nvfp4.quantize(on("cpu", n, k, dtype=torch.float32))
    return tuple(part.to(device) for part in (nvfp4.store(codes), block_scale, tensor_scale))  # type: ignore[return-value]


def nvfp4_rows(m: int, k: int = 1024) -> Build:
    def build(device):
        from te_inductor.templates.triton import stored_ops  # noqa: F401

        run = lambda x, *weight: ops_stored.nvfp4_linear(x, *weight, torch.bfloat16)  # noqa: E731
        return run, (on(device, m, k), *stored(device, 512, k))

    return build


def nvfp4_prompt(m: int) -> Build:
    def build(device):
        from te_inductor.templates.triton import stored_ops  # noqa: F401

        x, scale = on(device, m, 1024).to(torch.float8_e4m3fn), torch.ones(m, 1, device=device)
        run = lambda x, *given: ops_stored.nvfp4_linear_fp8(x, *given, torch.bfloat16)  # noqa: E731
        return run, (x, scale, *stored(device, 512, 1024))

    return build


def nvfp4_written_out(device):
    from te_inductor.templates.triton import stored_ops  # noqa: F401

    return lambda *weight: ops_stored.nvfp4_dequantize(*weight, 1024, torch.bfloat16), stored(device, 512, 1024)


def nvfp4_recast(device):
    from te_inductor.templates.triton import stored_ops  # noqa: F401

    return lambda *weight: ops_stored.nvfp4_recast(*weight)[0].float(), stored(device, 512, 1024)


def fp8_rows(device):
    from te_inductor.templates.triton.fp8_small_m import fp8_partial_sums
    from te_inductor.templates.triton.partial_sums import add_up

    config = small_m.cut(16, 512, 1024)

    def run(a, a_scale, b, b_scale):
        return add_up(fp8_partial_sums(a, a_scale, b, b_scale, config, torch.bfloat16), torch.bfloat16)

    a, b = (on(device, rows, 1024).to(small_m.DTYPE) for rows in (16, 512))
    return run, (a, torch.ones(16, 1, device=device), b, torch.ones(512, 1, device=device))


def attention(device):
    from te_inductor.templates.triton import decode_attention

    q, k, v = on(device, 2, 4, 1, 64), on(device, 2, 2, 300, 64), on(device, 2, 2, 300, 64)
    return lambda *given: decode_attention.attention(*given, None, 0.125), (q, k, v)


def scaled_mm(device):
    def run(x, w):
        (a, a_scale), (b, b_scale) = (
            te_inductor.ops.quantize(x, rowwise.input),
            te_inductor.ops.quantize(w, rowwise.weight),
        )
        return te_inductor.ops.scaled_mm(a, a_scale, b, b_scale, None, rowwise.fprop, torch.bfloat16)

    rowwise = Float8RowwiseScaling().slots()
    return run, (on(device, 256, 1024), on(device, 512, 1024))


def cutlass_mm(device):
    from te_inductor.kernels import cutlass_tiles as template
    from te_inductor.templates.cutlass import launch

    tile = template.FAST_TILES[0]
    one = torch.ones((), device=device)
    a, b = (on(device, rows, 1024).to(torch.float8_e4m3fn) for rows in (512, 768))

    def run(a, b):
        out = torch.empty(512, 768, device=device, dtype=torch.bfloat16)
        return launch.scaled_mm(
            a, b.t(), one, one, tile=tile.shape, arch="90", scope="tensor", fast_accum=True, out=out
        )

    return run, (a, b)


def cutlass_total(device):
    from te_inductor.kernels import cutlass_tiles as template
    from te_inductor.templates.cutlass import launch

    tile, gemm = template.FAST_TILES[0], Gemm("wgrad", fast_accum=True)
    one = torch.ones((), device=device)
    a, b = (on(device, rows, 1024).to(torch.float8_e4m3fn) for rows in (512, 768))

    def run(a, b):
        total = torch.zeros(512, 768, device=device)
        launch.add_scaled_mm(total, a, one, b, one, gemm, tile, "90")
        return total

    return run, (a, b)


def compiled(
    rows: int, recipe: str | None = None, store: str | None = None, training: bool = False, **options
) -> Build:
    """A model, and what its output and gradients are."""

    def build(device):
        torch.manual_seed(2)
        torch._dynamo.reset()
        layers = nn.Linear(512, 1024), nn.SiLU(), nn.Linear(1024, 512, bias=False)
        model = nn.Sequential(*layers).to(device, torch.bfloat16)
        if store is not None:
            te_inductor.quantize_(model.requires_grad_(False), store)
        chosen = {} if recipe is None else {"policy": {"*": recipe}}
        run = torch.compile(model, backend="te", options={"fallback": "error", **chosen, **options})

        def call(x):
            if not training:
                with torch.no_grad():
                    return run(x).clone()
            x = x.detach().requires_grad_()
            model.zero_grad()
            run(x).float().square().sum().backward()
            return torch.cat([x.grad.flatten(), *(p.grad.flatten() for p in model.parameters())])

        return call, (on(device, rows, 512),)

    return build


FAMILIES: dict[str, Build] = {
    "nvfp4, 1 row": nvfp4_rows(1),
    "nvfp4, 16 rows": nvfp4_rows(16),
    "nvfp4, plain": nvfp4_rows(16, 1088),
    "nvfp4, prompt": nvfp4_prompt(200),
    "nvfp4, long prompt": nvfp4_prompt(600),
    "nvfp4, written out": nvfp4_written_out,
    "nvfp4, recast": nvfp4_recast,
    "fp8, few rows": fp8_rows,
    "attention": attention,
    "scaled_mm": scaled_mm,
    "compiled nvfp4, 4 rows": compiled(4, store="nvfp4_weight_only"),
    "compiled nvfp4, 300 rows": compiled(300, store="nvfp4_weight_only"),
    "compiled fp8, 4 rows": compiled(4, store="rowwise"),
    "compiled nvfp4, CUDA graphs": compiled(4, store="nvfp4_weight_only", mode="reduce-overhead"),
    **{
        f"training, {recipe}": compiled(256, recipe, training=True)
        for recipe in ("current", "rowwise", "delayed", "block")
    },
    "training, kept": compiled(256, "current", training=True, weights="once"),
    "training, kept rows": compiled(256, "rowwise", training=True, weights="once"),
}
CUTLASS: dict[str, Build] = {"cutlass": cutlass_mm, "cutlass, total": cutlass_total}
every_family = pytest.mark.parametrize("family", [*FAMILIES, *CUTLASS])


def builder(family: str) -> Build:
    if family in CUTLASS and (not hopper or cutlass.missing() is not None):
        pytest.skip("te-inductor[cutlass] is not installed, or no compute capability 9.0")
    return CUTLASS.get(family) or FAMILIES[family]


def results(family: str, device: str, current: AbstractContextManager[object]) -> list[Tensor]:
    """The results of two calls, both made while `current` holds."""
    run, inputs = builder(family)(device)
    torch.cuda.synchronize(device)
    with current:
        found = [run(*inputs).detach().clone() for _ in range(2)]
    torch.cuda.synchronize(device)
    return [one.cpu() for one in found]


@needs_hopper
@pytest.mark.gpu2
@every_family
def test_another_device_is_current(family):
    expected = results(family, "cuda:1", torch.cuda.device(1))
    found = results(family, "cuda:1", torch.cuda.device(0))
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert all(one.float().abs().sum() > 0 for one in found)


@needs_hopper
@pytest.mark.gpu2
@every_family
def test_both_devices_in_turn(family):
    """A kernel loaded for one device runs on the other."""
    first, second = (builder(family)(device) for device in ("cuda:0", "cuda:1"))
    for _ in range(2):
        on_first, on_second = (run(*inputs).detach().cpu() for run, inputs in (first, second))
        assert torch.equal(on_first, on_second)


@needs_hopper
@pytest.mark.gpu2
def test_a_side_stream_of_another_device():
    run, inputs = nvfp4_rows(16)("cuda:1")
    expected = run(*inputs)
    stream = torch.cuda.Stream("cuda:1")
    stream.wait_stream(torch.cuda.current_stream(1))
    with torch.cuda.stream(stream):
        found = run(*inputs)
    torch.cuda.current_stream(1).wait_stream(stream)
    assert torch.equal(found, expected)


@needs_hopper
@every_family
def test_a_side_stream(family):
    """Work goes to the current stream: what it waits for is seen."""
    if "CUDA graphs" in family:
        pytest.skip("a recording has streams of its own")
    run, inputs = builder(family)("cuda")
    expected = run(*inputs).detach().clone()
    given = [x.clone() for x in inputs]
    for x in given:
        x.view(torch.uint8).zero_() if x.dim() else x.zero_()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), torch.no_grad():
        torch.cuda._sleep(20_000_000)  # some 10 ms: a kernel of another stream would be through, with zeros
        for x, right in zip(given, inputs, strict=True):
            x.copy_(right)
        with torch.enable_grad():
            found = run(*given)
    stream.synchronize()
    if family == "training, delayed":  # another step has another scale
        assert (found.float() - expected.float()).norm() <= 0.2 * expected.float().norm()
    else:
        assert torch.equal(found.detach(), expected)
