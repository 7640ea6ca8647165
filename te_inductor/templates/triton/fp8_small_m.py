"""``a @ b.T`` of FP8 operands with one scale or scales of rows, and few rows of a: as fast as b can be read.

cuBLASLt's FP8 kernels are made for many rows: with up to 64 most are no faster than bf16's, or slower, and above they
leave most of the card idle where b is narrow, as none splits K (docs/performance.md). b, the weight, is the tensor
core's left operand here, so that its N fills the 64 rows of an instruction and a's rows the other side. Blocks of K go
to `splits` programs in turn, so that what runs at one time reads neighbouring bytes; the first ones may have one more.
`partial_sums` says who adds their sums up. The tensor core keeps some 14 bits of a sum
(docs/numerics.md, "The three GEMMs"), so every `PROMOTED` columns it is added to one in fp32: memory is what is waited
for. Kernels start early: Note [Kernels that start early] in lowerings/codegen/programmatic_launch.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_inductor.kernels.fp8_small_m import SmallMConfig
from te_inductor.runtime.definition import op_of
from te_inductor.templates.triton.launcher import launcher
from te_inductor.templates.triton.partial_sums import sum_dtype

PROMOTED = tl.constexpr(128)


def partial_sums(
    a: Tensor,  # (M, K) e4m3
    a_scale: Tensor,  # (), or (M, 1), fp32
    b: Tensor,  # (N, K) e4m3
    b_scale: Tensor,  # (), or (N, 1)
    config: SmallMConfig,
    out_dtype: torch.dtype,  # of the result, where there is one split
    assembly: bool = True,
) -> Tensor:  # (splits, M, N), fp32 if there are several
    """Returns parts, whose sum over the first dimension is ``(a @ b.T) * a_scale * b_scale.T``."""
    (m, k), n = a.shape, b.shape[0]
    out = a.new_empty((config.splits, m, n), dtype=sum_dtype(config.splits, out_dtype))
    run = launcher(
        _partial_sums,
        K=k,
        OF_ROWS=(a_scale.ndim > 0, b_scale.ndim > 0),
        ROWS=config.rows,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLITS=config.splits,
        STAGES=config.stages,
        ASSEMBLY=assembly,
        num_warps=config.warps,
        launch_pdl=assembly,
    )
    run(config.splits * triton.cdiv(m, config.rows) * triton.cdiv(n, config.block_n), a, a_scale, b, b_scale, out, m, n)
    return out


fp8_partial_sums = op_of(
    partial_sums,
    lambda a, a_scale, b, b_scale, config, out_dtype, assembly=True: a.new_empty(
        (config.splits, a.shape[0], b.shape[0]), dtype=sum_dtype(config.splits, out_dtype)
    ),
    name="fp8_partial_sums",
)


@triton.jit
def _partial_sums(
    a,  # (M, K)
    a_scale,  # (M,), or one
    b,  # (N, K)
    b_scale,  # (N,), or one
    out,  # (SPLITS, M, N)
    M,
    N,
    K: tl.constexpr,
    OF_ROWS: tl.constexpr,  # whether a has scales of rows, whether b has
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    ASSEMBLY: tl.constexpr,  # False: for the interpreter
):
    # Neighbouring programs read the same part of b for other rows of a, so that memory is read once.
    tiles = tl.cdiv(M, ROWS)
    part = tl.program_id(0) // tiles % SPLITS
    m = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) // (tiles * SPLITS) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = part * BLOCK_K + tl.arange(0, BLOCK_K)
    of_a = a + m.to(tl.int64)[:, None] * K + column[None, :]
    of_b = b + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + column[None, :]
    inside = m[:, None] < M
    if ASSEMBLY:
        tl.extra.cuda.gdc_wait()
    y = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    turns = K // BLOCK_K // SPLITS
    if K // BLOCK_K % SPLITS > 0:
        turns += (part < K // BLOCK_K % SPLITS).to(tl.int32)
    for _ in tl.range(0, turns, num_stages=STAGES):
        weights = tl.load(of_b, eviction_policy="evict_first")
        x = tl.load(of_a, mask=inside, other=0.0)
        y = tl.dot(weights, tl.trans(x), y, max_num_imprecise_acc=PROMOTED)
        of_a += SPLITS * BLOCK_K
        of_b += SPLITS * BLOCK_K
    if ASSEMBLY:
        tl.extra.cuda.gdc_launch_dependents()
    y *= tl.load(a_scale + m * OF_ROWS[0], mask=m < M)[None, :]
    y *= tl.load(b_scale + n * OF_ROWS[1], mask=n < N)[:, None]
    place = out + (part * M + m[None, :]).to(tl.int64) * N + n[:, None]
    tl.store(place, y.to(out.dtype.element_ty), mask=(m[None, :] < M) & (n[:, None] < N))
