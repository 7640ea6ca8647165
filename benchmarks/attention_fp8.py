"""Causal attention forward, in FP8 beside bf16: cuDNN's `sdpa_fp8`, and two kernels of our own, in TF/s and dB.

    python -m benchmarks.attention_fp8                            # under 90 s: 8192 and 32768 tokens
    python -m benchmarks.attention_fp8 --tokens 8192 --ways fp8:triton bf16:cudnn
    TRITON_INTERPRET=1 python -m benchmarks.attention_fp8 --device cpu --tokens 256 --ways fp8:triton --heads 2 1 --exact 2

32 heads of 128, 8 KV heads, one sequence: a prefill. q, k and v are e4m3 with one scale a head. cuDNN takes one a tensor,
and on Hopper its output is e4m3 as well, here with the best scale that there is. `casts` is the time of making them
from bf16, amax first; it is no part of the other figures. dB is the ratio of signal to error against float64 attention over
the bf16 inputs: of inputs from `randn`, and of the same with one of 1000 elements of k and v ten times as large.
`fp8:triton` is a Triton kernel of this file, timed with each of `CONFIGS`; `fp8:gluon` is attention_fp8_kernel.py, with
each of `ORDERS`. Triton's interpreter, as in the last line, rounds some e4m3 values wrongly, and loses 3 dB by it."""

import argparse
import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks import harness, table
from benchmarks.attention import only
from benchmarks.output_layer import decibels

WIDTH = 128  # of a head
E4M3, LARGEST = torch.float8_e4m3fn, 448.0
OFFSET = tl.constexpr(8.0)  # probabilities are cast as p * 2**8: e4m3 then reaches down to 2**-17
LOG2E = tl.constexpr(1.4426950408889634)
KINDS = ("randn", "outliers")
WAYS = ("bf16:cudnn", "bf16:flash", "fp8:cudnn", "fp8:triton", "fp8:gluon", "casts")


@dataclass(frozen=True)
class Config:
    """A tile of scores, and how it is launched; `promote` adds each product with v in fp32, where tensor cores would keep
    fewer bits of the sum."""

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None  # of a thread, at most
    promote: bool = False


CONFIGS = (
    Config(64, 64, 4, 2),
    Config(64, 64, 4, 3),
    Config(64, 128, 4, 2),
    Config(64, 128, 4, 2, 168),  # three of them on a multiprocessor
    Config(64, 128, 4, 3),
    Config(64, 128, 4, 3, promote=True),
    Config(64, 256, 4, 2),
    Config(128, 64, 8, 2),
    Config(128, 64, 8, 3),
    Config(128, 128, 8, 2),
    Config(128, 128, 8, 3),
)
ORDERS = ((2, False), (2, True), (3, False), (3, True), (5, True))  # stages, and whether warp groups take turns


@triton.jit
def _in_order_of_operands(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Reorders columns so that what a thread holds of a product is what the next product wants of it.

    In each 16 columns the first product leaves a thread columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9; an FP8 operand is four
    neighbours, 4 t to 4 t + 3. V's tokens are stored in the same order (`reordered`), so that the sum stays the same and
    no value moves between threads."""
    x = tl.reshape(x, (ROWS, COLUMNS // 16, 2, 4, 2))
    return tl.reshape(tl.permute(x, (0, 1, 3, 2, 4)), (ROWS, COLUMNS))


@triton.jit
def _attend(scores, values, acc, highest, total, to_bits, PROMOTE: tl.constexpr):
    """The sum, and the maximum and the sum of probabilities of each row, with one more tile of scores and of V."""
    now = tl.maximum(highest, tl.max(scores, 1) * to_bits)
    p = tl.exp2(scores * to_bits - (now - OFFSET)[:, None])
    shrink = tl.exp2(highest - now)
    total = total * shrink + tl.sum(p, 1)
    p = _in_order_of_operands(p, scores.shape[0], scores.shape[1]).to(tl.float8e4nv)
    acc = acc * shrink[:, None]
    imprecise: tl.constexpr = scores.shape[1] if PROMOTE else None
    return tl.dot(p, values, acc, max_num_imprecise_acc=imprecise), now, total


@triton.jit
def _forward(
    q,  # descriptor of (heads * tokens, WIDTH) e4m3
    k,  # descriptor of (KV heads * tokens, WIDTH) e4m3
    v,  # descriptor of (KV heads * WIDTH, tokens) e4m3, tokens reordered
    out,  # descriptor of (heads * tokens, WIDTH) bf16
    q_scale,  # (heads,) fp32: q ~= data * scale
    k_scale,  # (KV heads,) fp32
    v_scale,  # (KV heads,) fp32
    tokens,  # a multiple of both sides of a tile
    factor,  # of scores
    GROUP: tl.constexpr,  # heads of a KV head
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PROMOTE: tl.constexpr,
):
    head = tl.program_id(0)
    kv = head // GROUP
    keys, channels = kv * tokens, kv * WIDTH
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS  # the longest rows begin
    diagonal = first // COLUMNS * COLUMNS
    queries = q.load([head * tokens + first, 0])
    to_bits = tl.load(q_scale + head) * tl.load(k_scale + kv) * factor * LOG2E
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for masked in tl.static_range(2):  # first the tiles that no mask crosses
        for start in range(diagonal if masked else 0, first + ROWS if masked else diagonal, COLUMNS):
            scores = tl.dot(queries, k.load([keys + start, 0]).T)
            if masked:
                keep = (first + tl.arange(0, ROWS))[:, None] >= (start + tl.arange(0, COLUMNS))[None, :]
                scores = tl.where(keep, scores, float("-inf"))
            values = v.load([channels, start]).T
            acc, highest, total = _attend(scores, values, acc, highest, total, to_bits, PROMOTE)
    acc = acc * (tl.load(v_scale + kv) / total)[:, None]
    out.store([head * tokens + first, 0], acc.to(tl.bfloat16))


def reordered(v: Tensor) -> Tensor:  # (…, tokens) -> the same
    """Tokens in the order in which `_in_order_of_operands` leaves the columns of probabilities."""
    return v.unflatten(-1, (-1, 2, 4, 2)).transpose(-3, -2).flatten(-4)


def cast(x: Tensor, dims: tuple[int, ...] = (-2, -1)) -> tuple[Tensor, Tensor]:  # (heads, tokens, WIDTH)
    """e4m3 data and fp32 scales: `x ~= data.float() * scale`."""
    scale = x.abs().amax(dims, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (x.float() / scale).to(E4M3), scale


def prepare(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """What `_forward` takes of (heads, tokens, WIDTH) bf16."""
    (q, q_scale), (k, k_scale), (v, v_scale) = cast(q), cast(k), cast(v)
    v = reordered(v.transpose(1, 2)).contiguous()
    return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), q_scale.flatten(), k_scale.flatten(), v_scale.flatten()


def with_triton(operands: tuple[Tensor, ...], out: Tensor, config: Config) -> Tensor:
    """Launches `_forward`; `out` is (heads, tokens, WIDTH) bf16."""
    q, k, v, *scales = operands
    heads, tokens, width = out.shape
    blocks = ([config.rows, width], [config.columns, width], [width, config.columns], [config.rows, width])
    views = (q, k, v, out.view(-1, width))
    described = [TensorDescriptor.from_tensor(one, block) for one, block in zip(views, blocks, strict=True)]
    _forward[(heads, triton.cdiv(tokens, config.rows))](
        *described, *scales, tokens, width**-0.5, heads * tokens // len(k), width, config.rows, config.columns,
        config.promote, num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers,
    )  # fmt: skip
    return out


def cudnn_graph(q: Tensor, k: Tensor, v: Tensor, scale_o: float) -> Callable[[], Tensor]:
    """Builds cuDNN's FP8 attention of one sequence, laid out as a model's projections leave it. The call returns
    `scale_o` times the output, in e4m3."""
    import cudnn

    types = cudnn.data_type
    width = q.shape[-1]
    graph = cudnn.pygraph(
        io_data_type=types.FP8_E4M3, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT,
        handle=_cudnn_handle(),
    )  # fmt: skip
    data = [cast(x, (-3, -2, -1)) for x in (q, k, v)]
    inputs = [x.transpose(0, 1).contiguous().transpose(0, 1)[None] for x, _ in data]
    numbers = [*(scale.item() for _, scale in data), 1 / 256, 256.0, scale_o]
    scalars = [torch.full((1, 1, 1, 1), number, device=q.device) for number in numbers]
    named = [_cudnn_tensor(graph, x, types.FP8_E4M3) for x in inputs]
    named += [_cudnn_tensor(graph, x, types.FLOAT) for x in scalars]
    o, _, *amaxes = graph.sdpa_fp8(
        *named, attn_scale=width**-0.5, generate_stats=False, right_bound=0,
        diagonal_alignment=cudnn.diagonal_alignment.TOP_LEFT,
    )  # fmt: skip
    out = torch.empty_like(inputs[0])
    found = [torch.empty_like(scalars[0]) for _ in amaxes]
    o.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride())).set_data_type(types.FP8_E4M3)
    for amax in amaxes:
        amax.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(types.FLOAT)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(max(graph.get_workspace_size(), 1), device=q.device, dtype=torch.uint8)
    pack = dict(zip([*named, o, *amaxes], [*inputs, *scalars, out, *found], strict=True))

    def run() -> Tensor:
        graph.execute(pack, workspace, handle=_cudnn_handle())
        return out[0]

    return run


@functools.cache
def _cudnn_handle() -> Any:
    import cudnn

    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    return handle


def _cudnn_tensor(graph: Any, x: Tensor, kind: Any) -> Any:
    return graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=kind)


def inputs(kind: str, tokens: int, args: argparse.Namespace) -> list[Tensor]:
    """q, k and v, (heads, tokens, WIDTH) bf16."""
    torch.manual_seed(0)
    made = [torch.randn(heads, tokens, WIDTH, device=args.device) for heads in (args.heads[0], *[args.heads[1]] * 2)]
    if kind == "outliers":
        for x in made[1:]:
            x[torch.rand_like(x) < 1e-3] *= 10
    return [x.bfloat16() for x in made]


def exact(q: Tensor, k: Tensor, v: Tensor, heads: list[int], rows: int = 2048) -> Tensor:
    """Causal attention of some heads in float64, (heads, tokens, WIDTH)."""
    group, outs = len(q) // len(k), []
    for head in heads:
        keys, values = k[head // group].double(), v[head // group].double()
        for first in range(0, q.shape[1], rows):
            scores = q[head, first : first + rows].double() @ keys[: first + rows].t() * WIDTH**-0.5
            later = torch.ones_like(scores, dtype=torch.bool).triu(first + 1)
            outs.append(scores.masked_fill_(later, float("-inf")).softmax(-1) @ values[: first + rows])
    return torch.cat(outs).view(len(heads), -1, WIDTH)


def calls(way: str, given: list[Tensor], amax: float) -> dict[str, tuple[Callable[[], Tensor], float]]:
    """What is timed, by its name: the call, and what its output is multiplied by. `amax` is the output's."""
    q, k, v = given
    kind, _, by = way.partition(":")
    if kind == "casts":
        compiled = torch.compile(prepare)
        return {"": (lambda: compiled(q, k, v)[0], 1.0)}
    if kind == "bf16":
        return {"": (lambda: sdpa(given, by), 1.0)}
    if by == "cudnn":
        return {"": (cudnn_graph(q, k, v, LARGEST / amax), amax / LARGEST)}
    operands, out = prepare(q, k, v), torch.empty_like(q)
    if by == "gluon":
        from benchmarks.attention_fp8_kernel import launch

        return {
            f"stages={stages}, turns={turns}": (functools.partial(launch, operands, out, stages, turns), 1.0)
            for stages, turns in ORDERS
        }
    return {str(config): (functools.partial(with_triton, operands, out, config), 1.0) for config in CONFIGS}


def sdpa(given: list[Tensor], backend: str) -> Tensor:
    q, k, v = (x[None] for x in given)
    with only(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]


def measure(tokens: int, kind: str, best: dict[str, str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a way, or one a configuration; `best` names a way's fastest where the first kind of inputs told it."""
    given = inputs(kind, tokens, args)
    amax = sdpa(given, "default").abs().amax().item()
    chosen = list(range(0, args.heads[0], max(args.heads[0] // args.exact, 1)))
    reference = exact(*given, chosen)
    rows = []
    for way in args.ways:
        row = {"tokens": tokens, "inputs": kind, "way": way}
        try:
            found = calls(way, given, amax)
        except Exception as error:  # not here, or refused: the other ways are still worth having
            rows.append({**row, "skipped": f"{type(error).__name__}: {error}".splitlines()[0]})
            continue
        for name, (call, scale) in found.items():
            if best.get(way, name) != name:
                continue
            one = {**row, "config": name}
            try:
                if way != "casts":
                    one["db"] = decibels(call()[chosen].float() * scale, reference)
                one["ms"] = statistics.median(harness.times_ms(call, args.device, args.iters, 2))
            except Exception as error:  # a tile that does not fit, say
                one["skipped"] = f"{type(error).__name__}: {error}".splitlines()[0]
            rows.append(one)
        fitting = [one for one in rows if one["way"] == way and "ms" in one]
        if fitting:
            best.setdefault(way, min(fitting, key=lambda one: one["ms"])["config"])
    return rows


def main() -> None:
    parser = harness.arguments(__doc__, "attention_fp8", device="cuda", iters=10)
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--heads", nargs=2, type=int, default=[32, 8], help="heads and KV heads")
    parser.add_argument("--exact", type=int, default=4, help="heads that are compared with float64")
    args = parser.parse_args()
    environment, rows = harness.environment(args.device), []
    for tokens in args.tokens:
        best: dict[str, str] = {}
        for kind in KINDS:
            rows += measure(tokens, kind, best, args)
            harness.write_json(args.json, {"environment": environment, "rows": rows})
    cells = []
    for row in rows:
        rate = None
        if "ms" in row and row["way"] != "casts":
            rate = 2e-9 * row["tokens"] ** 2 * args.heads[0] * WIDTH / row["ms"]
        numbers = (table.number(row.get("ms"), 3), table.number(rate, 0), table.number(row.get("db"), 1))
        note = row.get("skipped", row.get("config", "")).removeprefix("Config")[:110]
        cells.append((row["tokens"], row["inputs"], row["way"], *numbers, note))
    columns = ("tokens", "inputs", "way", "ms", "TF/s", "dB", "")
    table.show(f"causal attention, forward; {table.headline(environment)}", columns, cells)


if __name__ == "__main__":
    main()
