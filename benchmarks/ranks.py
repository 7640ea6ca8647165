"""Training on the GPUs of one host, by several ranks: time of a step, peak memory, bytes on the wire, losses.

    python -m benchmarks.ranks                                     # FSDP2 of four Llama-8B blocks, all GPUs that there are
    python -m benchmarks.ranks --work fsdp --arms bf16 te:delayed gather:delayed --tokens 8192 2048
    python -m benchmarks.ranks --work tp --sequence 8192 --async-tp  # with Inductor's _micro_pipeline_tp, all arms
    python -m benchmarks.ranks --work fsdp tp fsdp_tp ep ddp --ranks 1 8            # efficiency
    python -m benchmarks.ranks --work fsdp tp fsdp_tp --model llama8b --steps 50    # all 32 layers: losses
    python -m benchmarks.ranks --work ep --ranks 2 --layers 2 --profile 30          # where a step's time goes
    python -m benchmarks.ranks --work ep --tiny                    # two gloo ranks on the CPU: that it runs
    python -m benchmarks.ranks --predict --model llama8b --ranks 8 # by bytes and rates; nothing runs

Works (ranks_works.py): `fsdp` (FSDP2), `tp` (tensor and sequence parallelism over all ranks), `fsdp_tp` (FSDP2 over
groups of `--tp` ranks), `ep` (experts of Qwen3-30B-A3B's shape, sharded over all ranks), `ddp`. An arm is ``NAME`` or
``NAME:RECIPE``: bf16 is Inductor, te the backend, gather the same with `low_precision_all_gather`, torchao its
tensorwise recipe, with FP8 gathers under FSDP2, where it can be imported. Each arm has ranks of its own, one process
each. Blocks are compiled one by one, or with `--whole` as one graph.

A step is a forward and a backward; weights and what is gathered of them are bf16 where nothing else is said. Times are
the slowest rank's median. `--tokens` are those of a rank: ranks that share a model's layers have one batch of as many
each, and each a part of every sequence. With several `--ranks` efficiency is tokens a second and rank over those of the
first number. `--steps` trains with AdamW, from the same weights and data in all arms, to give back each token with its
features moved by one: losses are mean squared errors, 2 at first. Scaling state has to be equal on all ranks in the
end: else the exit status is 1.

Ranks say on stderr what they do and how long it took, and, of what takes longer than `--patience` seconds, where their
threads are. NVLink multicast is left off."""

import argparse
import json
import os
import socket
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks import harness, ranks_predict, table
from benchmarks.ranks_job import MODELS, Job, shared_by
from benchmarks.ranks_measure import measure
from benchmarks.ranks_works import WORKS

LAST = 10  # steps of training whose mean loss is told
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def run(job: Job) -> dict[str, Any]:
    """The slowest rank's figures, and whether all ranks agree."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        store = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        free.close()
        mp.spawn(measure, (job, store, folder), nprocs=job.world)  # type: ignore[no-untyped-call]
        told = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(job.world)]
    return {**asdict(job), **gathered(job, told)}


def gathered(job: Job, told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What ranks have told, as one row."""
    slowest = max(told, key=lambda one: one["ms"])
    peaks = [one["peak_gib"] for one in told if one["peak_gib"] is not None]
    row = {**slowest, "peak_gib": max(peaks, default=None), "tokens": job.shape.tokens // job.tp}
    row["tokens_a_second"] = 1e3 * job.shape.tokens * job.replicas / slowest["ms"]
    losses = slowest["losses"]
    row["first_loss"], row["loss"] = (losses[0], statistics.mean(losses[-LAST:])) if losses else (None, None)
    row["states_equal"] = all(one["states_equal"] for one in told)
    return row


def jobs(args: argparse.Namespace) -> list[Job]:
    """All arms, one after the other."""
    found = []
    for name in args.work:
        for tokens in args.tokens:
            for world in args.ranks:
                tp = shared_by(name, world, args.tp)
                common = {"work": name, "model": args.model, "device": args.device, "world": world, "tp": tp}
                common |= {"tokens": tokens, "sequence": args.sequence, "layers": args.layers, "whole": args.whole}
                common |= {"uncut": args.uncut}
                common |= {"steps": args.steps, "profile": args.profile}
                common |= {"iters": args.iters, "warmup": args.warmup, "patience": args.patience}
                for arm in args.arms or WORKS[name].arms:
                    found.append(Job(arm=arm, async_tp=args.async_tp and tp > 1, **common))
    return found


def show(rows: Sequence[dict[str, Any]], environment: dict[str, Any]) -> None:
    """One table a work and number of tokens."""
    for work, tokens in dict.fromkeys((row["work"], row["tokens"]) for row in rows):
        these = [row for row in rows if (row["work"], row["tokens"]) == (work, tokens)]
        columns = [
            "ranks",
            "arm",
            "ms a step",
            "bf16 / this",
            "efficiency",
            "peak GiB",
            "MB received",
            "first loss",
            f"last {LAST}",
            "over bf16",
        ]
        table.show(
            f"{WORKS[work].title}: {these[0]['model']}, {tokens} tokens a rank, {table.headline(environment)}",
            [*columns, "equal states"],
            [_cells(row, these) for row in these],
        )
        for row in these:
            if row["kernels"]:
                cells = [
                    (kernel["name"][:110], f"{kernel['calls']:.0f}", table.number(kernel["total_us"], 1))
                    for kernel in row["kernels"]
                ]
                title = f"{row['arm']}, {row['world']} ranks, the slowest of them: kernels {row['kernels_ms']:.2f} ms"
                table.show(title, ("kernel", "calls", "us a step"), cells)


def _cells(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[Any]:
    base = next((one for one in rows if one["arm"] == "bf16" and one["world"] == row["world"]), None)
    first = next(one for one in rows if one["arm"] == row["arm"])
    each = row["tokens_a_second"] / row["world"], first["tokens_a_second"] / first["world"]
    apart = None if base is None or row["loss"] is None else row["loss"] / base["loss"] - 1
    states = f"{row['states']}, {'yes' if row['states_equal'] else 'NO'}" if row["states"] else None
    return [
        row["world"],
        row["arm"],
        table.number(row["ms"]),
        table.number(base and base["ms"] / row["ms"]),
        None if first is row else table.number(each[0] / each[1]),
        table.number(row["peak_gib"]),
        table.number(row["received"], 1, 1e-6),
        table.number(row["first_loss"], 4),
        table.number(row["loss"], 4),
        None if apart is None or row is base else f"{apart:+.2%}",
        states,
    ]


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.arguments(__doc__, "ranks", device=None, iters=20, warmup=8)
    parser.add_argument("--work", nargs="+", default=["fsdp"], choices=WORKS)
    parser.add_argument("--arms", nargs="+", help="NAME or NAME:RECIPE; default: the work's")
    parser.add_argument("--model", default="blocks", choices=[name for name in MODELS if name != "tiny"])
    parser.add_argument("--layers", type=int, default=0, help="default: the model's")
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192], help="of a rank")
    parser.add_argument("--sequence", type=int, default=0, help="tokens of one; default 2048")
    parser.add_argument("--ranks", nargs="+", type=int, help="default: all GPUs")
    parser.add_argument("--tp", type=int, default=2, help="of fsdp_tp: ranks that share a model's layers")
    parser.add_argument("--whole", action="store_true", help="compile all blocks as one graph")
    parser.add_argument("--uncut", action="store_true", help="of ddp: graphs are not cut at its buckets")
    parser.add_argument("--async-tp", action="store_true", help="Inductor's _micro_pipeline_tp")
    parser.add_argument("--steps", type=int, default=0, help="of training, for losses")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="list the N slowest kernels of each arm")
    parser.add_argument("--patience", type=float, default=45.0, help="seconds of one phase until threads are shown")
    parser.add_argument("--tiny", action="store_true", help="small blocks on the CPU")
    parser.add_argument("--predict", action="store_true", help="what to expect of H100s, by bytes and rates")
    args = parser.parse_args(given)
    args.device = "cpu" if args.tiny else "cuda"
    if args.tiny:
        args.model, args.tokens, args.iters, args.warmup = "tiny", [0], 2, 1
    args.ranks = args.ranks or [2 if args.tiny or args.predict else torch.cuda.device_count()]
    if not (args.tiny or args.predict) and not 0 < max(args.ranks) <= torch.cuda.device_count():
        raise SystemExit(f"{torch.cuda.device_count()} GPUs, expected {max(args.ranks) or 1}; --tiny runs on the CPU")
    return args


def main(given: Sequence[str] | None = None) -> int:
    args = parse(given)
    if args.predict:
        ranks_predict.show(args.work, args.model, args.ranks, args.tokens[0], args.tp)
        return 0
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)
    rows: list[dict[str, Any]] = []
    environment: dict[str, Any] = {}
    for job in jobs(args):
        if job.name == "torchao" and not harness.importable("torchao"):
            print(f"{job.work}: without the arm {job.arm}, as torchao cannot be imported")
            continue
        rows.append(run(job))
        environment = rows[-1].pop("environment")
        harness.write_json(args.json, {"environment": environment, "rows": rows})
    show(rows, environment)
    print(f"numbers: {args.json}")
    return 0 if all(row["states_equal"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
