"""Cases of tensor parallelism, for test_parallel.py."""

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, loss_parallel, parallelize_module

import te_inductor
from te_inductor import ops
from te_inductor.distributed import low_precision_all_gather
from te_inductor.recipes import DelayedScaling
from tests import ranks
from tests.ranks import how, of_the_first_rank
from tests.support.parallel_layers import (
    BATCH,
    HIDDEN,
    LENGTH,
    PLAIN,
    SEQUENCE,
    WIDTH,
    Checkpointed,
    Head,
    Mlp,
    OfPlacements,
    Outer,
)

_COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


class Rank(ranks.Rank):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("tp",))
        self.graphs: list[
            list[tuple[str, str, int]]
        ] = []  # of each: collective, dtype, bytes that it gives a rank (-1: a symbol)
        self.low = 0  # GEMMs in low precision

    def see(self, graph: fx.Graph) -> None:
        found = []
        for node in graph.nodes:
            name = str(node.target).split(".")[1] if "c10d_functional" in str(node.target) else ""
            if name in _COLLECTIVES:
                made = node.meta["val"]
                size = made.numel() * made.itemsize
                found.append((name, str(made.dtype).removeprefix("torch."), size if isinstance(size, int) else -1))
            self.low += node.target is ops.scaled_mm
        self.graphs.append(sorted(found))

    def te(self, model: Any, *, by_block: bool = False, dynamic: bool | None = None, **options: Any) -> Any:
        options = {"fallback": "error", **options}
        if not by_block:
            return torch.compile(model, backend="te", dynamic=dynamic, options=options)
        for layer in model.layers:
            layer.compile(backend="te", dynamic=dynamic, options=options)
        return model

    def wire(self, graphs: list[Any]) -> list[list[Any]]:
        """What graphs with collectives send, each kind of graph once."""
        return [list(map(list, graph)) for graph in dict.fromkeys(map(tuple, graphs)) if graph]

    def part(self, x: Tensor, dim: int | None) -> Tensor:
        return x.clone() if dim is None else x.chunk(self.world, dim)[self.rank].contiguous()

    def compared(
        self,
        model: nn.Module,
        plan: Any,
        recipe: Any,
        *,
        dim: int | None,
        by_block: bool = False,
        dynamic: bool | None = None,
        wrap: Callable[[nn.Module], Any] = lambda model: None,
        **more: Any,
    ) -> Any:
        """How far tensor-parallel training is from one rank's in low precision, and both from high precision; what goes
        over the wire."""
        if recipe == "delayed":
            recipe = DelayedScaling(amax_history_len=4)
        steps = 3 if isinstance(recipe, DelayedScaling) else 1
        exact, one = copy.deepcopy(model).double(), copy.deepcopy(model)
        width = model.layers[0].norm.weight.shape[0]
        x, dy = torch.randn(BATCH, LENGTH, width), torch.randn(BATCH, LENGTH, width)
        for layer in model.layers:
            parallelize_module(layer, self.mesh, plan)
        wrap(model)
        run, alone = (
            self.te(which, recipe=recipe, by_block=by_block, dynamic=dynamic, **group, **more)
            for which, group in ((model, {}), (one, {"amax_group": "none"}))
        )
        for _ in range(steps):
            found = self.step(run, model, self.part(x, dim), self.part(dy, dim))
        wire, low = self.graphs.copy(), self.low

        def of_one() -> Any:
            known = [self.step(alone, one, x, dy) for _ in range(steps)]
            return known[-1], self.step(exact, exact, x.double(), dy.double())

        known, right = of_the_first_rank(of_one)
        for tensors in (known, right):
            tensors[:2] = [self.part(tensor, dim) for tensor in tensors[:2]]
        far = [
            [off(*pair) for pair in zip(*pairs, strict=True)]
            for pairs in ((found, known), (found, right), (known, right))
        ]
        return {
            "one rank": max(far[0]),
            "error": far[1],
            "error of one rank": far[2],
            "wire": self.wire(wire),
            "low": low,
        }

    def step(self, run: Any, model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        model.zero_grad()
        y = run(x)
        y.backward(dy)
        grads = [parameter.grad for parameter in model.parameters()]
        return [y.detach(), x.grad, *(g.full_tensor() if isinstance(g, DTensor) else g for g in grads)]


def off(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return ((a - b).norm() / b.norm()).item() if a.isfinite().all() else float("inf")


def plain(rank: Rank, recipe: str) -> Any:
    return rank.compared(Outer(Mlp()), PLAIN, recipe, dim=None)


def plain_bias(rank: Rank, recipe: str) -> Any:
    return rank.compared(Outer(Mlp(bias=True)), PLAIN, recipe, dim=None)


def sequence(rank: Rank, recipe: str) -> Any:
    return rank.compared(Outer(Mlp()), SEQUENCE, recipe, dim=1)


def sequence_bias(rank: Rank, recipe: str) -> Any:
    return rank.compared(Outer(Mlp(bias=True)), SEQUENCE, recipe, dim=1)


def sequence_wide(rank: Rank, recipe: str) -> Any:
    """Compares layers of a size that fills blocks; microscaled formats are emulated here, which is told."""
    return rank.compared(Outer(Mlp(128, 256)), SEQUENCE, recipe, dim=1, fallback="silent")


def two(rank: Rank, recipe: str) -> Any:
    return rank.compared(Outer(Mlp(), Mlp()), SEQUENCE, recipe, dim=1)


def blocks(rank: Rank, recipe: str) -> Any:
    """Compiled one by one."""
    return rank.compared(Outer(Mlp(), Mlp()), SEQUENCE, recipe, dim=1, by_block=True)


def with_fsdp(rank: Rank, recipe: str, gathers: bool = False) -> Any:
    """FSDP2 along the other dimension of a mesh, all of whose ranks have the same rows here."""
    grid = init_device_mesh("cpu", (2, rank.world // 2), mesh_dim_names=("dp", "tp"))
    rank.mesh = grid["tp"]

    def wrap(model: nn.Module) -> None:
        for layer in model.layers:
            fully_shard(layer, mesh=grid["dp"])
        fully_shard(model, mesh=grid["dp"])
        if gathers:
            own = DelayedScaling(amax_history_len=4) if recipe == "delayed" else recipe
            low_precision_all_gather(model, own, fallback="error")

    plan, dim = (SEQUENCE, 1) if gathers else (PLAIN, None)
    rank.rank, rank.world = rank.mesh.get_local_rank(), rank.mesh.size()  # whose parts of a sequence are compared
    sizes = (256, 512) if recipe == "block" else (WIDTH, HIDDEN)
    return rank.compared(Outer(Mlp(*sizes), Mlp(*sizes)), plan, recipe, dim=dim, by_block=True, wrap=wrap)


def with_gathers(rank: Rank, recipe: str) -> Any:
    """The same, sequence parallel, and FSDP2 gathers weights in FP8: gate and up, each with its own scale, gather x
    once."""
    return with_fsdp(rank, recipe, gathers=True)


def checkpointed(rank: Rank, recipe: str) -> Any:
    return rank.compared(Outer(Checkpointed()), SEQUENCE, recipe, dim=1)


def symbolic(rank: Rank, recipe: str) -> Any:
    """Compares layers for a sequence of unknown length."""
    return rank.compared(Outer(Mlp()), SEQUENCE, recipe, dim=1, dynamic=True)


def loss(rank: Rank, recipe: str) -> Any:
    """Loss parallel: logits stay sharded, and the loss is computed of the shards."""
    model = Head()
    one, x, target = copy.deepcopy(model), torch.randn(BATCH, LENGTH, WIDTH), torch.randint(96, (BATCH, LENGTH))
    plan = {
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, rank.mesh, plan)
    run, alone = rank.te(model, recipe=recipe), rank.te(one, recipe=recipe, amax_group="none")
    own = rank.part(x, 1).requires_grad_()
    with loss_parallel():
        found = run(own, target)
        found.backward()
    low, graphs = rank.low, rank.graphs
    x.requires_grad_()
    known = alone(x, target)
    known.backward()
    found = found.full_tensor() if isinstance(found, DTensor) else found
    pairs = [
        (found, known),
        (own.grad, rank.part(x.grad, 1)),
        (model.head.weight.grad.full_tensor(), one.head.weight.grad),
    ]
    return {"off": [off(a.detach(), b.detach()) for a, b in pairs], "low": low, "wire": rank.wire(graphs)}


@how(traced=False)
def refused(rank: Rank) -> Any:
    """Why; each runs in high precision all the same."""
    whole, grid = [Replicate()], init_device_mesh("cpu", (rank.world // 2 or 1, 2), mesh_dim_names=("dp", "tp"))
    x = torch.randn(2, 32, 64)
    cases = {
        "partial": (OfPlacements(rank.mesh, [Shard(0)]), DTensor.from_local(x, rank.mesh, [Partial()])),
        "uneven weight": (OfPlacements(rank.mesh, [Shard(0)], rows=63), distribute_tensor(x, rank.mesh, whole)),
        "uneven input": (OfPlacements(rank.mesh, whole), distribute_tensor(x[0, :31], rank.mesh, [Shard(0)])),
        "grid": (OfPlacements(grid, [Replicate(), Shard(0)]), distribute_tensor(x, grid, [Replicate(), Replicate()])),
        "inside": (OfPlacements(rank.mesh, [Shard(1)]), distribute_tensor(x, rank.mesh, whole)),
        "bias": (OfPlacements(rank.mesh, [Shard(1)], bias=whole), distribute_tensor(x, rank.mesh, [Shard(2)])),
    }
    told = {}
    for name, (layer, given) in cases.items():
        torch._dynamo.reset()
        [site, *_] = te_inductor.explain(layer, given, options={"recipe": "current"}).sites
        with torch.no_grad():
            y = rank.te(layer, recipe="current", fallback="silent")(given).full_tensor()
            told[name] = {"reason": site.reason, "kernel": site.kernel, "off": off(y, layer(given).full_tensor())}
    return told


def without_group(rank: Rank) -> Any:
    """Delayed scaling whose amaxes are not reduced over the ranks whose shards are gathered."""
    told = {}
    for name, recipe, more in (
        ("recipe", DelayedScaling(reduce_amax=False), {}),
        ("option", "delayed", {"amax_group": "none"}),
    ):
        torch._dynamo.reset()
        model = Outer(Mlp())
        parallelize_module(model.layers[0], rank.mesh, SEQUENCE)
        report = te_inductor.explain(model, torch.randn(2, 16, WIDTH), options={"recipe": recipe, **more})
        told[name] = sorted({site.reason or "" for site in report.sites})
    return told


def whole_weights(rank: Rank, recipe: str) -> Any:
    """Compares weights of which all ranks have all, beside rows of x that each has."""
    torch.manual_seed(1)
    layer, x = OfPlacements(rank.mesh, [Replicate()], bias=[Replicate()]), torch.randn(2, 32, 64)
    dy = distribute_tensor(torch.randn(2, 32, 64), rank.mesh, [Shard(1)])
    found = []
    for run in (rank.te(layer, recipe=recipe), layer):
        layer.zero_grad()
        given = distribute_tensor(x, rank.mesh, [Shard(1)]).requires_grad_()
        y = run(given)
        y.backward(dy)
        found.append([t.full_tensor().detach() for t in (y, given.grad, layer.weight.grad, layer.bias.grad)])
    return {"off": [off(*pair) for pair in zip(*found, strict=True)], "low": rank.low}


def nan(rank: Rank) -> Any:
    """One rank's NaN: which outputs of each are none, as with one rank."""
    model = Outer(Mlp())
    one = copy.deepcopy(model)
    parallelize_module(model.layers[0], rank.mesh, SEQUENCE)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    x[1, 3, 5] = torch.nan
    found = rank.te(model, recipe="current")(rank.part(x, 1))
    known = rank.part(rank.te(one, recipe="current")(x), 1)
    return {
        "rows": found.isnan().any(-1).sum().item(),
        "same": bool((found.isnan() == known.isnan()).all()),
        "off": off(found.detach().nan_to_num(), known.detach().nan_to_num()),
    }


def llama(rank: Rank, recipe: str) -> Any:
    """transformers' own plan, compiled whole, in training."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    one = LlamaForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        one.save_pretrained(shared[0])
        dist.barrier()
        model = LlamaForCausalLM.from_pretrained(shared[0], tp_plan="auto", device_mesh=rank.mesh)
        dist.barrier()
    tokens, dy = torch.randint(96, (BATCH, LENGTH)), torch.randn(BATCH, LENGTH, 96)
    exact = copy.deepcopy(one).double()
    found = []
    for which, options in ((model, {}), (one, {"amax_group": "none"}), (exact, None)):
        run = which if options is None else rank.te(which, recipe=recipe, **options)
        rank.low, rank.graphs = (rank.low, rank.graphs) if which is model else (0, [])
        for _ in range(3 if recipe == "delayed" else 1):
            which.zero_grad()
            y = run(input_ids=tokens, use_cache=False).logits
            y.backward(dy.to(y.dtype))
        grads = {name: parameter.grad for name, parameter in which.named_parameters()}
        found.append([y.detach(), *(g.full_tensor() if isinstance(g, DTensor) else g for g in grads.values())])
        if which is model:
            low, graphs = rank.low, rank.graphs
    tp, known, right = found
    return {
        "one rank": max(map(off, tp, known)),
        "error": [*map(off, tp, right)],
        "error of one rank": [*map(off, known, right)],
        "low": low,
        "wire": rank.wire(graphs),
    }
