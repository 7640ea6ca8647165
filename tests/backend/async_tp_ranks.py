"""Cases of asynchronous tensor parallelism, for test_async_tp.py. Graphs are made as torch's pass leaves them
(`_micro_pipeline_tp`), and run by kernels of torch's fused operators that this file has for the CPU."""

import copy
import functools
from collections import Counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed._symmetric_memory import _test_mode
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from te_inductor.distributed import parallel
from te_inductor.passes.post_grad import async_tp
from te_inductor.recipes import DelayedScaling
from tests.backend import parallel_ranks
from tests.support.parallel_layers import LENGTH, Mlp, Outer

STEPS = 3
_LIBRARY = torch.library.Library("symm_mem", "IMPL")


def plan(dim: int) -> dict[str, Any]:
    into, out = ColwiseParallel(input_layouts=Shard(dim)), RowwiseParallel(output_layouts=Shard(dim))
    return {"norm": SequenceParallel(sequence_dim=dim), "gate": into, "up": into, "down": out}


def _product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
    y = ((a.float() @ b.float()) * (a_scale * b_scale)).to(out)
    return y if bias is None else y + bias


@functools.partial(torch.library.impl, _LIBRARY, "fused_all_gather_scaled_matmul", "CPU")()
def gather_and_multiply(a, bs, a_scale, b_scales, dim, group, biases, factors, outs, fast):  # type: ignore[no-untyped-def]
    """Computes what the CUDA kernel does: of matrices alone, which is what the package writes."""
    assert dim == 0 and a.dim() == 2 and not any(factor is not None for factor in factors)
    ranks = dist.get_world_size()
    whole = parallel.gather(a, 0, parallel.Ranks(group, ranks))
    dtypes = [dtype if isinstance(dtype, torch.dtype) else torch.float32 for dtype in outs]
    each = zip(bs, b_scales, biases, dtypes, strict=True)
    return whole, [_product(whole, b, a_scale, scale, bias, dtype) for b, scale, bias, dtype in each]


@functools.partial(torch.library.impl, _LIBRARY, "fused_scaled_matmul_reduce_scatter", "CPU")()
def multiply_and_scatter(  # type: ignore[no-untyped-def]
    a, b, a_scale, b_scale, how, dim, dim_of_matrix, group, shape, bias=None, factor=None, out=None, fast=False
):
    assert (how, dim, dim_of_matrix, a.dim(), bias, factor) == ("sum", 0, 0, 2, None, None)
    assert list(shape) == [a.shape[0], b.shape[1]]
    y = _product(a, b, a_scale, b_scale, None, out if isinstance(out, torch.dtype) else torch.float32)
    scatter = torch.ops._c10d_functional.reduce_scatter_tensor(y, how, dist.get_world_size(), group)
    return torch.ops._c10d_functional.wait_tensor(scatter)


class Rank(parallel_ranks.Rank):
    """A rank whose graphs go through both passes if `asked`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asked, self.found = False, list[dict[str, int]]()

    def patches(self) -> list[Any]:
        return [mock.patch.object(async_tp, "_has_fp8", lambda device: True)]

    def see(self, graph: fx.Graph) -> None:
        from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
        from torch._inductor.fx_passes.post_grad import view_to_reshape

        for node in graph.find_nodes(
            op="call_function", target=torch.ops.aten.detach.default
        ):  # as Inductor's have none
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        with torch._inductor.config.patch(_micro_pipeline_tp=self.asked):
            view_to_reshape(graph.owning_module)
            async_tp.expose(graph)
            if self.asked:
                micro_pipeline_tp_pass(graph)
        graph.lint()
        names = (str(node.target).removesuffix(".default") for node in graph.nodes)
        kinds = ("symm_mem", "aten._scaled_mm", "te_inductor.scaled_mm", "all_gather_into", "reduce_scatter_t")
        self.found.append(Counter(name for name in names if any(kind in name for kind in kinds)))
        graph.owning_module.recompile()


def trains(rank: Rank, recipe: str, dim: str, batch: str, *more: str) -> Any:
    """Training with the pass and without it: whether they are equal, and what the graphs hold."""
    model = Outer(Mlp(128, 256, "bias" in more))
    shape = (int(batch), LENGTH, 128)
    x, dy = torch.randn(shape), torch.randn(shape)
    off, graphs, logged = [], [], []
    async_tp._tell.cache_clear()
    for asked in (False, True):
        torch._dynamo.reset()
        mine = copy.deepcopy(model)
        parallelize_module(mine.layers[0], rank.mesh, plan(int(dim)))
        rank.asked, rank.found = asked, []
        enabled = _test_mode(None if "other" not in more else {"of no layer"})
        log = mock.patch.object(async_tp.log, "warning", lambda text, *given: logged.append(text % given))
        with enabled, mock.patch.object(dist, "is_nccl_available", lambda: True), log:
            given = DelayedScaling(amax_history_len=4) if recipe == "delayed" else recipe
            run = rank.te(mine, recipe=given)
            for _ in range(STEPS if recipe == "delayed" else 1):
                found = rank.step(run, mine, rank.part(x, int(dim)), rank.part(dy, int(dim)))
        off.append(found)
        graphs.append(rank.found)
    furthest = max((a - b).abs().max().item() / b.abs().max().item() for a, b in zip(*off, strict=True))
    return {"off": furthest, "graphs": graphs, "logged": logged}
