"""A full fine-tune of a Llama of 8 billion parameters on one GPU of 80 GB; at a tiny size a CPU will do:

    python -m examples.full_finetune --shape 8b --context 8192 --steps 50
    python -m examples.full_finetune --shape 8b --context 8192 --steps 50 --recipe bf16
    python -m examples.full_finetune --shape 8b --batch 4 --context 32768 --steps 8 --checkpoint --offload
    python -m examples.full_finetune --shape tiny --context 64 --steps 6 --vocabulary 1024

Weights are bf16 and random, of the model's real shape; put your own `from_pretrained(…, dtype=torch.bfloat16)` in the
place of `llama`. Four things make it fit. Each block is a graph of its own, whose gradients are there when its backward
ends. The optimizer then steps these parameters at once, in a hook, and drops the gradients, so that those of one block
are all that is ever alive. Its states are of 8 bits (torchao's AdamW8bit), and weights are rounded stochastically, as
an update is often less than bf16's spacing. The output layer is a graph with its loss, which keeps no logits.

Two more are for long sequences. `--checkpoint` has each block keep its input alone and compute the rest again.
`--offload` has what blocks keep wait on the host, copied beside the computation. It is a hook of autograd's, which sees
what each graph saves when that graph's forward ends: a model that is one graph would have all of it back at once.

It prints the peak that it expects by sums, each step's loss, then tokens a second, the peak and the losses. Gradients
are not clipped, as no two parts of them are there together."""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import te_inductor
from examples.shapes import SHAPES, llama
from examples.text import prepare

GIB = 1 << 30
SMALLEST = 1 << 20  # bytes of a tensor that is worth a copy to the host
AHEAD = 16  # tensors that are copied back before the backward asks for them: about what two blocks save
SKIPPED = 3  # steps that compile, or record the first amaxes; they are in no rate and no peak
KEPT = {"bf16": 1.0, "saved": 0.45, "fp8": 0.67}  # of what a layer saves in bf16, about
# Two kinds of bytes that fit the peaks of four runs of Llama-3-8B within 5%: of an element between an MLP's layers in its
# backward (tensors in bf16, and copies of those that GEMMs read in FP8), and of an element whose states are of 8 bits in
# its step (weight, gradient, states and update in fp32).
WRITTEN = {"bf16": 8, "fp8": 12}
STEPPED = 20


class Offload(saved_tensors_hooks):
    """Keeps what graphs save on the host, but for parameters and what is small. Copies have a stream of their own."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.kept = {one.untyped_storage().data_ptr() for one in parameters}
        self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self.hosts: list[Tensor | None] = []
        self.back: dict[int, tuple[Tensor, torch.cuda.Event | None]] = {}
        super().__init__(self.pack, self.unpack)

    def pack(self, saved: Tensor) -> Tensor | int:
        if saved.nbytes < SMALLEST or saved.untyped_storage().data_ptr() in self.kept:
            return saved
        host = like(saved, "cpu", self.stream is not None)
        self.hosts.append(host)
        if self.stream is None:
            host.copy_(saved)
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                host.copy_(saved, non_blocking=True)
            saved.record_stream(self.stream)
        return len(self.hosts) - 1

    def unpack(self, packed: Tensor | int) -> Tensor:
        """A tensor on the device; those that were saved before it are on their way."""
        if isinstance(packed, Tensor):
            return packed
        for place in range(packed, max(packed - AHEAD, -1), -1):
            self.fetch(place)
        saved, copied = self.back.pop(packed)
        if copied is not None:
            torch.cuda.current_stream().wait_event(copied)
            saved.record_stream(torch.cuda.current_stream())
        return saved

    def fetch(self, place: int) -> None:
        """Has the stream copy a tensor to the device, into memory of its own: nothing that is launched has to end."""
        host, self.hosts[place] = self.hosts[place], None
        if host is None:
            return
        with torch.cuda.stream(self.stream):
            copy = like(host, "cpu" if self.stream is None else "cuda", False).copy_(host, non_blocking=True)
        self.back[place] = copy, None if self.stream is None else self.stream.record_event()


def like(tensor: Tensor, device: str, pinned: bool) -> Tensor:
    """Memory for a tensor, with its strides, by which a compiled backward reads it."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device, pin_memory=pinned)


def expected(model: Any, tokens: int, args: argparse.Namespace) -> dict[str, float]:
    """Bytes at the peak, by sums: where the head's weight takes its step, or in the backward of a block, whichever is
    more. A layer saves its input, the sum behind attention, q, k, v, attention's output, gate and up; with checkpoints
    its input, and one layer the rest. What is on the host is not counted."""
    config, is_bf16 = model.config, args.recipe == "bf16"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    block = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    heads = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    layer = 4 * config.hidden_size + 2 * heads + 2 * config.intermediate_size
    kept = KEPT["bf16" if is_bf16 else "saved" if args.options.get("saved") == "low_precision" else "fp8"]
    saved = 2.0 * kept * layer * tokens
    inputs = 2.0 * config.hidden_size * tokens if args.checkpoint else saved
    held = {
        "weights": 2.0 * parameters,
        "states of the optimizer": parameters * (2 * (1 + 4 / 256) if args.optimizer == "8bit" else 4),
        "saved for the backward": inputs * (2 if args.offload else config.num_hidden_layers),
    }
    at_the_head = {
        "the head's gradient and step": (2.0 + (STEPPED if args.optimizer == "8bit" else 0))
        * model.lm_head.weight.numel(),
        "logits and their gradient": 6.0 * tokens * config.vocab_size if is_bf16 else 0.0,
    }
    in_a_block = {
        "gradients of one block": 2.0 * block,
        "what its backward reads and writes": (saved if args.checkpoint else 0.0)
        + WRITTEN["bf16" if is_bf16 else "fp8"] * config.intermediate_size * tokens,
    }
    return held | max(at_the_head, in_a_block, key=lambda parts: sum(parts.values()))


def step_in_backward(model: nn.Module, optimizer: str, rate: float) -> list[torch.optim.Optimizer]:
    """An optimizer for each parameter, which steps as soon as the gradient is whole, and drops it."""
    made: Callable[[list[Tensor]], torch.optim.Optimizer]
    if optimizer == "8bit":
        from torchao.optim import AdamW8bit

        made = lambda one: AdamW8bit(one, lr=rate, bf16_stochastic_round=True)  # noqa: E731
    else:
        made = lambda one: torch.optim.AdamW(one, lr=rate, fused=True)  # noqa: E731
    optimizers = {parameter: made([parameter]) for parameter in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        parameter.grad = None

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    return [*optimizers.values()]


def set_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    """AdamW8bit has its rate as a tensor, so that another is no other graph."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def computed_again(block: type[nn.Module]) -> type[nn.Module]:
    """A class of blocks whose forward is a checkpoint."""

    class Checkpointed(block):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(partial(super().forward, **kwargs), *args, use_reentrant=False)

    return Checkpointed


def objective(model: Any, recipe: str, options: dict[str, Any], checkpoints: bool) -> Callable[[Tensor], Tensor]:
    """The loss of a batch (B, T + 1): blocks, and the output layer with its loss, each compiled by itself. A checkpoint
    is inside of its graph."""
    arguments: dict[str, Any] = {"backend": "inductor"}
    if recipe != "bf16":
        arguments = {"backend": "te", "options": {"recipe": recipe} | options}

    def head(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model.lm_head(hidden).flatten(0, 1).float(), targets.flatten())

    kind = type(model.model.layers[0])
    kind = computed_again(kind) if checkpoints else kind
    for block in model.model.layers:
        block.__class__ = kind
        block.compile(**arguments)
    compiled: Callable[[Tensor, Tensor], Tensor] = torch.compile(head, **arguments)

    def loss(tokens: Tensor) -> Tensor:
        hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
        return compiled(hidden, tokens[:, 1:])

    return loss


def batches(tokens: Tensor, steps: int, batch: int, context: int) -> Tensor:  # (steps, batch, context + 1)
    """Pieces of the text at random places, the same for all recipes."""
    starts = torch.randint(len(tokens) - context, (steps, batch, 1), generator=torch.Generator().manual_seed(0))
    return tokens[starts + torch.arange(context + 1)].long()


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--recipe", default="delayed", help="bf16 is Inductor's (default: delayed)")
    parser.add_argument("--options", type=json.loads, default={}, help="further compile options, as JSON")
    parser.add_argument("--optimizer", choices=("8bit", "adamw"), default="8bit", help="adamw has states in bf16")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--checkpoint", action="store_true", help="blocks keep their inputs and compute the rest again")
    parser.add_argument("--offload", action="store_true", help="what blocks keep waits on the host")
    parser.add_argument("--rate", type=float, default=5e-5, help="learning rate, behind ten steps of warmup")
    parser.add_argument(
        "--text", type=Path, nargs="*", default=(), help="files and folders (default: what is installed)"
    )
    parser.add_argument("--folder", type=Path, default=Path("out/full_finetune"), help="that keeps the text")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parsed(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = prepare(args.folder / "text", roots=args.text, vocabulary=min(8192, args.vocabulary), megabytes=16)
    model = llama(args.shape, args.vocabulary, layers=args.layers, device=device, dtype=torch.bfloat16).train()
    sums = expected(model, args.batch * args.context, args)
    parts = ", ".join(f"{name} {value / GIB:.2f}" for name, value in sums.items() if value)
    print(f"expected at the peak: {sum(sums.values()) / GIB:.1f} GiB, of which {parts}", flush=True)

    loss = objective(model, args.recipe, args.options, args.checkpoint)
    optimizers = step_in_backward(model, args.optimizer, args.rate)
    losses: list[float] = []
    begin = 0.0
    for step, tokens in enumerate(batches(text.train, args.steps, args.batch, args.context)):
        if step == SKIPPED:
            synchronize(device)
            begin = time.perf_counter()
        set_rate(optimizers, args.rate * min(1.0, (step + 1) / 10))
        with Offload(model.parameters()) if args.offload else nullcontext():
            value = loss(tokens.to(device))
        value.backward()
        losses.append(value.item())
        print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    synchronize(device, reset=False)
    seconds = time.perf_counter() - begin
    print([round(value, 4) for value in losses])
    print(f"{len(te_inductor.state_dict(model))} tensors of scaling state")
    if args.steps > SKIPPED:
        steps = args.steps - SKIPPED
        print(
            f"{args.batch * args.context * steps / seconds:.0f} tokens a second, {1e3 * seconds / steps:.0f} ms a step"
        )
    if device == "cuda":
        print(f"peak {torch.cuda.max_memory_allocated() / GIB:.1f} GiB allocated, behind the first {SKIPPED} steps")


def synchronize(device: str, reset: bool = True) -> None:
    """Waits for the device; a peak before is forgotten."""
    if device == "cuda":
        torch.cuda.synchronize()
        if reset:
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
