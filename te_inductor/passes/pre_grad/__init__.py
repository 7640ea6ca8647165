"""The passes on the graph that Dynamo hands over, before autograd sees it: find the linear layers (`match/`, in
the forms of `sites/`), decide about each (`decide/`), and put low-precision ones in their place (`rewrite/`). Each pass
takes the compile's one `Plan`. Each stage imports from those before it and from `passes/graph`, never the other way.

`explain` runs DECIDE or DECIDE_EXPORTED alone, `calibrate` FIND once and CHECK for each recipe. REHEARSED rewrites a
graph that will not run, of which nothing outside of it learns: no other rank, guard or build. Graphs that Dynamo did
not make have lists of their own, of the same passes: EXPORTED is for exported programs, TRACED for graphs of forward and
backward.
"""

from collections.abc import Callable

from te_inductor.passes.pre_grad.attention.rewrite import rewrite_attention
from te_inductor.passes.pre_grad.attention.sites import match_attention
from te_inductor.passes.pre_grad.decide.between_ranks import (
    check_exchanges,
    check_gathers,
    compare_ranks,
    follow_ranks,
    leave_ranks,
)
from te_inductor.passes.pre_grad.decide.report import report_sites
from te_inductor.passes.pre_grad.decide.sites import (
    check_extras,
    check_sites,
    merge_sites,
    resolve_recipes,
    weigh_sites,
)
from te_inductor.passes.pre_grad.loss.match import match_losses, report_losses, rewrite_losses
from te_inductor.passes.pre_grad.match.gradients import list_lost_gradients, match_gradients
from te_inductor.passes.pre_grad.match.sites import (
    inline_attention,
    inline_contractions,
    inline_single_products,
    list_products,
    match_sites,
    write_numbers,
)
from te_inductor.passes.pre_grad.plan import Plan
from te_inductor.passes.pre_grad.rewrite.permutations import rewrite_permutations, rewrite_scattered_rows
from te_inductor.passes.pre_grad.rewrite.sites import guard_extras, rewrite_sites, start_builds
from te_inductor.passes.pre_grad.rewrite.traced import (
    refuse_batches,
    refuse_what_has_no_place,
    refuse_what_is_in_no_program,
    rewrite_triples,
    write_slots,
)

Pass = Callable[[Plan], None]

_OPENED: tuple[Pass, ...] = (write_numbers, inline_attention, inline_contractions, match_attention)
_FOUND: tuple[Pass, ...] = (match_sites, list_products)
# What the recipes of the options decide, which may be asked again with other options, of copies of the sites.
CHECK: tuple[Pass, ...] = (resolve_recipes, match_losses, check_sites)
_WEIGHED: tuple[Pass, ...] = (*_FOUND, *CHECK, weigh_sites)
_DECIDED: tuple[Pass, ...] = (check_gathers, check_exchanges, merge_sites, check_extras, report_sites, report_losses)
FIND: tuple[Pass, ...] = (*_OPENED, *_FOUND)
DECIDE: tuple[Pass, ...] = (*_OPENED, *_WEIGHED, *_DECIDED)
_BEGUN: tuple[Pass, ...] = (compare_ranks, leave_ranks, guard_extras, start_builds)
_REWRITE: tuple[Pass, ...] = (rewrite_permutations, rewrite_losses, rewrite_sites)
PASSES: tuple[Pass, ...] = (*_OPENED, rewrite_attention, *_WEIGHED, follow_ranks, *_DECIDED, *_BEGUN, *_REWRITE)
REHEARSED: tuple[Pass, ...] = (*_OPENED, rewrite_attention, *_WEIGHED, *_DECIDED, *_REWRITE)

_CHECKED: tuple[Pass, ...] = (list_products, resolve_recipes, check_sites, refuse_what_has_no_place)
_REPORTED: tuple[Pass, ...] = (weigh_sites, report_sites)
DECIDE_EXPORTED: tuple[Pass, ...] = (match_sites, *_CHECKED, refuse_what_is_in_no_program, *_REPORTED)
EXPORTED: tuple[Pass, ...] = (*DECIDE_EXPORTED, rewrite_sites, write_slots)
TRACED: tuple[Pass, ...] = (
    inline_single_products,
    match_sites,
    match_gradients,
    list_lost_gradients,
    *_CHECKED,
    refuse_batches,
    *_REPORTED,
    rewrite_triples,
    rewrite_scattered_rows,
)
