"""What `options={"batch_invariant": True}` asks of a graph: that the numbers of a row depend on no other row, on how many
there are, or on whether the graph trains.

# Note [Rows by themselves]
Four things make a row's numbers depend on what stands beside it, and each has its rule in one place:

- **Casts.** A scale that other rows have a part in. `check_order` leaves layers in high precision whose input has
  such scales, and says so. The size rule, which goes by M, is not asked, nor does a policy's function see M.
- **Products.** All forward products of layers and of attention are summed in one order: Note [One order of sums] in
  kernels/fixed_order.py. Others are named: option 'batch_invariant' does not reach them.
- **Reductions.** A norm's and a softmax's: on CUDA each row is summed by one program with one tile, whatever else its
  kernel does (lowerings/choices.py); on a CPU element by element, by code without vectors and threads.
- **Rounding.** Inductor keeps what it fuses in fp32, and what it fuses depends on sizes and on what a backward saves.
  It is told to round each operator's result to its dtype, as eager code does, and to fuse no multiply and add.

A loss is computed as the program wrote it: in chunks, logits would be rounded otherwise than those that an evaluation
reads."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from te_inductor.config import Options
from te_inductor.diagnostics import Refusal
from te_inductor.errors import OptionError
from te_inductor.passes.graph.effect import Effect
from te_inductor.passes.graph.module_path import module_path
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.attention.inputs import Inputs
from te_inductor.passes.pre_grad.attention.site import Attention
from te_inductor.passes.pre_grad.attention.sites import find, match_attention, shape_refusal
from te_inductor.passes.pre_grad.decide import transforms
from te_inductor.passes.pre_grad.decide.sites import check_sites, refusal_of_dtypes, weigh_sites
from te_inductor.passes.pre_grad.loss.match import match_losses
from te_inductor.passes.pre_grad.plan import Candidate, Plan
from te_inductor.passes.pre_grad.sites.part import TensorParallel
from te_inductor.passes.pre_grad.sites.rule import Match
from te_inductor.presentation.report import Unmet
from te_inductor.recipes import Quantizer

OPTION = "batch_invariant"
# What Inductor is told; names that a release does not have are left out.
INDUCTOR: dict[str, object] = {
    "emulate_precision_casts": True,  # and no multiplication is fused with an addition
    "batch_invariant": True,  # configurations of reductions that do not go by the number of rows
    "max_autotune": False,  # whose choices are those of a size
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "online_softmax": False,  # whose running sum is scaled as often as its largest element changes
    "triton.cooperative_reductions": False,  # several programs for one row
    "triton.multi_kernel": 0,  # measures which of two reductions is faster
    "triton.tile_reductions": False,
    "cpp.simdlen": 1,  # no vectors: their lanes are partial sums, and their functions others than those of scalars
    "cpp.threads": 1,  # no partial sums of threads
}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _check(options: Options) -> None:
    """
    Raises:
        OptionError: the program tells Inductor otherwise.
    """
    told = dict(torch._TorchCompileInductorWrapper(options.mode, dict(options.inductor), None).config)
    for name, expected in INDUCTOR.items():
        if told.get(name, expected) != expected:
            given = f"mode {options.mode!r}" if name not in options.inductor else f"Inductor's option {name!r}"
            raise OptionError(
                f"{given} has {name} = {told[name]!r} beside option {OPTION!r}, expected {expected!r}: kernels would be"
                " chosen by sizes; leave one of them out"
            )


def _tell(_: Plan, patches: dict[str, Any]) -> None:
    from torch._inductor import config

    known = config.get_config_copy()
    patches |= {name: expected for name, expected in INDUCTOR.items() if name in known}


def match_ordered_attention(plan: Plan) -> None:
    """Find attention, and have its products summed in one order."""
    find(plan, _decide_attention)


def _decide_attention(site: Attention, inputs: Inputs, plan: Plan) -> None:
    site.refusal = _attention_refusal(site)
    if site.refusal is None:
        site.kernel = "fixed"
    else:
        plan.outcome.report.unmet.append(Unmet(OPTION, site.fqn, str(site.refusal)))


def _attention_refusal(site: Attention) -> Refusal | None:
    """Why attention cannot be summed in one order."""
    call = site.call
    if site.by_hand:
        return Refusal("attention is written by hand, expected F.scaled_dot_product_attention")
    if call.dropout:
        return Refusal("attention has a dropout of %s, expected 0", call.dropout)
    refusal = shape_refusal(site, {})
    if refusal is not None:
        return refusal
    q, k, v = (value(node) for node in (call.q, call.k, call.v))
    if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[1:3] != v.shape[1:3] or q.shape[1] % k.shape[1]:
        sizes = ", ".join(str(tuple(one.shape)) for one in (q, k, v))
        return Refusal("attention of q, k and v of sizes %s, expected one batch and heads in groups", sizes)
    return None


def check_order(plan: Plan) -> None:
    """Has forwards summed in one order, leaves layers in high precision whose casts make rows depend on each other, and
    names what is not summed so."""
    summed, transforms_of = set(), transforms.transforms_of(plan.gm)
    for site in plan.candidates:
        if site.recipe is not None and site.refusal is None:
            site.refusal = _refusal(site)
            if site.refusal is not None:
                site.precision = replace(site.precision, stored=site.stored and not site.precision.learns, learns=False)
        slots, why = site.slots, None if site.low else _of_high(site, transforms_of.get(site.match.node), plan)
        if slots is not None:
            slots = replace(slots, fprop=replace(slots.fprop, fixed_order=True, fast_accum=False))
        site.precision = replace(site.precision, slots=slots, in_order=why is None)
        if why is None:
            summed.add(site.match.node)
        else:
            site.unmet[OPTION] = why
    others = (one for one in plan.products.all if one.node not in summed | plan.products.backward)
    known = {site.match.node for site in plan.candidates}
    plan.outcome.report.unmet.extend(
        Unmet(OPTION, module_path(one.node), f"it is a product that is no linear layer ({one.pattern})")
        for one in others
        if one.node not in known and one.sizes[-1] != 1
    )


def _refusal(site: Candidate) -> Refusal | None:
    """Why a site in low precision would have rows depend on each other."""
    match = site.match
    if match.groups is not None:
        return Refusal("option %r: products of experts are summed by groups of rows", OPTION)
    if match.part(TensorParallel) is not None or match.arrives is not None:
        return Refusal("option %r: rows or sums go between ranks", OPTION)
    if site.precision.learns:
        return Refusal("option %r: kernels of weights stored as they learn are chosen by the number of rows", OPTION)
    if site.slots is None:
        return None
    shared = _shared_scale(site.slots.input)
    if shared is not None:
        return Refusal(
            "option %r: rows of its input share a scale (%s), expected scales of rows or of blocks of a row, as of recipe"
            " 'rowwise', 'block' or 'mxfp8'",
            *(OPTION, shared),
        )
    if site.slots.fprop.microscaled and site.emulated is None:
        return Refusal("option %r: tensor cores for microscales have no kernel of one order of sums", OPTION)
    return None


def _shared_scale(quantizer: Quantizer) -> str | None:
    """What shares a scale that is no row and no part of one."""
    scope = quantizer.granularity
    if scope.two_level and not quantizer.rows_have_factors:
        return f"{scope.name}, and a factor of the tensor"
    return scope.name if scope.whole or (scope.blocked and scope.block[0] > 1) else None


def _of_high(site: Candidate, within: str | None, plan: Plan) -> Refusal | None:
    """Why a site in high precision, within these transforms, cannot be summed in one order."""
    match: Match = site.match
    if within is not None:
        return Refusal("inside a transform of torch.func (%s)", within)
    if site.stored:
        return Refusal("its weight is stored, and kernels of stored weights are chosen by the number of rows")
    if match.groups is not None or match.part(TensorParallel) is not None or match.arrives is not None:
        return Refusal("it is a product of experts, or rows and sums go between ranks")
    dtypes: list[Any] = [value(node).dtype for node in (match.x, match.weight, match.node)]
    if not set(dtypes) <= set(_DTYPES):
        return Refusal("its dtypes are %s, expected float32, bfloat16 or float16", ", ".join(map(str, dtypes)))
    return refusal_of_dtypes(match, plan) or match.first_refusal(lambda part: part.refuse(match))


# What stands in the place of some passes. Those that have nothing there go by the number of rows, or have a loss round
# logits otherwise than an evaluation reads them.
_INSTEAD: dict[Callable[[Plan], None], tuple[Callable[[Plan], None], ...]] = {
    match_attention: (match_ordered_attention,),
    match_losses: (),
    check_sites: (check_sites, check_order),
    weigh_sites: (),
}

EFFECT = Effect(lambda options: options.batch_invariant, _tell, _check, rows_alone=True, instead=_INSTEAD)
