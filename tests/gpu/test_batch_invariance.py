"""Log-probabilities of training, prefill and decoding, bit for bit: options={"batch_invariant": True}."""

import pytest
import torch

from te_inductor.kernels.fixed_order import TILES, config_of
from te_inductor.runtime.eager import fixed_order as eager
from te_inductor.targets import sm90
from tests.support.invariant_models import Decoder, generated

pytestmark = pytest.mark.gpu
PROMPT, LENGTH, KEYS = 512, 528, 640
SHAPES = {  # words, width, hidden, heads, KV heads, layers, whether it is Qwen3's
    "llama": (4096, 1024, 2816, 8, 2, 2, False),
    "qwen3": (4096, 2048, 6144, 16, 8, 1, True),
}
EXACT = {"batch_invariant": True, "fallback": "error"}


def equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("recipe", ["rowwise", "block", "none"])
@pytest.mark.parametrize("shape", SHAPES)
def test_log_probabilities_are_those_of_training(shape, recipe):
    torch.manual_seed(0)
    *sizes, qwen = SHAPES[shape]
    model = Decoder(*sizes, qwen=qwen).cuda().bfloat16()
    with torch._dynamo.config.patch(recompile_limit=64):
        run = torch.compile(model, backend="te", fullgraph=True, dynamic=False, options={"recipe": recipe, **EXACT})
        ids, every = torch.randint(0, sizes[0], (64, LENGTH), device="cuda"), torch.arange(LENGTH, device="cuda")
        trained = torch.cat([run(some, every).detach() for some in ids.split(8)])
        with torch.no_grad():
            assert equal(run(ids[:8], every), trained[:8])
            assert equal(run(ids[:1], every), trained[:1])
            for batch in (1, 3, 16, 64):
                assert equal(generated(run, model, ids[:batch], PROMPT, KEYS), trained[:batch]), batch


@pytest.mark.parametrize("scales", ["none", "rows", "blocks"])
def test_a_row_is_the_same_beside_any_others(scales):
    """The kernel alone: numbers of rows, a row at other places of a tile, and all tiles."""
    from te_inductor.templates.triton import fixed_order

    torch.manual_seed(0)
    n, k = 1536, 2048
    dtype = torch.bfloat16 if scales == "none" else torch.float8_e4m3fn
    a, b = ((torch.randn(1, rows, k, device="cuda") * 4).to(dtype) for rows in (300, n))
    given = None, None
    if scales == "rows":
        given = torch.rand(300, 1, device="cuda") + 0.5, torch.rand(n, 1, device="cuda") + 0.5
    elif scales == "blocks":
        given = torch.rand(k // 128, 300, device="cuda") + 0.5, torch.rand(k // 128, n, device="cuda") + 0.5

    def product(rows: slice, *tile: int) -> torch.Tensor:
        of_a = None if given[0] is None else given[0][:, rows] if scales == "blocks" else given[0][rows]
        blocked = scales == "blocks"
        operands = a[:, rows], b, of_a, given[1], blocked, torch.float32
        if not tile:
            return fixed_order.fixed_mm(*operands)
        return fixed_order.multiply(*operands, config_of(sm90.LIMITS, *tile, k, a.itemsize, blocked))

    whole = product(slice(None))
    on_cpu = [None if one is None else one.cpu() for one in (a, b, *given)]
    wide = eager.fixed_mm(*on_cpu, scales == "blocks", torch.float32).cuda()
    torch.testing.assert_close(whole, wide, rtol=1e-3, atol=1e-3 * wide.abs().max().item())
    for first, last in ((0, 1), (37, 38), (0, 2), (5, 21), (63, 129), (100, 164), (1, 300)):
        assert equal(product(slice(first, last)), whole[:, first:last]), (first, last)
        for tile in range(len(TILES)):
            assert equal(product(slice(first, last), tile), whole[:, first:last]), (first, last, TILES[tile])


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_training_has_gradients(mode):
    """The backward computes attention once more, by autograd, in CUDA graphs too."""
    torch.manual_seed(0)
    model = Decoder(512, 256, 512, 4, 2).cuda().bfloat16()
    options = {"recipe": "rowwise", "mode": mode, **EXACT}
    run = torch.compile(model, backend="te", fullgraph=True, options=options)
    ids = torch.randint(0, 512, (2, 64), device="cuda")
    for _ in range(4):  # a CUDA graph is recorded in the second call
        model.zero_grad()
        run(ids, torch.arange(64, device="cuda")).exp().square().sum().backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters()}
    model.zero_grad()
    model(ids, torch.arange(64, device="cuda")).exp().square().sum().backward()
    for name, one in model.named_parameters():
        error = (found[name].double() - one.grad.double()).norm() / one.grad.double().norm()
        assert error < 0.15, (name, error)  # noise of FP8 in three products behind each other
