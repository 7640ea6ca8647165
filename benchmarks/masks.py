"""Whole training steps of transformers' classes as their users call them, with labels and an attention mask: what
attention's mask costs, and what proving it gives.

    python -m benchmarks.masks                               # the table of docs/tables.md, in 480 s
    python -m benchmarks.masks --device cpu --tiny --works long   # whether it runs
    python -m benchmarks.masks --works long packed --arms bf16 te:delayed
    python -m benchmarks.masks --works mpt falcon t5 --bias-queries 512  # FlexAttention with ALiBi and T5's bias

A few layers at a published model's widths, bf16 parameters, loss, backward and fused AdamW. `bf16` is plain torch.compile
of the same program; `bf16:is_causal` what an expert writes where the mask is causal, torch's attention without a mask and
with k and v of fewer heads; `te:none` has this backend's attention and bf16 layers; `te:RECIPE` both. Each arm is compiled
alone, and timed by the median of five steps, two behind its first. All works run in the first arm, then in the second, and
so on, until no arm of which one took as long fits into `--seconds`; first steps take nearly all of the time."""

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness, table
from te_inductor.passes.pre_grad.attention import sites

ARMS = ("bf16", "te:delayed", "bf16:is_causal", "te:none")
_LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
_GEMMA = {"hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16, "num_key_value_heads": 8}
_GPT_OSS = {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8}
_BERT = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
_FALCON = {"hidden_size": 4096, "num_attention_heads": 64, "multi_query": False, "new_decoder_architecture": False}
_T5 = {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_heads": 16, "dropout_rate": 0.0}
_T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0}  # which transformers' class has no default for
# Class, widths, layers, vocabulary, batch, tokens, and what the mask is.
Work = tuple[str, dict[str, Any], int, int, int, int, str]
WORKS: dict[str, Work] = {
    "long": ("Llama", {**_LLAMA, "max_position_embeddings": 32768}, 2, 512, 1, 32768, "ones"),
    "packed": ("Llama", {**_LLAMA, "max_position_embeddings": 32768}, 2, 512, 1, 32768, "packed"),
    "vocabulary": ("Llama", _LLAMA, 4, 128256, 2, 4096, "ones"),
    "padded": ("Llama", _LLAMA, 4, 512, 2, 4096, "half"),
    "gemma-2": ("Gemma2", {**_GEMMA, "head_dim": 256, "sliding_window": 4096}, 2, 512, 1, 8192, "ones"),
    "gpt-oss": ("GptOss", {**_GPT_OSS, "head_dim": 64, "num_local_experts": 32, "pad_token_id": 0}, 2, 512, 4, 2048, "ones"),
    "bert": ("Bert", _BERT, 6, 512, 16, 512, "half"),
    "mpt": ("Mpt", {"d_model": 4096, "n_heads": 32, "max_seq_len": 4096}, 2, 512, 2, 4096, "ones"),
    "falcon": ("Falcon", {**_FALCON, "alibi": True}, 2, 512, 2, 4096, "ones"),
    "t5": ("T5", _T5, 4, 512, 4, 1024, "half"),
}  # fmt: skip
BIASED = ("mpt", "falcon", "t5")  # run where they are named
DOCUMENT = 4096  # tokens of one of the packed
_TINY = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "d_model", "d_ff", "max_seq_len"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "sliding_window"), 16),
    **dict.fromkeys(("num_attention_heads", "n_heads", "num_heads", "num_local_experts"), 4),
    "num_key_value_heads": 2,
}  # fmt: skip


def tiny(work: Work) -> Work:
    """The same on one layer of few elements."""
    name, widths, _, _, batch, _, mask = work
    return name, widths | {key: _TINY[key] for key in widths.keys() & _TINY.keys()}, 1, 128, min(batch, 2), 64, mask


def build(work: Work, device: str, attention: str | None = None) -> tuple[Any, dict[str, Tensor]]:
    """A model and a batch for it."""
    import transformers

    name, widths, layers, vocabulary, batch, tokens, mask = work
    config = getattr(transformers, f"{name}Config")(vocab_size=vocabulary, num_hidden_layers=layers, **widths)
    head = {"Bert": "ForMaskedLM", "T5": "ForConditionalGeneration"}.get(name, "ForCausalLM")
    with torch.device(device):
        model = (
            getattr(transformers, name + head)
            ._from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
            .train()
        )
    ids = torch.randint(1, vocabulary, (batch, tokens), device=device)
    given: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if name != "Bert":
        given["use_cache"] = False
    places = torch.arange(tokens, device=device)
    if mask == "packed":
        given["position_ids"] = (places % DOCUMENT).expand(batch, -1).contiguous()
    else:
        kept = places < (tokens if mask == "ones" else tokens // 2)
        given["attention_mask"] = kept.long().expand(batch, -1).contiguous()
    return model, given


def without_mask() -> str:
    """The name of causal attention as an expert writes it, which transformers then takes."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("is_causal", attend)
    AttentionMaskInterface.register("is_causal", lambda *_, **__: None)
    return "is_causal"


def measure(work: Work, arm: str, args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """One arm of a work; `more` is options for te."""
    if arm == "bf16:is_causal" and (work[0], work[-1]) != ("Llama", "ones"):
        return {"skipped": "its mask is more than causal"}
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model, given = build(work, args.device, without_mask() if arm == "bf16:is_causal" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    kind, _, recipe = arm.partition(":")
    options = {"recipe": recipe, "fallback": "silent", **more} if kind == "te" else None
    run: Callable[..., Any] = torch.compile(model, backend="te" if kind == "te" else "inductor", options=options)

    def step() -> Tensor:
        loss = run(**given).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()  # type: ignore[no-any-return]

    start = time.perf_counter()
    step().item()
    first = time.perf_counter() - start
    if args.device == "cpu":
        step()
        times = [_seconds(step) * 1e3 for _ in range(args.iters)]
        return {"ms": sorted(times)[len(times) // 2], "peak_gib": None, "first_s": first, "loss": step().item()}
    torch.cuda.reset_peak_memory_stats()
    step()
    times = []
    for _ in range(args.iters):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        loss = step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"ms": sorted(times)[len(times) // 2], "peak_gib": peak, "first_s": first, "loss": loss.item()}


def _seconds(step: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def show(rows: list[dict[str, Any]], environment: dict[str, Any]) -> None:
    """Each work's arms, those that ran beside the first of them."""
    first = {row["work"]: row for row in reversed(rows) if "ms" in row}
    cells = []
    for row in rows:
        if "ms" not in row:
            cells.append((row["work"], row["arm"], row["skipped"], *[None] * 4))
            continue
        over = first[row["work"]]["ms"] / row["ms"]
        numbers = ((row["ms"], 1), (over, 2), (row["peak_gib"], 2), (row["first_s"], 0), (row["loss"], 4))
        cells.append((row["work"], row["arm"], *(table.number(*one) for one in numbers)))
    columns = ("work", "arm", "step ms", "over the first", "peak GiB", "first s", "loss")
    table.show(f"whole steps; {table.headline(environment)}", columns, cells)


def main() -> None:
    parser = harness.arguments(__doc__, "masks", device="cuda", iters=5)
    works = [work for work in WORKS if work not in BIASED]
    parser.add_argument("--works", nargs="+", choices=WORKS, default=works)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help="bf16, bf16:is_causal, te:RECIPE")
    parser.add_argument("--seconds", type=float, default=480, help="in which no more is begun than fits")
    parser.add_argument("--tiny", action="store_true", help="one layer of few elements, to see that it runs")
    parser.add_argument("--bias-queries", type=int, help="from how many on FlexAttention is taken for a bias")
    args = parser.parse_args()
    if args.bias_queries is not None:
        sites.BIAS_QUERIES = args.bias_queries
    start, longest = time.perf_counter(), 0.0
    environment, rows = harness.environment(args.device), []
    for arm in args.arms:
        for name in args.works:
            work, begun = tiny(WORKS[name]) if args.tiny else WORKS[name], time.perf_counter()
            fits = begun - start + longest <= args.seconds
            found = measure(work, arm, args) if fits else {"skipped": f"not begun in {args.seconds:g} s"}
            longest = max(longest, time.perf_counter() - begun)
            rows.append({"work": name, "arm": arm, **found})
            print(rows[-1], flush=True)
            harness.write_json(args.json, {"environment": environment, "rows": rows})
    rows.sort(key=lambda row: args.works.index(row["work"]))
    show(rows, environment)


if __name__ == "__main__":
    main()
