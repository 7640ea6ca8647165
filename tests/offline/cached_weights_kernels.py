"""Runs the kernels of cached weights in Triton's interpreter and compares, with TRITON_INTERPRET=1:
python -m tests.offline.cached_weights_kernels."""

import itertools
import math
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from te_inductor.ops import stored_again
from te_inductor.ops.stored_experts import NVFP4Experts
from te_inductor.ops.stored_weight import NVFP4Weight, StoredWeight
from te_inductor.recipes import DelayedScaling, NVFP4WeightOnly, Quantizer
from te_inductor.runtime.weights import cached_weights
from te_inductor.runtime.weights.cached_weights import CachedWeight, FreshnessCheck, Spec, is_tiled, new
from te_inductor.templates.triton import cached_weights as kernels
from tests.offline.interpret import mend_interpreter

QUANTIZERS = [
    Quantizer("e4m3"),
    Quantizer("e5m2", amax_epsilon=2.0, power_2_scale=True),
    Quantizer("e4m3", scope="row"),
    Quantizer("e4m3", scope="128x128", power_2_scale=True),
    Quantizer("e4m3", scope="1x32"),
    Quantizer("e5m2", scope="32x32"),
    Quantizer("e2m1", scope="1x32"),
    Quantizer("e2m1", scope="32x32"),
    Quantizer("e2m1", scope="1x16"),
    Quantizer("e2m1", scope="16x16"),
]


def made(spec: Spec, weights: list[Tensor], columns: bool) -> CachedWeight:
    kept = new(spec, weights)
    if columns:
        kept.want_columns()
    return kept


def same(kept: CachedWeight, expected: CachedWeight) -> bool:
    """Bit for bit, but for which NaN a value or an amax is."""
    return all(
        torch.equal(one_nan(a).reshape(-1).view(torch.uint8), one_nan(b).reshape(-1).view(torch.uint8))
        for a, b in zip([*kept.tensors, kept.digests], [*expected.tensors, expected.digests], strict=True)
    )


def one_nan(x: Tensor) -> Tensor:
    return torch.where(x.float().isnan(), math.nan, x.float()).to(x.dtype) if x.is_floating_point() else x


def check(quantizer: Quantizer, dtype: torch.dtype, known: bool = False) -> None:
    """Weights of one table: several sizes, both orientations, with and without column copies, one of two parameters,
    one at an odd address; where `known`, with given scales and amaxes to be raised."""
    shapes = [[(48, 80)], [(30, 136)], [(200, 8)], [(20, 300)], [(16, 131)]]
    scope = quantizer.granularity
    if not scope.microscaled:  # of those, no parameters are one weight
        shapes.append([(128, 136), (256, 136)] if scope.blocked else [(32, 24), (16, 24)])
    weights = [[torch.randn(shape).to(dtype) * 4.0**i for shape in group] for i, group in enumerate(shapes)]
    weights[0][0][3, 5], weights[1][0][0, 0] = math.nan, -math.inf
    weights[0][0][40, 5] = math.nan  # in a block that ends in the padding
    weights[2][0][:] = 0.0
    weights[4][0] = torch.randn(16 * 131 + 1).to(dtype)[1:].view(16, 131)
    recipe = DelayedScaling() if known else None
    specs = [Spec(quantizer, len(group) == 1 and i % 2 == 1, len(group), recipe) for i, group in enumerate(weights)]
    kept, expected = (
        [made(spec, group, i != 2) for i, (spec, group) in enumerate(zip(specs, weights, strict=True))]
        for _ in range(2)
    )
    scales = [torch.tensor(2.0**i) for i in range(len(weights))]
    amaxes, others = ([torch.tensor(float(i)) for i in range(len(weights))] for _ in range(2))
    device = kernels.OnDevice()

    def looks(kept: list[CachedWeight], amaxes: list[Tensor]) -> list[FreshnessCheck]:
        if not known:
            return list(map(FreshnessCheck, kept, weights))
        return list(map(FreshnessCheck, kept, weights, scales, [*amaxes[:-1], None]))

    def agree() -> None:
        device.run(looks(kept, amaxes))
        cached_weights.refresh(looks(expected, others))
        assert torch.equal(torch.stack(amaxes).nan_to_num(-1.0), torch.stack(others).nan_to_num(-1.0))
        for one, other, group in zip(kept, expected, weights, strict=True):
            assert same(one, other), (quantizer, dtype, [w.shape for w in group])

    agree()
    for one in kept[:2]:  # a mark that a second look must leave alone
        one.data.view(torch.uint8)[0, 0] ^= 16  # of a NaN too another value
    device.run(looks(kept, amaxes))
    assert not any(same(*pair) for pair in zip(kept[:2], expected[:2], strict=True))
    weights[0][0].data.view(torch.int16)[7, 3] ^= 1  # the smallest change there is
    weights[1][0].data.neg_()
    weights[-1][-1] = weights[-1][-1].clone()  # elsewhere
    weights[-1][-1][-1, -1] *= 2
    agree()
    scales[0].mul_(2)
    agree()
    if is_tiled(specs[3]):  # of 300 columns, or rows: the tile that has changed is made, and no other
        for one in (kept[3], expected[3]):
            one.data.view(torch.uint8)[0, 0] ^= 1
        weights[3][0][5, 270] += 1
        device.run(looks(kept, amaxes))
        cached_weights.refresh(looks(expected, others))
        expected[3].data.view(torch.uint8)[0, 0] ^= 1
        assert same(kept[3], expected[3])


def check_experts(quantizer: Quantizer, dtype: torch.dtype, known: bool = False) -> None:
    """Experts beside a linear layer: each has its own scales and marks, and none is cast but those that have
    changed."""
    weights = [[torch.randn(3, 40, 72).to(dtype)], [torch.randn(2, 24, 48).to(dtype)], [torch.randn(24, 48).to(dtype)]]
    if quantizer.granularity.whole or (quantizer.granularity.blocked and not quantizer.granularity.microscaled):
        weights.append([torch.randn(2, 128, 40).to(dtype), torch.randn(2, 72, 40).to(dtype)])  # two are one weight
    weights[0][0][1, 3, 5], weights[0][0][2] = math.nan, 0.0
    recipe = DelayedScaling() if known else None
    specs = [Spec(quantizer, place == 1, len(group), recipe) for place, group in enumerate(weights)]
    kept, expected = ([made(*pair, columns=True) for pair in zip(specs, weights, strict=True)] for _ in range(2))
    scales, amaxes = ([torch.tensor(value) for _ in weights] for value in (4.0, 0.0))
    others, device = [amax.clone() for amax in amaxes], kernels.OnDevice()

    def look(refresh: Callable[[list[FreshnessCheck]], None], kept: list[CachedWeight], found: list[Tensor]) -> None:
        refresh(list(map(FreshnessCheck, kept, weights, *((scales, found) if known else ()))))

    def agree() -> None:
        look(device.run, kept, amaxes)
        look(cached_weights.refresh, expected, others)
        assert torch.equal(torch.stack(amaxes).nan_to_num(-1.0), torch.stack(others).nan_to_num(-1.0))
        for pair in zip(kept, expected, strict=True):
            assert same(*pair), (quantizer, dtype, pair[0].sizes)

    agree()
    assert kept[0].data.shape[0] == kept[0].scale_inv.shape[0] == kept[0].digests.shape[0] == 3
    for one in (*kept, *expected):  # what no look may make anew
        one.data.view(torch.uint8)[0, 0] ^= 16
    weights[0][0][2, 1, 1] = 8.0
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    weights[-1][-1].data.view(-1).view(bits)[-1] ^= 1  # the smallest change there is
    agree()


def check_stored(dtype: torch.dtype) -> None:
    """Weights that are stored in NVFP4 and written again: some share an amax, some are experts', one is cast by plain
    torch; all have the bits that they would have alone."""
    recipe = NVFP4WeightOnly()
    shared = [torch.randn(n, 64).to(dtype) * 4.0**i for i, n in enumerate((40, 24, 24))]
    alone = [torch.randn(shape).to(dtype) for shape in ((130, 288), (16, 48), (8, 33))]
    experts = torch.randn(3, 24, 32).to(dtype) * torch.tensor([1.0, 9.0, 0.0]).view(3, 1, 1).to(dtype)

    def stored() -> list[StoredWeight]:
        amax = NVFP4Weight.shared(shared)
        return [
            *(NVFP4Weight.store(weight, recipe, *amax) for weight in shared),
            *(NVFP4Weight.store(weight, recipe) for weight in alone),
            NVFP4Experts.store(experts, recipe),
        ]

    found, rewriter = stored(), stored_again.Rewriter("error")
    weights = [*shared, *alone, experts]
    together = [shared] * 3 + [[weight] for weight in weights[3:]]
    for _ in range(2):
        for weight in weights:
            weight.mul_(-1.5)
        rewriter(zip(found, weights, together, strict=True))
        for one, other in zip(found, stored(), strict=True):
            for mine, theirs in zip(one.parts, other.parts, strict=True):
                assert torch.equal(mine.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8)), one.shape


def check_all_stored() -> None:
    with mock.patch.object(stored_again, "casts", lambda _: kernels.OnDevice().cast):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            check_stored(dtype)


if __name__ == "__main__":
    mend_interpreter()
    torch.manual_seed(0)
    check_all_stored()
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for quantizer, dtype in zip([QUANTIZERS[0]] * 2 + QUANTIZERS, itertools.cycle(dtypes)):
        check(quantizer, dtype)
    check(QUANTIZERS[1], torch.float16, known=True)
    for quantizer, dtype in zip([q for q in QUANTIZERS if not q.granularity.two_level], itertools.cycle(dtypes)):
        check_experts(quantizer, dtype)
    check_experts(QUANTIZERS[0], torch.float32, known=True)
    check(QUANTIZERS[0], torch.bfloat16, known=True)
