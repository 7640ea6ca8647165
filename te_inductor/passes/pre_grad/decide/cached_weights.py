"""Weights that are cast when they have changed, and not at each call: Note [A weight that has not changed]. Which sites
can have them, and the inputs that bring their copies into the graph.

# Note [Copies that pay]
A step of k microbatches casts each weight once where its copies are kept, and k times where they are not; each call
looks at the weight, and 2 bytes a weight more stay in memory. Two Llama-3-8B layers, microseconds of a microbatch's
casts (H200, torch 2.11.0+cu130, triton 3.6.0, 2026-11-23)::

                                  current   rowwise   delayed   block   mxfp8   nvfp4
    kept, has not changed             228       359       235     209     257     261
    kept, has changed                 641       812       494     528    1014    1037
    cast at each call                1070       997       687     527    1535    2085

and milliseconds of a step, cast at each call and kept (in turn on one card, medians of seven rounds)::

                                  current          rowwise          delayed          block
    4096 tokens               14.21,  13.75    14.87,  14.74    13.62,  13.39    15.26,  15.28
    four times 4096           57.22,  54.96    60.15,  58.43    54.72,  53.34    61.20,  60.62
    16384 tokens              71.35,  71.01                     69.77,  69.26    78.18,  77.63
    twice 16384              143.42, 141.99                    139.58, 138.97   156.56, 156.17

MXFP8 and NVFP4, whose GEMMs that card emulates, gain 2.0% and 3.8% of a step of one call, 3.8% and 5.6% of one of four.
Copies lift the peak of memory, which is not above that of bf16 otherwise: to 1.04 to 1.15 times bf16's with 8192 tokens
or fewer (H100). So they are kept where the user asks for it."""

from collections.abc import Sequence

import torch

from te_inductor import compat, targets
from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.values import value
from te_inductor.passes.graph.writes import Writes
from te_inductor.passes.pre_grad.sites.rule import Match
from te_inductor.recipes import Slots
from te_inductor.recipes.formats import E2M1

# The scopes of scales that templates/triton/cached_weights.py casts with.
SCOPES = ("tensor", "row", "128x128", "1x32", "32x32", "1x16", "16x16")


def refusal(match: Match, slots: Slots, bodies: Bodies, examples: Sequence[object], writes: Writes) -> Refusal | None:
    """Why a site's weight is cast at each call all the same; `examples` are the inputs that the graph is compiled for,
    `writes` what it writes."""
    if (of_part := match.first_refusal(lambda part: part.refuse_kept(slots))) is not None:
        return of_part
    if slots.weight.scope not in SCOPES:
        return Refusal("copies with scales of %s are not kept", slots.weight.scope)
    of_codes = slots.weight.format.coded and slots.weight.format is not E2M1
    if of_codes and targets.of(value(match.weight).device).is_gpu:
        return Refusal("the kernel that keeps copies does not cast to %s", slots.weight.element)
    if slots.weight.candidates and targets.of(value(match.weight).device).is_gpu:
        between = " and ".join(f"{candidate:g}" for candidate in reversed(slots.weight.candidates))
        return Refusal("the kernel that keeps copies does not choose between %s", between)
    if not bodies.reaches(match.node.graph):
        return Refusal("inside a control-flow body, which kept copies do not reach")
    node = bodies.outer(match.weight)
    weight = value(node)
    held = node.op in ("placeholder", "get_attr") and isinstance(weight, torch.nn.Parameter)
    if not (held and weight.dim() == match.dims):
        return Refusal("the weight is computed in the graph, or one of several in a parameter")
    if writes.anywhere(node):
        return Refusal("the weight is changed in the graph, and copies are made before it runs")
    if not weight.is_contiguous():
        return Refusal("a parameter of shape %s has strides %s", tuple(weight.shape), weight.stride())
    if node.op == "placeholder":
        parameter = bodies.held(node, examples)
        if isinstance(parameter, torch.Tensor) and compat.is_gathered(parameter):
            return Refusal("FSDP lets go of the parameter behind each use, and copies would stay")
    return None


def group_refusal(group: Sequence[Match]) -> Refusal | None:
    """Why sites that are one GEMM have no copies that are kept, whatever each of them says."""
    if group[0].transposed:
        return Refusal("parameters of (K, N) that are one GEMM stand beside each other, and copies are made row by row")
    return None
