"""`rollout`: what generates has the bits that `quantize_` would store of the parameters as they are."""

import copy
import gc
import re
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from te_inductor import quantize_, quantized_state_dict, refresh_rollout, rollout
from te_inductor.errors import OptionError, StoredWeightError
from te_inductor.ops import stored_again
from te_inductor.ops.stored_weight import StoredWeight, store
from te_inductor.runtime.weights import cached_weights
from te_inductor.runtime.weights.followed_weights import following
from tests.checkpoints import ExpertsModel
from tests.ranks import told_by
from tests.support.streamed import Block, Decoder, bits

pytestmark = [
    pytest.mark.usefixtures("without_tracing"),
    pytest.mark.filterwarnings("ignore:te_inductor. lm_head keeps its weight"),
]
IDS = torch.arange(8)
told = told_by(
    "tests.backend.rollout_ranks",
    2,
    "follows rowwise float32,follows block float32,follows nvfp4_weight_only bfloat16,same_numbers,apart rowwise,alone",
)


def stored_bits(view: nn.Module):
    return bits((name, one.detach()) for name, one in quantized_state_dict(view).items())


def fresh_bits(model: nn.Module, recipe: object):
    return stored_bits(quantize_(copy.deepcopy(model), recipe))


def through(model: nn.Module):
    return torch.compile(model, backend="te", fullgraph=True, options={"recipe": "none"})


def step(optimizer: torch.optim.Optimizer, run) -> None:
    with torch.enable_grad():
        run(IDS).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("recipe", ["rowwise", "current", "block", "nvfp4_weight_only"])
def test_generation_follows_training(recipe):
    model = Decoder()
    train = torch.compile(model, backend="te", options={"recipe": "nvfp4_weight_only", "fallback": "silent"})
    view = rollout(train, recipe)
    generate, optimizer = through(view), torch.optim.AdamW(model.parameters(), lr=0.01)
    assert type(view) is Decoder and not view.training and model.training
    seen = []
    for _ in range(3):
        with torch.no_grad():
            found, eager = generate(IDS), view(IDS)
            expected = quantize_(copy.deepcopy(model), recipe)(IDS)
        assert torch.equal(found, expected) and torch.equal(eager, expected)
        assert stored_bits(view) == fresh_bits(model, recipe)
        seen.append(found)
        step(optimizer, train)
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    assert all(type(one) is nn.Parameter and one.requires_grad for one in model.parameters())


def test_memory_is_that_of_what_is_stored():
    model = Decoder()
    addresses = {one.data_ptr() for one in (*model.parameters(), *model.buffers())}
    view = rollout(model)
    stored = {one for one in view.parameters() if isinstance(one, StoredWeight)}
    others = [one for one in (*view.parameters(), *view.buffers()) if one not in stored]
    assert {one.data_ptr() for one in others} <= addresses
    replaced = sum(one.numel() for one in stored)
    assert 0 < sum(one.stored_bytes for one in stored) <= replaced * 4.5 / 8 + 4 * len(stored)


def _scaled(model: nn.Module, how: str) -> None:
    weight = model.blocks[0].attention.o_proj.weight
    if how == "operator":
        with torch.no_grad():
            weight.mul_(2)
    elif how == "load":
        model.load_state_dict({name: 2 * one for name, one in model.state_dict().items()})
    elif how == "assign":
        state = {name: 2 * one for name, one in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        model.lm_head.weight = model.embed.weight
    elif how == "another":
        model.blocks[0].attention.o_proj.weight = nn.Parameter(2 * weight.detach())
    elif how == "data":
        weight.data = 2 * weight.data
    elif how == "inference":
        with torch.inference_mode():
            weight.mul_(2)
    elif how in ("fused", "foreach", "single"):
        flags = {"fused": {"fused": True}, "foreach": {"foreach": True}, "single": {"foreach": False}}[how]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **flags)
        step(optimizer, model)
    else:
        weight.data.mul_(2)


SEEN = ["operator", "load", "assign", "another", "data", "inference", "fused", "foreach", "single"]


@pytest.mark.parametrize("how", SEEN)
def test_changes_that_are_seen(how):
    model = Decoder()
    view = rollout(model, "rowwise")
    generate = through(view)
    with torch.no_grad():
        before = generate(IDS)
        _scaled(model, how)
        if how == "assign":
            with pytest.raises(StoredWeightError, match=r"bias beside .* is another tensor than before"):
                generate(IDS)
            refresh_rollout(view)
        after = generate(IDS)
        assert torch.equal(after, quantize_(copy.deepcopy(model), "rowwise")(IDS))
    assert not torch.equal(before, after)


def test_a_buffer_that_is_written_behind_a_step_of_others():
    """Frameworks have parameters in one buffer, step a copy of it in fp32 and write it back."""
    model = Decoder()
    parameters = [*model.parameters()]
    buffer = torch.cat([one.detach().flatten() for one in parameters])
    for one, part in zip(parameters, buffer.split([one.numel() for one in parameters]), strict=True):
        one.data = part.view_as(one)
    totals = nn.Parameter(buffer.clone())
    optimizer = torch.optim.SGD([totals], lr=1.0)
    view = rollout(model, "rowwise")
    for _ in range(2):
        totals.grad = 0.1 * torch.randn_like(totals)
        optimizer.step()
        buffer.copy_(totals.detach())
        with torch.no_grad():
            assert torch.equal(view(IDS), quantize_(copy.deepcopy(model), "rowwise")(IDS))


def test_a_write_that_is_not_seen_wants_a_refresh():
    model = Decoder()
    view = rollout(model, "rowwise")
    with torch.no_grad():
        before = view(IDS)
        _scaled(model, "data.mul_")
        assert torch.equal(view(IDS), before)
        refresh_rollout(view)
        assert torch.equal(view(IDS), quantize_(copy.deepcopy(model), "rowwise")(IDS))


def test_nothing_is_stored_again_where_nothing_has_changed(monkeypatch):
    model = Decoder()
    view, stored = rollout(model), []
    write = stored_again._NVFP4Writer.write
    monkeypatch.setattr(stored_again._NVFP4Writer, "write", lambda self, some: stored.extend(some) or write(self, some))
    with torch.no_grad():
        generate = through(view)
        for _ in range(3):
            view(IDS), generate(IDS)
        assert not stored
        model.blocks[1].attention.k_proj.weight.mul_(2)
        generate(IDS), view(IDS)
    assert len(stored) == 3  # q, k and v have one scale


@pytest.mark.traced  # a graph of Dynamo's has the stored weights themselves, which look where they are multiplied
def test_graphs_of_a_stored_model_serve_a_view_too():
    """One class has one graph: the view's wrapper must be there though the stored model compiled it first."""
    model = Decoder()
    plain, view = quantize_(copy.deepcopy(model)), rollout(model)
    with torch.no_grad():
        assert torch.equal(through(plain)(IDS), through(view)(IDS))
        model.blocks[0].gate_up_proj.weight.mul_(3)
        found = through(view)(IDS)
    assert torch.equal(found, quantize_(copy.deepcopy(model))(IDS))


def test_experts_follow():
    model = ExpertsModel()
    view = rollout(model, "nvfp4_weight_only")
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(0.5)
    assert stored_bits(view) == fresh_bits(model, "nvfp4_weight_only")


def test_a_policy_tied_layers_and_blocks_compiled_alone():
    model = Decoder()
    model.blocks[1].attention.o_proj.weight = model.blocks[0].attention.o_proj.weight
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    view = rollout(model, "block", {"blocks.1.gate_up_proj": "none"})
    attention = [block.attention for block in view.blocks]
    assert attention[0].o_proj.weight is attention[1].o_proj.weight
    assert view.blocks[1].gate_up_proj.weight is model.blocks[1].gate_up_proj.weight
    assert type(view.blocks[0]) is type(view.blocks[1])
    with torch.no_grad():
        model.blocks[1].attention.o_proj.weight.mul_(2)
        expected = store(model.blocks[1].attention.o_proj.weight, attention[0].o_proj.weight.recipe)
        assert torch.equal(attention[0].o_proj.weight.dequantize(), expected.dequantize())


@pytest.mark.parametrize("case", ["rowwise float32", "block float32", "nvfp4_weight_only bfloat16"])
def test_shards_of_fsdp_are_followed(told, case):
    for found in told[f"follows {case}"]:
        assert found == [True] * 6


def test_shards_that_train_generate_the_same_numbers(told):
    for same, moved in told["same_numbers"]:
        assert same == [True, True] and moved


def test_ranks_look_unequally_often(told):
    for found in told["apart rowwise"]:
        assert found == [True] * 6


def test_a_rank_that_looks_alone_is_told(told):
    expected = (
        r"rank 0 has waited \d s .* for rank 1 to run the view .* call te_inductor\.refresh_rollout\(view\) on all"
    )
    (other, waited), (same,) = told["alone"]
    assert other == same and "ranks' views of a sharded model store different weights" in other
    assert re.match(expected, waited) and any(re.search(expected, text) for text in told.said("alone")[0])


def test_errors():
    model = Decoder()
    view = rollout(model)
    with pytest.raises(OptionError, match=r"rollout's model is an int .*, expected an nn.Module"):
        rollout(3)
    with pytest.raises(OptionError, match=r"no weight of which follows a model, expected what te_inductor\.rollout"):
        refresh_rollout(model)
    with pytest.raises(OptionError, match=r"is to be moved or cast, expected its model"):
        view.to(torch.bfloat16)
    with pytest.raises(OptionError, match=r"is to be loaded, expected its model"):
        view.load_state_dict({})
    with pytest.raises(OptionError, match=r"is to be frozen, expected its model"):
        view.requires_grad_(False)
    with pytest.raises(OptionError, match=r"quantize_ of Decoder, a view .*, expected a model of its own"):
        quantize_(view)
    for part in (view, view.blocks[0].attention.o_proj, nn.ModuleList([model, view])):
        with pytest.raises(OptionError, match=r"copy\.deepcopy of a view .*, expected one of its model"):
            copy.deepcopy(part)
    with pytest.raises(OptionError, match="has a stored weight, which no step changes"):
        rollout(quantize_(Decoder()))
    with torch.no_grad():
        model.blocks[0].gate_up_proj.weight[0, 0] = torch.nan
    for _ in range(2):
        with pytest.raises(StoredWeightError, match=r"gate_up_proj.* values that are not finite"):
            view(IDS)
    model.blocks[0].gate_up_proj.weight = nn.Parameter(torch.ones(256, 128, dtype=torch.bfloat16))
    with pytest.raises(StoredWeightError, match=r"bfloat16 on cpu, expected .*float32 on cpu"):
        view(IDS)
    with torch.inference_mode():
        model.blocks[0].gate_up_proj.weight = nn.Parameter(torch.ones(256, 128))
        with pytest.raises(StoredWeightError, match=r"gate_up_proj is an inference tensor, expected a normal one"):
            view(IDS)
    holder = Decoder()
    holder.generator = (one for one in ())
    with pytest.raises(OptionError, match="cannot copy the modules of the Decoder"):
        rollout(holder)


def _built(model: nn.Module, how: str) -> None:
    attention = model.blocks[0].attention
    if how == "layer":
        attention.o_proj = nn.Linear(128, 128, bias=False)
    elif how == "blocks":
        model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]
    elif how == "more":
        model.blocks.append(Block())
    elif how == "bias":
        attention.k_proj.bias = nn.Parameter(torch.ones(64))
    elif how == "norm":
        model.blocks[0].norm = nn.LayerNorm(128, elementwise_affine=False)
    elif how == "parametrization":
        nn.utils.parametrize.register_parametrization(attention.o_proj, "weight", nn.Identity())
    elif how == "deleted":
        del attention.o_proj.weight
    else:
        attention.merged_adapters.append("default")  # as peft does
        with torch.no_grad():
            attention.o_proj.weight.mul_(2)


@pytest.mark.parametrize("how", ["layer", "blocks", "more", "bias", "norm", "parametrization", "deleted", "merged"])
def test_a_model_that_gets_other_parts_wants_another_view(how):
    model = Decoder()
    model.blocks[0].attention.merged_adapters = []
    view = rollout(model, "rowwise")
    generate = through(view)
    with torch.no_grad():
        generate(IDS)
        _built(model, how)
        for run in (generate, view, generate):
            with pytest.raises(StoredWeightError, match=r"is not what it was when a view of the model was made"):
                run(IDS)
        if how == "blocks":
            _built(model, how)  # back
        elif how != "deleted":
            view = rollout(model, "rowwise")
        if how != "deleted":
            expected = quantize_(copy.deepcopy(model), "rowwise", fallback="silent")(IDS)
            assert torch.equal(view(IDS), expected)


def test_tied_layers_that_part_want_another_view():
    model = Decoder()
    first, second = (block.attention.o_proj for block in model.blocks)
    second.weight = first.weight
    view = rollout(model, "rowwise")
    with torch.no_grad():
        first.weight.mul_(2)
        for layer in (first, second):
            layer.weight = nn.Parameter(first.weight.detach())  # two of one memory, as load_state_dict(assign=True) may
        assert torch.equal(view(IDS), quantize_(copy.deepcopy(model), "rowwise")(IDS))
        second.weight = nn.Parameter(3 * second.weight)
        for _ in range(2):
            with pytest.raises(
                StoredWeightError, match=r"weight \[128, 128\] was one parameter with weight of another"
            ):
                view(IDS)


def test_blocks_that_are_compiled_later_are_the_same():
    model = Decoder()
    view = rollout(model, "rowwise")
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 1.1)
        found = view(IDS)
    model.blocks[0] = model.blocks[0]._orig_mod
    with torch.no_grad():
        assert torch.equal(found, quantize_(copy.deepcopy(model), "rowwise")(IDS))


def test_a_view_follows_while_another_thread_compiles():
    model, found = Decoder(), []
    view = rollout(model, "rowwise")

    @torch.no_grad()
    def generate():
        torch._foreach_mul_(list(model.parameters()), 1.1)
        found.append(view(IDS))

    def backend(graph, _):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(generate).result()
        return graph

    torch.compile(torch.exp, backend=backend)(torch.zeros(2))
    with torch.no_grad():
        assert torch.equal(*found, quantize_(copy.deepcopy(model), "rowwise")(IDS))


class Mixed(nn.Module):
    """Weights of several shapes and dtypes, that are one matrix, tied, no multiple of any block, and experts'."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Decoder().blocks[0].attention
        self.low, self.odd = nn.Linear(48, 80).bfloat16(), nn.Linear(33, 131)
        self.experts, self.tied = ExpertsModel(), nn.Linear(48, 80)
        self.tied.weight = self.low.weight


@pytest.mark.parametrize("recipe", ["rowwise", "current", "block", "nvfp4_weight_only"])
@pytest.mark.parametrize("kernels", [lambda _: None, lambda _: cached_weights.refresh], ids=["alone", "at once"])
def test_what_has_changed_is_stored_at_once(kernels, recipe, monkeypatch):
    """One use, or one graph, stores all in place, bit for bit as `quantize_` would, and the host waits once; nothing is
    written where something that is looked at cannot be stored, and all else where something that is not cannot."""
    monkeypatch.setattr(stored_again, "kernels", kernels)
    model = Mixed()
    view = rollout(model, recipe, fallback="silent")
    stored = {name: one for name, one in view.named_parameters() if isinstance(one, StoredWeight)}
    graph = following(lambda *_: None, range(len(stored)))

    def change() -> None:
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 1.3)

    def written(of: nn.Module) -> list[object]:  # without a look
        stored = [(name, one) for name, one in of.named_parameters() if isinstance(one, StoredWeight)]
        return [bits((name, part) for part in one.parts) for name, one in stored]

    def expected() -> list[object]:
        return written(quantize_(copy.deepcopy(model), recipe))

    def count(name: str) -> None:
        method = getattr(Tensor, name)
        patched.setattr(Tensor, name, lambda self: waits.append(name) or method(self))

    addresses = [part.data_ptr() for one in stored.values() for part in one.parts]
    first = next(iter(stored.values()))
    for look in (lambda: first + 0, lambda: graph(*stored.values()), lambda: refresh_rollout(view)):
        change()
        waits: list[str] = []
        with monkeypatch.context() as patched:
            for name in ("tolist", "item", "__bool__"):
                count(name)
            look()
        assert waits == ["tolist"] and written(view) == expected()
    assert addresses == [part.data_ptr() for one in stored.values() for part in one.parts]

    change()
    before = written(view)
    with torch.no_grad():
        model.odd.weight[3, 5] = torch.inf
    for _ in range(2):
        with pytest.raises(StoredWeightError, match=r"odd has values that are not finite"):
            graph(*stored.values())
        assert written(view) == before
    first + 0
    assert written(view) != before
    with torch.no_grad():
        model.odd.weight[3, 5] = 1.0
    graph(*stored.values())
    assert written(view) == expected()


class Launches(TorchDispatchMode):
    """Counts the operators that a GPU would launch something for."""

    VIEWS = frozenset(
        ("alias", "detach", "expand", "select", "slice", "split_with_sizes", "unbind", "unsqueeze", "view")
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op._schema.name.removeprefix("aten::") not in self.VIEWS
        return op(*args, **(kwargs or {}))


def test_as_many_launches_store_a_few_layers_as_many():
    def launches(layers: int) -> int:
        model = Decoder()
        model.blocks = nn.ModuleList(Block() for _ in range(layers))
        view = rollout(model)
        with torch.no_grad(), Launches() as launches:
            refresh_rollout(view)
        return launches.count

    assert launches(1) == launches(6) < 200


def test_a_view_and_its_model_are_let_go():
    model = Decoder()
    view = rollout(model)
    alive = [weakref.ref(one) for one in (model.blocks[0].attention.o_proj, view.blocks[0].attention.o_proj)]
    del model, view
    gc.collect()
    assert [one() for one in alive] == [None, None]


@pytest.mark.parametrize("recipe", ["rowwise", "nvfp4_weight_only"])
def test_a_model_that_is_stored_itself_is_none_to_follow(recipe):
    model = Decoder()
    view, plain = rollout(model, "rowwise"), copy.deepcopy(model)
    quantize_(model, recipe)
    for look in (view, through(view)):
        with pytest.raises(StoredWeightError, match=rf"is stored as {recipe} since its view was made, as by quantize_"):
            look(IDS)
    with pytest.raises(StoredWeightError, match="expected a parameter in high precision"):
        refresh_rollout(view)
    model.load_state_dict(plain.state_dict(), assign=True)
    refresh_rollout(view)
    assert stored_bits(view) == fresh_bits(plain, "rowwise")


@pytest.mark.parametrize("kernels", [lambda _: None, lambda _: cached_weights.refresh], ids=["alone", "at once"])
def test_experts_that_were_picked_before_a_change_are_those_of_before(kernels, monkeypatch):
    monkeypatch.setattr(stored_again, "kernels", kernels)
    model = ExpertsModel()
    view = rollout(model, "rowwise")
    [weight, *_] = [one for one in view.parameters() if isinstance(one, StoredWeight)]
    with torch.no_grad():
        picked, before = weight[torch.tensor([1, 0])], weight.dequantize()[[1, 0]].clone()
        torch._foreach_mul_(list(model.parameters()), 2.0)
        assert not torch.equal(weight.dequantize()[[1, 0]], before)
        assert torch.equal(picked.dequantize(), before)
