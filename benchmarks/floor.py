"""What a training step cannot beat: its GEMM and attention FLOPs, and the fewest bytes of everything between them.

``python -m benchmarks.floor`` prints the sum item by item; `docs/ledger.md` quotes it.

Units: D is one activation of (tokens, dim) in bf16, KV one of (tokens, kv_dim), F one of (tokens, ffn), W the seven
weights of a layer in bf16. A row copy and a column copy in fp8 are together as large as the bf16 tensor: 1 unit.
"""

from dataclasses import dataclass

from benchmarks.llama_blocks import Shape

# Ceilings of one NVIDIA H200 (sm_90), torch 2.11.0+cu130, measured in November 2026. Cards differ by several percent.
COPY_BYTES = 4269e9  # bytes a second, read + write, of a large copy
BF16_FLOPS = 672e12  # cuBLASLt at M 16384: mean of 657, 674, 684
FP8_FLOPS = 1359e12  # cuBLASLt tensorwise over a whole step: 42.9 TFLOP in 31.6 ms
ATTENTION_FLOPS = 442e12  # SDPA causal, forward + backward: 3.85 TFLOP in 8.7 ms

BF16, FP8, CURRENT = "bf16", "fp8", "current"  # FP8: each tensor's scale is known when its producer writes it


@dataclass(frozen=True)
class Item:
    """Traffic of one fused kernel, or of what a cast adds to it, in the units of this module."""

    what: str
    since: str  # BF16: in every step; FP8: casts add it; CURRENT: the amax before the cast adds it
    D: float = 0
    KV: float = 0
    F: float = 0
    W: float = 0
    once: bool = False  # once a step, not once a layer


ITEMS = (
    Item("residual + RMSNorm, twice: read 2, write 2", BF16, D=8),
    Item("RoPE of q and k, forward and backward", BF16, D=4, KV=4),
    Item("SwiGLU: read gate, up; write act", BF16, F=3),
    Item("SwiGLU backward: read dact, gate, up; write dgate, dup", BF16, F=5),
    Item("norm backward before gate, up: read 2 dgrads, h, dh; write dh", BF16, D=5),
    Item("norm backward before q, k, v: read 3 dgrads, x, dx; write dx", BF16, D=6),
    Item("the last residual: read 2, write 1; the first norm has none: 2 less", BF16, D=1, once=True),
    Item("attention output: read, write row + column copy", FP8, D=2),
    Item("dh beside its bf16, for dgrad and wgrad of o", FP8, D=1),
    Item("dx beside its bf16, for dgrad and wgrad of the layer before's down", FP8, D=1),
    Item("dv: read, write row + column copy", FP8, KV=2),
    Item("weights: read, write row + column copy", FP8, W=2),
    Item("the last layer's down has no dx to share with: read the upstream gradient", FP8, D=1, once=True),
    Item("norm outputs: the cast reads the norm's input again, twice", CURRENT, D=2),
    Item("attention output: one more read", CURRENT, D=1),
    Item("act: the cast reads gate, up again", CURRENT, F=2),
    Item("dgate, dup: the cast reads dact, gate, up again", CURRENT, F=3),
    Item("dh and dx: the cast reads what was written", CURRENT, D=2),
    Item("dq, dk, dv: one more read", CURRENT, D=1, KV=2),
    Item("weights: one more read", CURRENT, W=1),
)  # fmt: skip

_INCLUDES = {BF16: (BF16,), FP8: (BF16, FP8), CURRENT: (BF16, FP8, CURRENT)}


def item_bytes(item: Item, shape: Shape) -> float:
    """Bytes of the item in the whole step."""
    units = item.D * shape.dim + item.KV * shape.kv_dim + item.F * shape.ffn
    return 2 * (shape.tokens * units + item.W * shape.linear_params) * (1 if item.once else shape.layers)


def gemm_flops(shape: Shape) -> float:
    """fprop, dgrad and wgrad of every linear layer."""
    return 6.0 * shape.tokens * shape.linear_params * shape.layers


def attention_flops(shape: Shape) -> float:
    """Causal: half of the square; two GEMMs forward and five backward."""
    gemm = 2 * shape.batch * shape.heads * shape.seq**2 * shape.head_dim / 2
    return 7 * gemm * shape.layers


def floor_ms(shape: Shape, kind: str) -> dict[str, float]:
    """The step's floor on the card of the constants above, in ms: GEMMs, attention, memory-bound kernels, sum."""
    gemm = 1e3 * gemm_flops(shape) / (BF16_FLOPS if kind == BF16 else FP8_FLOPS)
    attention = 1e3 * attention_flops(shape) / ATTENTION_FLOPS
    bytes_moved = sum(item_bytes(item, shape) for item in ITEMS if item.since in _INCLUDES[kind])
    memory = 1e3 * bytes_moved / COPY_BYTES
    return {"gemm": gemm, "attention": attention, "memory": memory, "total": gemm + attention + memory}


def kind_of(arm: str) -> str:
    """Tells which floor an arm is measured against: tensorwise scales of today's tensor need the amax first."""
    if arm == "bf16":
        return BF16
    return CURRENT if arm in ("te:current", "te:auto", "torchao:tensorwise") else FP8


def main() -> None:
    from benchmarks import table

    shape = Shape()
    rows = []
    for item in ITEMS:
        moved = item_bytes(item, shape)
        rows.append((item.since, item.what, f"{moved / 1e9:.2f}", f"{1e6 * moved / COPY_BYTES:.0f}"))
    table.show("fewest bytes of a step", ("added by", "kernel", "GB", "us"), rows)
    rows = []
    bf16 = floor_ms(shape, BF16)["total"]
    for kind in (BF16, FP8, CURRENT):
        floor = floor_ms(shape, kind)
        rows.append((kind, *(f"{value:.2f}" for value in floor.values()), f"{bf16 / floor['total']:.2f}"))
    table.show("floor of a step, ms", ("", "GEMM", "attention", "memory", "sum", "over bf16"), rows)


if __name__ == "__main__":
    main()
