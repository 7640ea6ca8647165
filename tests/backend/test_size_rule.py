"""The size rule against what was measured of layers alone (docs/performance.md, training at 8192 tokens), and of
models."""

from types import SimpleNamespace

import pytest
import torch

from te_inductor.passes.pre_grad.decide import size_rule
from te_inductor.runtime.parallel import Parallel

GEMMS = "fprop dgrad wgrad".split()


@pytest.fixture
def refusal(monkeypatch):
    """Of layers of one input, on a device of a given compute capability."""

    def ask(*sizes, capability=(9, 0), device="cuda", gemms=GEMMS):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(size_rule, "value", lambda _: SimpleNamespace(device=torch.device(device)))
        sites = [SimpleNamespace(sizes=size, weight=None, groups=None, gemms=lambda: gemms) for size in sizes]
        return size_rule.refusal(sites)

    return ask


@pytest.mark.parametrize(
    ("n", "k", "pays"),
    [
        (4096, 4096, True),  # 1.42 times as fast as bf16
        (2048, 2048, True),  # 1.17
        (1000, 4096, False),  # 1.03
        (50257, 768, False),  # 1.07
        (1024, 1024, False),  # 0.82
        (512, 512, False),
        (40, 4096, False),
    ],
)
def test_the_measured_layers(refusal, n, k, pays):
    reason = refusal((8192, n, k))
    assert (reason is None) == pays
    assert pays or f"M=8192, N={n}, K={k}" in str(reason)


def decoder(hidden: int, ffn: int, q: int, kv: int, vocabulary: int) -> dict[str, tuple[tuple[int, int], ...]]:
    """N and K of the layers of one input."""
    attention = {"qkv": ((q, hidden), (kv, hidden), (kv, hidden)), "o": ((hidden, q),)}
    return attention | {"gate, up": ((ffn, hidden),) * 2, "down": ((hidden, ffn),), "head": ((vocabulary, hidden),)}


def encoder(hidden: int) -> dict[str, tuple[tuple[int, int], ...]]:
    """BERT's, GPT-2's and OPT's."""
    mlp = {"up": ((4 * hidden, hidden),), "down": ((hidden, 4 * hidden),)}
    return {"qkv": ((hidden, hidden),) * 3, "o": ((hidden, hidden),), **mlp}


# Measured: 0.893 times as fast as bf16 (SmolLM-360M, delayed) and 0.992 (BERT-large, current).
SMALL = {
    "SmolLM-135M": decoder(576, 1536, 576, 192, 49152),
    "SmolLM-360M": decoder(960, 2560, 960, 320, 49152),
    "Qwen-2.5-0.5B": decoder(896, 4864, 896, 128, 151936),
    "Qwen3-0.6B": decoder(1024, 3072, 2048, 1024, 151936),
    "BERT-base": encoder(768),
    "BERT-large": encoder(1024),
    "GPT-2-large": encoder(1280),
}
LARGE = {
    "Llama-3.2-1B": decoder(2048, 8192, 2048, 512, 128256),
    "Llama-3.2-3B": decoder(3072, 8192, 3072, 1024, 128256),
    "Llama-3-8B": decoder(4096, 14336, 4096, 1024, 128256),
    "Gemma-2-2B": decoder(2304, 9216, 2048, 1024, 256000),
    "Gemma-2-9B": decoder(3584, 14336, 4096, 2048, 256000),
    "Qwen3-4B": decoder(2560, 9728, 4096, 1024, 151936),
    "Phi-3-medium": decoder(5120, 17920, 5120, 1280, 32064),
    "OPT-6.7B": encoder(4096),
}


@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_models(refusal, name):
    """In training with 16384 tokens a call: all layers of a model, or none."""
    groups = {**SMALL, **LARGE}[name]
    refused = {group for group, sizes in groups.items() if refusal(*((16384, *size) for size in sizes)) is not None}
    assert refused == (set(groups) if name in SMALL else set())


@pytest.mark.parametrize("name", ["Llama-3-8B", "Gemma-2-9B", "Qwen3-4B", "Phi-3-medium", "OPT-6.7B"])
def test_models_of_fewer_tokens(refusal, name):
    assert not any(refusal(*((4096, *size) for size in sizes)) for sizes in LARGE[name].values())


EXPERTS = {  # N, K of the two layers, experts, rows a token
    "Mixtral-8x7B": ((28672, 4096), (4096, 14336), 8, 2),
    "Qwen3-30B-A3B": ((1536, 2048), (2048, 768), 128, 8),
    "narrow": ((1024, 512), (512, 512), 16, 4),
}
PAYS = [("Mixtral-8x7B", 16384, True), ("Mixtral-8x7B", 4096, True), ("Mixtral-8x7B", 1024, False),
        ("Qwen3-30B-A3B", 16384, True), ("Qwen3-30B-A3B", 4096, False), ("narrow", 65536, False)]  # fmt: skip


@pytest.mark.parametrize(("name", "tokens", "pays"), PAYS)
def test_experts(monkeypatch, name, tokens, pays):
    """On an H100 as whole layers of them were measured; on a CPU nothing is known, and nothing left out."""
    *layers, experts, each = EXPERTS[name]
    for device, low in (("cuda", pays), ("cpu", True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        monkeypatch.setattr(size_rule, "value", lambda _, device=device: SimpleNamespace(device=torch.device(device)))
        sites = [
            SimpleNamespace(
                sizes=(tokens * each, *sizes),
                weight=None,
                groups=object(),
                experts=experts,
                gemms=lambda: GEMMS,
            )
            for sizes in layers
        ]
        assert [size_rule.refusal([site]) is None for site in sites] == [low, low]


def test_experts_of_a_symbol_of_rows(refusal, monkeypatch):
    """Weighed by what it was first."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(size_rule, "value", lambda _: SimpleNamespace(device=torch.device("cuda")))
    for rows, pays in ((131072, True), (16384, False)):
        symbol = env.create_symbol(rows, source=ConstantSource(f"rows_{rows}"))
        m = env.create_symintnode(symbol, hint=rows)
        site = SimpleNamespace(sizes=(m, 1536, 2048), weight=None, groups=object(), experts=128, gemms=lambda: GEMMS)
        assert (size_rule.refusal([site]) is None) == pays


@pytest.mark.parametrize(("ranks", "narrow"), [(2, set()), (8, {"qkv", "o"})])
def test_tensor_parallel_layers(refusal, ranks, narrow):
    """Of Llama-3-8B with 8192 tokens a rank, by what a rank multiplies; two were measured on H200s."""
    rows = Parallel("tp", ranks, 0, 1, True, False, None, True)
    columns = Parallel("tp", ranks, 1, 2, False, True, 1, True)
    refused = set()
    for group, sizes in LARGE["Llama-3-8B"].items():
        parallel = columns if group in ("o", "down") else rows
        if refusal(*(parallel.sizes(8192 * ranks, *size) for size in sizes)) is not None:
            refused.add(group)
    assert refused == narrow


def test_inference(refusal):
    for name in ("Llama-3-8B", "Gemma-2-9B", "Qwen3-4B", "Phi-3-medium", "OPT-6.7B"):
        for sizes in LARGE[name].values():
            assert refusal(*((16384, *size) for size in sizes), gemms=["fprop"]) is None, (name, sizes)


def test_the_saving_has_to_be_well_above_the_cost(refusal):
    """`MARGIN` times: a layer that would save a little is left alone."""
    reason = str(refusal((4096, 2048, 2048)))
    assert "it would save 76 us and cost 68 us" in reason and refusal((8192, 2048, 2048)) is None


def test_layers_of_one_input_are_weighed_together(refusal):
    one, small = (4096, 4096, 4096), (4096, 1024, 4096)
    assert refusal(small) is not None and refusal(one, small, small) is None


def test_what_is_known_decides(refusal):
    assert refusal((8192, 512, 512), capability=(8, 9)) is None
    assert refusal((8192, 512, 512), device="cpu") is None
    assert refusal(("s0", 4096, 4096)) is None
    assert "M=s0, N=512, K=512, where less than 1536 is narrow" in str(refusal(("s0", 512, 512)))
