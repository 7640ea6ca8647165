"""Cases of rollouts between steps of FSDP2, for test_rollouts.py."""

import copy
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from te_inductor import quantize_, quantized_state_dict, refresh_rollout, rollout
from te_inductor.distributed import agreement
from te_inductor.errors import StateError, StoredWeightError
from te_inductor.runtime.weights.followed_weights import following
from tests import ranks
from tests.support import invariant_models
from tests.support.streamed import Decoder, bits

IDS = torch.arange(8)


def _sharded(model: nn.Module, blocks: Any, rank: ranks.Rank, **how: Any) -> nn.Module:
    for block in blocks:
        fully_shard(block, mesh=rank.mesh, **how)
    return fully_shard(model, mesh=rank.mesh, **how)


def _whole(sharded: nn.Module, plain: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A model on one rank with the values that the ranks have; their root is sharded again."""
    state = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in sharded.state_dict().items()}
    plain.load_state_dict(state)
    for one in plain.parameters():
        one.data = one.data.to(dtype)  # buffers stay
    return plain


def follows(rank: ranks.Rank, recipe: str, dtype: str) -> Any:
    """A view of shards has the bits, and the logits, of the whole model stored, before and behind each step; behind
    writes that are not seen, when it is told."""
    torch.manual_seed(0)
    gathered = getattr(torch, dtype)
    how = {} if gathered == torch.float32 else {"mp_policy": MixedPrecisionPolicy(param_dtype=gathered)}
    plain = Decoder()
    model = copy.deepcopy(plain)
    model = _sharded(model, [] if recipe == "block" else model.blocks, rank, **how)
    view = rollout(model, recipe)
    generate = torch.compile(view, backend="te", options={"recipe": "none"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=recipe == "rowwise")
    told = []

    def look() -> bool:
        with torch.no_grad():
            logits, again = view(IDS), generate(IDS)
            expected = quantize_(_whole(model, copy.deepcopy(plain), gathered), recipe)
            wanted = expected(IDS)
        mine, theirs = (
            bits((name, one.detach()) for name, one in quantized_state_dict(each).items()) for each in (view, expected)
        )
        return torch.equal(logits, wanted) and torch.equal(again, wanted) and mine == theirs

    for _ in range(2):
        told.append(look())
        with torch.enable_grad():
            model(IDS + rank.rank).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(IDS)  # leaves the root's parameters gathered
        told.append(look())
    for one in model.parameters():
        one.to_local().data.mul_(2)
    stale = look()
    refresh_rollout(view)
    told.append(not stale and look())
    told.append(type(view) is Decoder and not any("FSDP" in type(one).__name__ for one in view.modules()))
    return told


def same_numbers(rank: ranks.Rank) -> Any:
    """The module that trains generates, sharded, with the log-probabilities that it trains on, at each step."""
    torch.manual_seed(0)
    model = invariant_models.Decoder(96, 64, 128, 4, 2).bfloat16()
    _sharded(model, model.layers, rank)
    options = {"recipe": "rowwise", "batch_invariant": True, "fallback": "error"}
    run = torch.compile(model, backend="te", dynamic=False, options=options)
    optimizer, ids, places = (
        torch.optim.AdamW(model.parameters(), lr=0.01),
        torch.randint(0, 96, (3, 12)),
        torch.arange(12),
    )
    found = []
    with torch._dynamo.config.patch(recompile_limit=64):
        for _ in range(2):
            with torch.no_grad():
                sampled = _generated(run, ids, model)
            trained = run(ids, places)
            found.append((torch.equal(sampled, trained), trained.sum().item()))
            trained[..., rank.rank].sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [same for same, _ in found], found[0][1] != found[1][1]


def apart(rank: ranks.Rank, recipe: str) -> Any:
    """Ranks look unequally often, one by one weight and one by all, see other changes, and cannot store on one of them."""
    torch.manual_seed(0)
    model = Decoder()
    model = _sharded(model, model.blocks, rank)
    view = rollout(model, recipe)
    first, told = view.blocks[0].gate_up_proj.weight, []
    alone = torch.compile(view.embed, backend="te", fullgraph=True)

    def wanted() -> nn.Module:
        return quantize_(_whole(model, Decoder(), torch.float32), recipe)

    def change(*names: str, by: float = 2.0) -> None:
        with torch.no_grad():
            for name, one in model.named_parameters():
                if name in names or not names:
                    one.to_local().mul_(by)

    def follows() -> bool:
        with torch.no_grad():
            return torch.equal(view(IDS), wanted()(IDS))

    with torch.no_grad():
        change()
        for _ in range(1 + 3 * rank.rank):  # generates longer
            view(IDS)
        told.append(follows())
        change()
        first + 0 if rank.rank else refresh_rollout(view)
        told.append(follows())
        change(f"blocks.{rank.rank}.attention.o_proj.weight")
        following(lambda *_: None, range(2))(*(block.attention.o_proj.weight for block in view.blocks))
        told.append(follows())
        change("embed.weight")
        told.append(torch.equal(alone(IDS), _whole(model, Decoder(), torch.float32).embed(IDS)))
        change()
        if rank.rank:
            model.blocks[1].attention.q_proj.weight.to_local()[0, 0] = torch.nan
        for _ in range(2):
            try:
                view(IDS)
                told.append(False)
            except StoredWeightError as error:
                told.append("q_proj has values that are not finite" in str(error))
    return told


def alone(rank: ranks.Rank) -> Any:
    """What a rank is told that makes another view than the other rank, and one that generates without it."""
    model = _sharded(Decoder(), [], rank)
    view, told = rollout(model, "rowwise"), []
    try:
        rollout(model, "block" if rank.rank else "rowwise")
    except StoredWeightError as error:
        told.append(str(error))
    with torch.no_grad(), mock.patch.object(agreement, "PATIENCE", 0.5):
        torch._foreach_mul_([one.to_local() for one in model.parameters()], 2.0)
        store = torch.distributed.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=2))
        try:
            if not rank.rank:
                view(IDS)
        except StateError as error:
            told.append(str(error))
    return told


def _generated(run: Any, ids: torch.Tensor, model: Any) -> torch.Tensor:
    caches, every = (
        [tuple(torch.zeros(3, 2, 16, 16, dtype=torch.bfloat16) for _ in range(2)) for _ in model.layers],
        torch.arange(16),
    )
    found = []
    for start, end in ((0, 9), (9, 10), (10, 11), (11, 12)):
        places = every[start:end].clone()
        found.append(run(ids[:, start:end].contiguous(), places, every[None] <= places[:, None], caches).clone())
    return torch.cat(found, 1)
