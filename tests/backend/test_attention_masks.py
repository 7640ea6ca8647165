"""Masks that are proven from the graph: what each is found to be, that attention by it is the same, and what is left as
it was written."""

import itertools
import random

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from te_inductor.passes.graph import aliases
from te_inductor.passes.pre_grad.attention import masks, sites
from te_inductor.passes.pre_grad.attention.formulas import Reader
from te_inductor.runtime.attention import predicate
from tests.attention import (
    MASKS,
    Passes,
    as_on_a_gpu,
    assert_same,
    attention_with,
    by_hand,
    operands,
    packed,
    padded,
    padded_both_ways,
    window,
)

NAMES = {mask.__name__: mask for mask in MASKS}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_mask_is(name):
    backend = Passes()
    tensors, padding, documents = operands(130)
    torch.compile(attention_with(NAMES[name]), backend=backend)(*tensors, padding, documents)
    assert backend.kinds() == [MASKS[NAMES[name]]]


@pytest.mark.sample(1)
@pytest.mark.parametrize("length", (1, 127, 300))
@pytest.mark.parametrize("name", NAMES)
def test_attention_is_the_same(name, length, monkeypatch):
    run, backend = attention_with(NAMES[name], scale=0.3), Passes()
    tensors, padding, documents = operands(length)
    with as_on_a_gpu(monkeypatch):
        compiled = torch.compile(run, backend=backend)
        assert_same(run, compiled, tensors, padding, documents)
    assert all(site.reason is None for site in backend.found)


CASES = {
    "plain": by_hand(NAMES["by_comparison"]),
    "filled": by_hand(window, form="fill"),
    "filled, padded": by_hand(padded, form="fill"),
    "padded both ways": by_hand(padded_both_ways),
    "cap": by_hand(window, softcap=3.0),
    "cap, full": by_hand(NAMES["full"], softcap=3.0),
    "cap, padded": by_hand(padded, softcap=3.0),
    "sinks": by_hand(window, sinks=True),
    "sinks, padded": by_hand(padded, sinks=True),
    "packed": by_hand(packed),
    "padded, in all queries alike": by_hand(padded_both_ways),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_by_hand_is_the_same(name, monkeypatch):
    """It is the same for queries that attend to no key: all keys alike, as the smallest number stands at each."""
    run, backend = CASES[name], Passes()
    tensors, padding, documents = operands(150)
    sinks = [torch.randn(4, requires_grad=True)] if "sinks" in name else []
    with as_on_a_gpu(monkeypatch):
        assert_same(run, torch.compile(run, backend=backend), [*tensors, *sinks], padding, documents)
    assert [site.reason for site in backend.found] == [None]


def test_rows_without_a_key():
    """The block mask's attention has zeros for them where torch's own has."""
    tensors, padding, documents = operands(70)
    padding[:] = 0
    run, backend = attention_with(padded), Passes()
    with pytest.MonkeyPatch.context() as patch, as_on_a_gpu(patch):
        y = torch.compile(run, backend=backend)(*tensors, padding, documents)
    assert backend.found[0].kernel == "flex_attention" and not y.any()


# ---- programs whose nodes say one thing and whose values are another ----


def filled_in_place(q, k, v, padding, documents):
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    mask[:, 3] = False
    mask[:, 0] = True
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def written_through_a_view(q, k, v, padding, documents):
    mask = torch.zeros(q.shape[2], k.shape[2])
    mask.t()[:5].add_(1.0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def written_as_out(q, k, v, padding, documents):
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    torch.logical_not(torch.ones_like(mask).tril(-3), out=mask)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def positions_moved(q, k, v, padding, documents):
    keys = torch.arange(k.shape[2])
    keys[2:].sub_(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keys[None, :] <= torch.arange(q.shape[2])[:, None])


def padding_moved(q, k, v, padding, documents):
    hidden = padding.clone()
    b, i = torch.arange(2)[:, None, None, None], torch.arange(k.shape[2])
    mask = (i[None, :] <= i[:, None]) & hidden.bool()[b, i[None, :]]
    hidden.fill_(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def values_of_a_cast(q, k, v, padding, documents):
    """Positions beyond what the dtype holds are not what they were."""
    i = torch.arange(q.shape[2]).to(torch.int8) if q.shape[2] > 128 else torch.arange(q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=i[None, :] <= i[:, None])


def index_from_the_end(q, k, v, padding, documents):
    i = torch.arange(q.shape[2])
    moved = i[i - 5]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=moved[None, :] <= i[:, None])


def numbers_without_bounds(q, k, v, padding, documents):
    """A float may be an integer, and may be infinite."""
    b, i = torch.arange(2)[:, None, None, None], torch.arange(q.shape[2])
    hidden = (-padding.float()).log()  # minus infinity, or NaN, which is not equal to it
    mask = (i[None, :] <= i[:, None]) & (hidden[b, i[None, :]] != float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


WRITES = [
    numbers_without_bounds,
    filled_in_place,
    written_through_a_view,
    written_as_out,
    positions_moved,
    padding_moved,
    values_of_a_cast,
    index_from_the_end,
]


@pytest.mark.parametrize("run", WRITES, ids=lambda run: run.__name__)
def test_values_that_are_not_what_nodes_say(run, monkeypatch):
    tensors, padding, documents = operands(300, groups=4)
    with as_on_a_gpu(monkeypatch):
        assert_same(run, torch.compile(run, backend=Passes()), tensors, padding, documents)


# ---- predicates, against the tensors that they stand for ----

_SIDES = ("q", "k", ["add", "k", -7], ["add", "q", 5], ["floordiv", "k", 11], ["at", 0, "b", "k"], ["at", 1, "b", "q"])


def _random(draw, depth=0):
    if depth < 2 and draw.random() < 0.6:
        called = draw.choice(("and", "or", "not"))
        return [called, *(_random(draw, depth + 1) for _ in range(1 if called == "not" else 2))]
    left, right = draw.choice(_SIDES), draw.choice((*_SIDES, 3, 40))
    return [draw.choice(("le", "lt", "ge", "gt", "eq", "ne")), left, right]


@pytest.mark.parametrize("seed", range(60))
def test_blocks_never_say_more_than_the_predicate(seed):
    """A block that no score of is attended to may be computed; one that is called full is."""
    draw = random.Random(seed)
    queries, keys = draw.randrange(1, 400), draw.randrange(1, 400)
    tensors = [torch.randint(0, draw.choice((1, 2, 50)) + 1, (2, length)) for length in (keys, queries)]
    node = _random(draw)
    assert predicate.from_text(predicate.to_text(node)) == node
    b, q, k = torch.arange(2)[:, None, None], torch.arange(queries)[:, None], torch.arange(keys)
    dense = torch.as_tensor(predicate.evaluate(node, {"b": b, "q": q, "k": k}, tensors)).expand(2, queries, keys)
    found = predicate.block_mask(node, tensors, (2, 1, queries, keys), torch.device("cpu"))
    block = predicate.BLOCK
    counts, chosen, full_counts, full_chosen = found[:4]
    for batch, row, column in itertools.product(range(2), range(-(-queries // block)), range(-(-keys // block))):
        place = min(batch, len(counts) - 1), 0, row
        in_part = column in chosen[place][: counts[place]]
        in_full = column in full_chosen[place][: full_counts[place]]
        inside = dense[batch, row * block : (row + 1) * block, column * block : (column + 1) * block]
        assert not (in_part and in_full)
        assert in_part or in_full or not inside.any()
        assert not in_full or (inside.all() and inside.shape == (block, block))
    everywhere = predicate.holds_everywhere(node, tensors, (2, 1, queries, keys))
    assert not everywhere or dense.all()
    empty = predicate.empty_rows(node, tensors, (2, 1, queries, keys), torch.device("cpu"))
    assert torch.equal(empty.expand(2, 1, -1)[:, 0], ~dense.any(-1)) or {"q", "k"} - predicate.places_of(node)


def test_block_masks_of_columns_are_those_of_rows_turned():
    node = ["and", ["le", "k", "q"], ["ge", "k", ["add", "q", -200]]]
    rows = predicate.block_mask(node, [], (1, 1, 700, 500), torch.device("cpu"))
    turned = predicate.block_mask(
        ["and", ["le", "q", "k"], ["ge", "q", ["add", "k", -200]]], [], (1, 1, 500, 700), torch.device("cpu")
    )
    assert all(torch.equal(one, other) for one, other in zip(rows[4:], turned[:4], strict=True))


def test_formulas_of_masks_are_their_tensors():
    """Every mask, read as a formula and computed from it at each place."""
    checked = 0

    def backend(gm, inputs):
        nonlocal checked
        reader = Reader(lambda node: False, lambda node: node)
        values = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
        for node in gm.graph.nodes:
            if node.op == "placeholder" or aliases.name(node) == "scaled_dot_product_attention":
                continue
            if node.op == "output":
                break
            args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            value = getattr(args[0], node.target)(*args[1:], **kwargs) if node.op == "call_method" else None
            values[node] = node.target(*args, **kwargs) if value is None else value
            formula = reader.read(node)
            index = [random.randrange(size) for size in values[node].shape]
            element = formula.at(tuple(map(sympy.Integer, index)))
            for function in element.atoms(sympy.core.function.AppliedUndef):
                leaf = values[reader.leaves[str(function.func)]]
                at = tuple(map(int, function.args))[: leaf.dim()]
                element = element.subs(function, int(leaf[at]))
            actual = values[node][tuple(index)].item()
            # sympy's minus infinity and Booleans, as Python's numbers.
            assert float(bool(element)) == actual if isinstance(actual, bool) else float(element) == actual
            checked += 1
        return gm.forward

    for mask in MASKS:
        torch._dynamo.reset()
        _, padding, documents = operands(60, groups=4)

        def made(padding, documents, mask=mask):
            b, q, k = torch.arange(2)[:, None, None, None], torch.arange(60)[:, None], torch.arange(60)[None, :]
            return mask(q, k, b, padding, documents)

        torch.compile(made, backend=backend)(padding, documents)
    assert checked > 100


# ---- around it ----


def test_sizes_that_are_symbolic_stay_so():
    run, backend = attention_with(NAMES["by_positions"]), Passes()
    compiled = torch.compile(run, backend=backend, dynamic=True)
    for length in (33, 48, 95):
        tensors, padding, documents = operands(length)
        assert_same(run, compiled, tensors, padding, documents)
    assert backend.kinds() == ["causal"] and backend.graphs == 1


def test_a_window_is_causal_while_the_sequence_is_shorter():
    def run(q, k, v):
        i = torch.arange(q.shape[2])
        keep = (i[None, :] <= i[:, None]) & (i[None, :] > i[:, None] - 64)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)

    backend = Passes()
    compiled = torch.compile(run, backend=backend, dynamic=True)
    for length in (40, 50, 90, 100, 30):
        assert_same(run, compiled, operands(length, groups=4)[0])
    assert backend.kinds() == ["causal", "causal, window"]


def test_inside_a_checkpoint(monkeypatch):
    def run(q, k, v, padding, documents):
        i, b = torch.arange(q.shape[2]), torch.arange(2)[:, None, None, None]
        keep = (i[None, :] <= i[:, None]) & padding.bool()[b, i[None, :]]

        def block(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=keep) + q

        q = checkpoint(block, q, k, v, use_reentrant=False)
        return checkpoint(block, q, k, v, use_reentrant=False)

    backend = Passes(traced=True)
    tensors, padding, documents = operands(140, groups=4)
    with as_on_a_gpu(monkeypatch):
        assert_same(run, torch.compile(run, backend=backend), tensors, padding, documents)
    assert [site.kernel for site in backend.found] == ["flex_attention"] * 2


def test_a_mask_that_is_an_input_stays_a_tensor():
    backend = Passes()
    tensors, _, _ = operands(30, groups=4)
    keep = torch.ones(30, 30, dtype=torch.bool).tril()
    torch.compile(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m), backend=backend)(
        *tensors, keep
    )
    [site] = backend.found
    assert (site.mask, site.kernel) == ("dense", "sdpa, the mask as a tensor") and "not from positions" in site.reason


def test_as_written():
    backend = Passes(attention="as_written")
    tensors, padding, documents = operands(30)
    run = attention_with(NAMES["by_tril"])
    assert_same(run, torch.compile(run, backend=backend), tensors, padding, documents)
    [site] = backend.found
    assert site.kernel == "sdpa, the mask as a tensor" and "as_written" in site.reason


@pytest.mark.parametrize("inside", (False, True))
def test_a_backend_that_the_user_has_chosen(monkeypatch, inside):
    """Windows stay tensors, and k and v repeated; a causal mask is none for any backend."""
    math = torch.nn.attention.SDPBackend.MATH

    def chosen(run):
        def inner(*given):
            with torch.nn.attention.sdpa_kernel(math):
                return run(*given)

        return inner

    backend = Passes()
    tensors, padding, documents = operands(60)
    for mask in (window, NAMES["by_comparison"]):
        run = attention_with(mask)
        made = torch.compile(chosen(run) if inside else run, backend=backend)
        compiled = made if inside else chosen(made)
        with as_on_a_gpu(monkeypatch):
            assert_same(run, compiled, tensors, padding, documents)
    assert [site.kernel for site in backend.found] == ["sdpa, the mask as a tensor", "sdpa, is_causal"]
    assert "sdpa_kernel" in backend.found[0].reason


def test_weights_that_are_returned_keep_the_scores():
    def run(q, k, v):
        weights = torch.softmax(q @ k.transpose(-2, -1), -1)
        return weights @ v, weights

    backend = Passes()
    tensors, _, _ = operands(20, groups=4)
    with pytest.MonkeyPatch.context() as patch, as_on_a_gpu(patch):
        torch.compile(run, backend=backend)(*tensors)
    [site] = backend.found
    assert site.kernel == "by hand" and "something else reads its scores or its weights" in site.reason


def test_conditions_have_one_order_in_all_processes():
    """Generated code has it, and is found again by it."""
    predicate = sympy.And(*(sympy.Ne(masks.KEY, number) for number in range(7)))
    found = masks.of_predicate(predicate, masks.Scores(1, 1, 8, 8), Reader(lambda node: False, lambda node: node))
    assert found.conditions == predicate.args


def test_a_mask_has_no_more_conditions_than_are_read():
    scores = masks.Scores(1, 1, 8, 8)
    many = sympy.And(*(sympy.Ne(masks.KEY, number) for number in range(20)))
    assert "many conditions" in str(masks.of_predicate(many, scores, Reader(lambda node: False, lambda node: node)))
    assert sites.KERNELS.keys() == {"as_written", "plain", "causal", "flex", "either", "kept", "fixed", "few"}
