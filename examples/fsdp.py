"""A Llama on several ranks by FSDP2, weights gathered in FP8, with distributed checkpoints that a run goes on from, and
with tensor parallelism if asked. Two processes of a CPU will do, or the GPUs of a host:

    torchrun --nproc-per-node 2 -m examples.fsdp --folder /tmp/run
    torchrun --nproc-per-node 2 -m examples.fsdp --folder /tmp/run --resume 4
    torchrun --nproc-per-node 2 -m examples.fsdp --folder /tmp/parallel --tensor-parallel 2

The program is that of the quick start on pretraining, and a loop. Weights are fp32 masters in shards; each block is
compiled by itself. Text, tokenizer and model are made on the spot; on GPUs add `--shape 1b --layers 4`."""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import te_inductor
from examples.shapes import SHAPES, llama
from examples.text import Text, prepare
from te_inductor.distributed import low_precision_all_gather
from te_inductor.integrations.stateful import ScalingState

RECIPE = "delayed"
WORDS = 1024  # of the vocabulary
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def plan() -> dict[str, ParallelStyle]:
    """How the layers of a block lie on the ranks that share it."""
    columns: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLUMNS}
    return columns | {name: RowwiseParallel() for name in ROWS}


def sharded(
    shape: str,
    vocabulary: int,
    layers: int | None,
    mesh: DeviceMesh,  # ("data", "tensor")
) -> Any:
    """The model in shards, with blocks that are compiled."""
    model = llama(shape, vocabulary, layers=layers, device=mesh.device_type)
    if mesh["tensor"].size() > 1:
        for block in model.model.layers:
            parallelize_module(block, mesh["tensor"], plan())
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh["data"], mp_policy=precision)
    fully_shard(model, mesh=mesh["data"], mp_policy=precision)
    low_precision_all_gather(model, recipe=RECIPE, policy={"lm_head": "none"})
    for block in model.model.layers:
        block.compile(backend="te", options={"recipe": RECIPE})
    return model


def prepared(args: argparse.Namespace) -> Text:
    """The text, which the first rank prepares, and the others read."""
    if dist.get_rank() > 0:
        dist.barrier()
    text = prepare(args.folder / "text", roots=args.text, vocabulary=WORDS, megabytes=4)
    if dist.get_rank() == 0:
        dist.barrier()
    return text


def batch(tokens: Tensor, seed: int, size: int, context: int) -> Tensor:  # (size, context)
    """Pieces of the text at random places."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - context, (size, 1), generator=generator)
    return tokens[starts + torch.arange(context)].long()


def saved(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint holds; scales of delayed scaling are in no model's state_dict."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "scales": ScalingState(model)}


def train(args: argparse.Namespace, device: str) -> tuple[list[float], int]:
    """Trains, and returns the mean loss over ranks of each step, and how many tensors of scaling state there are."""
    mesh = init_device_mesh(
        device, (dist.get_world_size() // args.tensor_parallel, args.tensor_parallel), mesh_dim_names=("data", "tensor")
    )
    text = prepared(args)
    model = sharded(args.shape, WORDS, args.layers, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if args.shape == "tiny" else 3e-4, fused=True)
    first = args.resume or 0
    if args.resume is not None:
        state = saved(model, optimizer)
        load(state, checkpoint_id=args.folder / f"step-{args.resume}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses = []
    for step in range(first, args.steps):
        # A batch follows from the step and the rank alone, so that no order has to be saved.
        seed = step * mesh["data"].size() + mesh["data"].get_local_rank()
        tokens = batch(text.train, seed, args.batch, args.context).to(device)
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if step + 1 == args.steps // 2 and args.resume is None:
            save(saved(model, optimizer), checkpoint_id=args.folder / f"step-{step + 1}")
    return losses, len(te_inductor.state_dict(model))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoint, which is half the way")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--resume", type=int, help="step of the checkpoint to go on from")
    parser.add_argument(
        "--text", type=Path, nargs="*", default=(), help="files and folders (default: what is installed)"
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--context", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank in a step")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that share each layer")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    losses, scales = train(args, "cuda" if gpu else "cpu")
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, from step {args.resume or 0}, {scales} tensors of scaling state")
        print(losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
