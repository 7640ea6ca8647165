"""The pass that finds attention in a graph and decides how each place runs."""

from collections.abc import Callable, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.nn.functional as F
from sympy.core.function import AppliedUndef  # type: ignore[import-untyped]
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from te_inductor import targets
from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph import operators
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.module_path import module_path
from te_inductor.passes.graph.operators import name
from te_inductor.passes.graph.values import is_tensor, is_wrapped, value
from te_inductor.passes.pre_grad.attention import added, by_hand, masks
from te_inductor.passes.pre_grad.attention.added import Added
from te_inductor.passes.pre_grad.attention.expressions import Symbols, expression
from te_inductor.passes.pre_grad.attention.formulas import Reader
from te_inductor.passes.pre_grad.attention.inputs import Inputs
from te_inductor.passes.pre_grad.attention.masks import Mask, Scores
from te_inductor.passes.pre_grad.attention.site import KERNELS, Attention, AttentionCall
from te_inductor.passes.pre_grad.attention.trees import Writer
from te_inductor.passes.pre_grad.plan import Plan
from te_inductor.presentation.report import AttentionSite
from te_inductor.runtime.eager.decode_attention import QUERIES, WIDTHS
from te_inductor.targets import Ability

# From how many queries on FlexAttention is taken for a mask that torch's kernels take as a tensor, and from how many on
# one call may wait for the device to learn that a mask hides nothing.
FLEX_QUERIES = 512
WAIT_QUERIES = 1024
CUDNN_WIDTH = 128  # of a head, which cuDNN takes forward and backward on every GPU
# From how many queries on FlexAttention is taken for a bias. None: with ALiBi a step took it 2.4 times as long.
BIAS_QUERIES: int | None = None
# From how many queries on FlashAttention, with dropout, is taken for a padding: docs/performance.md. Where a checkpoint
# computes it again, torch gives its op, which is tagged as random, the state of the generator that it had.
DROPOUT_QUERIES = 512
FLASH_WIDTH = 128  # of a head, which FlashAttention takes forward and backward, with dropout, on every GPU
_DTYPES = (torch.bfloat16, torch.float16)
_WIDTHS = (16, 256)  # of a head, that FlexAttention takes
# Heads of keys in a batch, up to which the kernel of few queries is taken where torch's would neither copy keys nor read a
# mask for each head of a group: docs/performance.md.
FEW_HEADS = 64

ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_CALLS = frozenset(
    (
        F.scaled_dot_product_attention,
        torch._C._nn.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
    )
)


def match_attention(plan: Plan) -> None:
    """Find attention, by torch's function or written by hand, and say what its mask is and which kernel computes it."""
    find(plan, _decide)


def find(plan: Plan, decide: Callable[[Attention, Inputs, Plan], None]) -> None:
    """Finds attention and writes it down, each as `decide` would have it."""
    bodies = Bodies(plan.gm)
    inputs = Inputs(plan, bodies)
    reader = Reader(plan.writes.anywhere, bodies.outer, inputs.band, inputs.told)
    chosen = _is_chosen(plan)
    for module in plan.graph_modules():
        for node in module.graph.nodes:
            if node.op not in ("call_function", "call_method") or not is_tensor(node):
                continue
            site = _of_call(node, reader) if node.target in _CALLS else _of_hand(node, reader, plan)
            if site is not None:
                site.chosen = chosen and not site.by_hand
                decide(site, inputs, plan)
                if not site.is_changed:
                    _leave(site)
                plan.attention.append(site)
                plan.outcome.report.attention.append(_reported(site))


def _of_call(node: fx.Node, reader: Reader) -> Attention:
    """A call of torch's function."""
    call = operators.arguments(node, *ARGUMENTS)
    q, k, v = (call[called] for called in ARGUMENTS[:3])
    read = AttentionCall(node, q, k, v, call.get("attn_mask"), call.get("scale"), call.get("dropout_p", 0.0))
    read.causal = call.get("is_causal") is True
    site = Attention(read, module_path(node))
    site.refusal = shape_refusal(site, call)
    if site.refusal is not None:
        return site
    read.of_torch = True
    # A head that is broadcast is that of one group.
    site.call.grouped = call.get("enable_gqa") is True or all(
        statically_known_true(value(one).shape[1] == 1) for one in (k, v)
    )
    scores = Scores.of(value(q), value(k).shape[2])
    if site.call.given is None:
        site.proof.mask = Mask((masks.KEY <= masks.QUERY,) if read.causal else (), scores)
    else:
        part = added.of_mask(site.call.given, reader, scores)
        if isinstance(part, Added):  # autocast casts it
            part.cast(value(site.call.given).dtype, torch.finfo(value(node).dtype).max)
        _take(site, part, scores, reader)
    return site


def _of_hand(node: fx.Node, reader: Reader, plan: Plan) -> Attention | None:
    """Attention that ends in a product."""
    plain = not is_wrapped(node) and not is_traceable_wrapper_subclass(value(node))
    found = by_hand.match(node, reader, plan.writes) if plain else None
    if found is None:
        return None
    site, read = found
    if site.refusal is not None:
        return site
    scores = Scores.of(value(site.call.q), value(site.call.k).shape[2])
    _take(site, site.call.added, scores, reader)
    operands = [one for one in (site.call.q, site.call.k, site.call.sinks) if one is not None]
    if plan.writes.between(operands, min(read), node):
        site.refusal = Refusal("the graph writes what the scores are made of before they are multiplied with v")
    return site


def _leave(site: Attention) -> None:
    """Take from the graph what was put there to read a place that stays as it is."""
    for view in reversed(site.views):
        if not view.users:
            view.graph.erase_node(view)


def _take(site: Attention, part: Added | Refusal, scores: Scores, reader: Reader) -> None:
    """Note what was read of what a site adds to its scores, or puts in their places."""
    if isinstance(part, Refusal):
        site.refusal = part
        return
    if len(part.masks) > 1:
        read = [masks.of_predicate(one.predicate, scores, reader) for one in part.masks]
        kept = [not (isinstance(one, Mask) and one.is_full) for one in read]
        part.masks = [one for one, is_kept in zip(part.masks, kept, strict=True) if is_kept]
    found = masks.of_predicate(part.predicate, scores, reader, part.smallest)
    if isinstance(found, Refusal):
        site.refusal = found
        return
    functions = {str(one.func) for condition in found.conditions for one in condition.atoms(AppliedUndef)}
    site.proof.mask, site.proof.leaves = found, {function: reader.leaves[function] for function in sorted(functions)}
    site.proof.readers = {function: reader.readers[function] for function in sorted(functions & reader.readers.keys())}
    site.call.added = part
    if len(part.masks) > 1 and part.smallest and not found.nowhere_empty():
        site.refusal = _take_two(site, part, scores, reader)


def _take_two(site: Attention, part: Added, scores: Scores, reader: Reader) -> Refusal | None:
    """Note what a query attends to that attends to no key of two masks, which are added up: twice the smallest number is
    minus infinity, so it is the keys that one mask hides alone."""
    last, first = part.masks[0], part.masks[-1]
    of_last, of_first = (masks.of_predicate(one.predicate, scores, reader) for one in (last, first))
    if len(part.masks) > 2 or not (last.smallest and first.smallest) or last.replaces or first.replaces == "bias":
        return Refusal("masks are added up, and a query that attends to no key attends to those of fewer masks")
    if isinstance(of_last, Refusal) or isinstance(of_first, Refusal):
        return Refusal("masks are added up, one of which attends to nothing")
    if not (of_last.nowhere_empty() or of_first.nowhere_empty()):
        return Refusal("masks are added up, and both may hide all keys of a query, for which no number is left")
    writer = Writer({})
    if first.replaces and (of_first.data or not _can_write(writer, of_first) or writer.numbers):
        return Refusal("masks are added up, and the first one stands in the place of scores by what a run alone tells")
    site.proof.alone = (sympy.Or(*(sympy.And(*one.conditions) for one in (of_last, of_first))),)
    site.proof.learns = of_first.conditions if first.replaces else ()
    return None


def _can_write(writer: Writer, mask: Mask) -> bool:
    try:
        writer.write(mask.conditions)
    except NotImplementedError:
        return False
    return True


def shape_refusal(site: Attention, call: Mapping[str, Any]) -> Refusal | None:
    """Why nothing is asked of a call with these arguments."""
    operands = [value(one) for one in (site.call.q, site.call.k, site.call.v) if is_tensor(one)]
    if len(operands) < 3 or any(one.dim() != 4 or one.is_nested for one in operands) or is_wrapped(site.call.node):
        return Refusal("its operands are not three tensors of (batch, heads, tokens, width)")
    if is_traceable_wrapper_subclass(operands[0]):  # as of context parallelism's DTensors
        return Refusal("its operands are of class %s, not plain tensors", type(operands[0]).__name__)
    if not isinstance(site.call.scale, float | int | None) or not isinstance(call.get("is_causal", False), bool):
        return Refusal("its scale, or whether it is causal, is known at the call alone")
    return None


def _decide(site: Attention, inputs: Inputs, plan: Plan) -> None:
    """Decides which kernel computes it."""
    if plan.options.attention == "as_written":
        site.refusal = Refusal("option 'attention' is 'as_written'")
    elif _has_few_queries(site, plan):
        site.kernel, site.refusal, site.call.grouped = "few", None, True
        site.call.k, site.call.v = _unrepeated(site, plan) or (site.call.k, site.call.v)
    if site.refusal is not None or site.is_changed:
        return
    mask = site.proof.mask
    assert mask is not None
    site.refusal = _value_refusal(site)
    if site.refusal is not None:
        return
    if (site.by_hand or site.call.given is not None) and mask.ends_early and not site.attends_to_all:
        site.ends_early, mask = True, mask.of_first_keys()
        site.proof.mask = mask
    special = any(one is not None for one in (site.call.softcap, site.call.sinks, site.call.added.bias))
    whole = mask.is_full or (mask.is_causal and mask.scores.is_square)
    if site.by_hand and not _is_on_a_gpu(site):
        site.refusal = Refusal("it is written by hand, and %s has no kernel for it", value(site.call.q).device.type)
    elif whole and not special and (site.by_hand or site.call.given is not None):
        site.kernel = "plain" if mask.is_full else "causal"
    elif site.by_hand or site.call.given is not None:
        drops = site.call.dropout != 0.0
        site.refusal = _mask_refusal(site, inputs.bodies, plan)
        site.refusal = site.refusal or (_kept_refusal(site) if drops else _flex_refusal(site))
        if site.refusal is None:
            waits = not special and not inputs.hold_any(site.proof.leaves.values()) and _may_wait(site, plan)
            site.kernel = "kept" if drops else "either" if waits else "flex"
    sources = _unrepeated(site, plan)
    if sources is not None:
        (site.call.k, site.call.v), site.call.grouped = sources, True
        if not site.is_changed:
            site.kernel = "causal" if mask.is_causal else "plain"


def _has_few_queries(site: Attention, plan: Plan) -> bool:
    """Whether it is a step of generation: few queries a KV head, of which no gradient is wanted, and a mask of keys alone.
    The kernel takes the mask as a tensor."""
    call = site.call
    if not call.of_torch or call.causal or call.dropout != 0.0 or site.chosen or not _is_on_a_gpu(site):
        return False
    q, k, v = map(value, (call.q, call.k, call.v))
    if any(one.requires_grad for one in (q, k, v)) or torch.compiler.is_exporting():
        return False
    heads, queries, width = sizes = q.shape[1:]
    sources = _sources_of_repeated(site, plan)
    kv_heads = value(sources[0] if sources else call.k).shape[1]
    if not all(isinstance(size, int) for size in (*sizes, kv_heads)) or width not in WIDTHS or heads % kv_heads:
        return False
    alike = [(one.shape[at], other.shape[at]) for one, other, at in ((k, q, 0), (v, q, 0), (v, k, 1), (v, k, 2))]
    if not all(statically_known_true(a == b) for a, b in (*alike, (k.shape[3], width), (v.shape[3], width))):
        return False
    can = targets.of(q.device).can
    if not _is_of_keys(call) or heads // kv_heads * queries > QUERIES or Ability.DECODE_ATTENTION not in can:
        return False
    copies = call.given is not None and heads > kv_heads
    return copies or statically_known_true(q.shape[0] * kv_heads <= FEW_HEADS)


def _is_of_keys(call: AttentionCall) -> bool:
    """Whether its mask says of each key, the same for all queries and heads, whether it counts."""
    if call.given is None:
        return True
    mask, q, k = value(call.given), value(call.q), value(call.k)
    if mask.dtype is not torch.bool or mask.dim() < 2:
        return False
    *batches, keys = mask.shape
    first, between = (batches[0], batches[1:]) if len(batches) == 3 else (1, batches)
    of_batch = statically_known_true(first == 1) or statically_known_true(first == q.shape[0])
    return of_batch and all(
        statically_known_true(a == b) for a, b in ((keys, k.shape[2]), *((one, 1) for one in between))
    )


def _value_refusal(site: Attention) -> Refusal | None:
    """Why another kernel would not compute what the program says."""
    q, k, v, out = map(value, (site.call.q, site.call.k, site.call.v, site.call.node))
    batches = q.shape[:2] if out.dim() == 4 else (q.shape[0] * q.shape[1],)
    sizes = zip(out.shape, (*batches, q.shape[2], v.shape[3]), strict=True)
    heads = [(k.shape[1], v.shape[1])] if site.call.grouped else [(k.shape[1], q.shape[1]), (v.shape[1], q.shape[1])]
    others = [(one.shape[0], q.shape[0]) for one in (k, v)]
    if not all(statically_known_true(a == b) for a, b in (*sizes, *heads, *others)):
        return Refusal("its mask, k or v is broadcast to other batches or heads than those of q")
    if site.call.scale is not None and not 0.0 < site.call.scale < float("inf"):
        return Refusal("its scores are multiplied by %s", site.call.scale)
    numbers = any(one.replaces != "scores" for one in site.call.added.masks) and site.call.given is not None
    if numbers and value(site.call.given).dtype is torch.float16 and site.attends_to_all:  # type: ignore[arg-type]
        return Refusal("float16's smallest number leaves scores in it, by which a query without a key attends to all")
    if site.call.added.infinite is not None and site.attends_to_all:
        return Refusal("a cast makes minus infinity of the smallest number of %s", site.call.added.infinite)
    return None


def _is_on_a_gpu(site: Attention) -> bool:
    """Whether its operands are plain tensors on a GPU that the package knows, in a dtype that all kernels take."""
    q = value(site.call.q)
    target = targets.of(q.device)
    return target.is_gpu and target.refusal is None and q.dtype in _DTYPES and not is_traceable_wrapper_subclass(q)


def _is_chosen(plan: Plan) -> bool:
    """Whether the user does not leave torch the choice among all of its backends, around the compile or in the graph."""
    cuda = torch.backends.cuda
    enabled = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled, cuda.math_sdp_enabled)
    nodes = (node for module in plan.graph_modules() for node in module.graph.nodes)
    return not all(one() for one in enabled) or any(name(node) == "_sdpa_kernel" for node in nodes)


def _mask_refusal(site: Attention, bodies: Bodies, plan: Plan) -> Refusal | None:
    """Why its mask cannot be handed to a kernel as a predicate."""
    mask, q = site.proof.mask, value(site.call.q)
    assert mask is not None
    if not _is_on_a_gpu(site):
        return Refusal("FlexAttention is taken on GPUs, of bf16 and fp16; here are %s on %s", q.dtype, q.device.type)
    if site.chosen:
        return Refusal("torch.nn.attention.sdpa_kernel chooses the backend, of which FlexAttention is none")
    if not bodies.reaches(site.call.node.graph):
        return Refusal("it is inside a body of control flow")
    written = [
        leaf
        for called, leaf in site.proof.leaves.items()
        if called not in site.proof.readers and plan.writes.anywhere(leaf)
    ]
    if written:
        return Refusal("the graph writes %s, which the mask is made of", written[0].name)
    if any(node.graph is not bodies.root.graph for node in (*site.proof.leaves.values(), *site.proof.readers.values())):
        return Refusal("the mask is made inside the body that is computed again")
    writer = Writer(site.proof.leaves)
    try:
        writer.write((*mask.conditions, *site.proof.alone))
    except NotImplementedError as error:
        return Refusal("its predicate holds %s", str(error))
    missing = Symbols(bodies.root.graph).missing([*map(expression, mask.scores.sizes), *writer.numbers])
    return Refusal("no input of the graph has its size %s", str(missing[0])) if missing else None


def _flex_refusal(site: Attention) -> Refusal | None:
    """Why FlexAttention does not take it."""
    q, v = value(site.call.q), value(site.call.v)
    for width in (q.shape[-1], v.shape[-1]):
        if not (isinstance(width, int) and _WIDTHS[0] <= width <= _WIDTHS[1]):
            return Refusal("heads of %s elements", width)
    least = FLEX_QUERIES if site.call.added.bias is None else BIAS_QUERIES
    if least is None:
        return Refusal("%s; FlexAttention with a bias is slower", site.call.added.unread)
    if statically_known_true(q.shape[2] < least):
        return Refusal("fewer than %d queries, for which a mask as a tensor is as fast", least)
    return None


def _kept_refusal(site: Attention) -> Refusal | None:
    """Why FlashAttention does not take it, with its dropout: Note [Dropout under a padding]."""
    q, v, mask = value(site.call.q), value(site.call.v), site.proof.mask
    assert mask is not None
    width = q.shape[-1]
    read = set[Any]().union(*(condition.free_symbols for condition in mask.conditions))
    if any(one is not None for one in (site.call.softcap, site.call.sinks, site.call.added.bias)) or read & {
        masks.HEAD,
        masks.QUERY,
    }:
        return Refusal("FlexAttention has no dropout, and FlashAttention no mask but a padding")
    if not isinstance(site.call.dropout, float):
        return Refusal("its dropout is known at the call alone")
    if site.attends_to_all:
        return Refusal("there is dropout, and a query that attends to no key attends to all of them alike")
    if not (isinstance(width, int) and width % 8 == 0 and width <= FLASH_WIDTH and v.shape[-1] == width):
        return Refusal("there is dropout, and heads have %s elements", width)
    if not statically_known_true(q.shape[2] >= DROPOUT_QUERIES):
        return Refusal("there is dropout, and fewer than %d queries", DROPOUT_QUERIES)
    return None


def _may_wait(site: Attention, plan: Plan) -> bool:
    """Whether a call may ask the device what the mask hides: Note [Attention that a mask leaves as it is]."""
    assert site.proof.mask is not None
    rest = site.proof.mask.without_data
    plain = rest.is_full or (rest.is_causal and rest.scores.is_square)
    q, v = value(site.call.q), value(site.call.v)
    width = q.shape[-1]
    taken = not statically_known_true(q.shape[2] < WAIT_QUERIES) and width <= CUDNN_WIDTH and width % 8 == 0
    taken = taken and width == v.shape[-1]
    waits = not (plan.options.in_cuda_graphs() or torch.are_deterministic_algorithms_enabled())
    asked = bool(site.proof.mask.data) and not site.proof.mask.is_shifted_by_data
    return plain and taken and waits and asked and not site.proof.mask.smallest


def _unrepeated(site: Attention, plan: Plan) -> tuple[fx.Node, fx.Node] | None:
    """k and v of fewer heads, where they are repeated in front of attention and the kernel takes them as they were."""
    width = value(site.call.q).shape[-1]
    takes = _is_on_a_gpu(site) and isinstance(width, int) and width <= _WIDTHS[1] and site.call.dropout == 0.0
    if not takes or site.chosen or (not site.is_changed and (site.call.given is not None or site.by_hand)):
        return None
    return _sources_of_repeated(site, plan)


def _sources_of_repeated(site: Attention, plan: Plan) -> tuple[fx.Node, fx.Node] | None:
    sources = [_source_of_repeated(one, site.call.node, plan) for one in (site.call.k, site.call.v)]
    if sources[0] is None or sources[1] is None:
        return None
    heads = [value(one).shape[1] for one in sources]  # type: ignore[arg-type]
    return tuple(sources) if statically_known_true(heads[0] == heads[1]) else None  # type: ignore[return-value]


def _source_of_repeated(node: fx.Node, until: fx.Node, plan: Plan) -> fx.Node | None:
    """The tensor (B, KV heads, S, D), still the same at `until`, each head of which is repeated by
    ``x[:, :, None].expand(…).reshape(…)`` or `repeat_interleave`."""
    if name(node) == "repeat_interleave" and node.kwargs.get("dim", (*node.args, None, None)[2]) == 1:
        source: Any = node.args[0]
        return source if isinstance(node.args[1], int) and _same_place(source, node, until, plan) else None
    if name(node) not in ("reshape", "view", "flatten") or not node.args:
        return None
    wide = node.args[0]
    if not is_tensor(wide) or name(wide) != "expand":
        return None
    split = wide.args[0]
    if not is_tensor(split) or value(split).dim() != 5 or not statically_known_true(value(split).shape[2] == 1):
        return None
    source = split.args[0] if split.args else None
    if not is_tensor(source) or name(split) not in ("getitem", "unsqueeze") or not _adds_third(split):
        return None
    b, heads, s, width = value(source).shape
    repeated = value(wide).shape
    expected = (b, heads * repeated[2], s, width)
    known = [statically_known_true(one == other) for one, other in zip(value(node).shape, expected, strict=True)]
    kept = [statically_known_true(repeated[at] == size) for at, size in ((0, b), (1, heads), (3, s), (4, width))]
    return source if all(known + kept) and _same_place(source, node, until, plan) else None


def _adds_third(split: fx.Node) -> bool:
    """Whether a node adds a dimension of one behind the second, and does nothing else."""
    if name(split) == "unsqueeze":
        return split.args[1:] in ((2,), (-3,))
    index = split.args[1]
    whole = slice(None, None, None)
    return isinstance(index, tuple) and index[:3] == (whole, whole, None) and all(one == whole for one in index[3:])


def _same_place(source: Any, node: fx.Node, until: fx.Node, plan: Plan) -> bool:
    if not is_tensor(source) or source.graph is not node.graph:
        return False
    learns = value(source).requires_grad
    if plan.writes.anywhere(source) if learns else plan.writes.between([source], node, until):
        return False
    return learns is value(node).requires_grad


def _name(site: Attention) -> str:
    """What a site's mask is called in reports."""
    if site.proof.mask is None or site.call.added.bias is None:
        return "dense" if site.proof.mask is None else site.proof.mask.name
    return "bias" if site.proof.mask.is_full else f"{site.proof.mask.name}, bias"


def _reported(site: Attention) -> AttentionSite:
    as_tensor = (site.call.given is not None or site.by_hand) and not site.is_changed
    q = value(site.call.q) if is_tensor(site.call.q) else None
    on_a_gpu = q is not None and (q.is_cuda or targets.of(q.device).is_gpu)  # AMD's, too
    slow = as_tensor and on_a_gpu and statically_known_true(q.shape[-2] >= WAIT_QUERIES)  # type: ignore[union-attr]
    return AttentionSite(
        site.fqn,
        _name(site),
        ("by hand" if site.by_hand else "sdpa, the mask as a tensor") if as_tensor else KERNELS[site.kernel],
        None if site.refusal is None else str(site.refusal),
        bool(slow),
    )
