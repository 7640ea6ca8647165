"""What runs where, and why not: refusals, the one warning of a compile, and the log.

``TORCH_LOGS="te_inductor"`` shows the report of each compile, and ``"+te_inductor"`` its passes and sites besides.
tlparse shows the reports among a compile's artifacts.
"""

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from te_inductor.errors import FallbackError, FallbackWarning
from te_inductor.presentation.paths import HIDDEN, first_of, grouped, nearest, shown
from te_inductor.presentation.report import Report
from te_inductor.presentation.tables import percent

log = logging.getLogger("te_inductor")


class Refusal:
    """Why a site stays as it is. The text is formatted only when it is read."""

    outside = False  # whether recipes are not for such a product, so that high precision is what is meant

    def __init__(self, template: str, *args: object) -> None:
        self.template, self.args = template, args

    def __str__(self) -> str:
        return self.template % self.args

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class Outside(Refusal):
    """Why a product is in high precision that no recipe is for. That is no fallback, so that nothing warns of it."""

    outside = True


def announce(report: Report, fallback: str) -> None:
    """Warn once of all that does not run as asked, or raise, or keep silent: what `options["fallback"]` says.

    Raises:
        FallbackError: with ``fallback="error"``.
    """
    log.info("%s", report)
    for site in report.sites:
        log.debug("%s", site)
    text = summary(report)
    if text is None:
        return
    left_out = {site.fqn for site in report.sites if site.recipe == "none" or site.outside}  # which is meant
    unmet = [unmet for unmet in report.unmet if unmet.fqn not in left_out]
    if fallback == "error" and not (report.fallbacks or unmet or report.failure):
        fallback = (
            "warn"  # a policy entry that this graph does not use may be used by the next one, behind a graph break
        )
    say(text, fallback)


def say(text: str, fallback: str) -> None:
    """Warn, raise or keep silent: what `options["fallback"]` says.

    Raises:
        FallbackError: with ``fallback="error"``.
    """
    if fallback == "error":
        raise FallbackError(text)
    if fallback == "warn":
        warnings.warn(text, FallbackWarning, stacklevel=_users_level())


# contextlib is among them: its decorators stand between their callers and what they decorate.
_OURS = (str(Path(__file__).parent), str(Path(torch.__file__).parent), contextlib.__file__)


def _users_level() -> int:
    """The `stacklevel` at which `say` names the user's line: that of the first caller in neither this package nor torch,
    which calls a backend while a call of the user's waits; as `skip_file_prefixes` has it from Python 3.12 on."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_ours(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level if not _is_ours(frame.f_code.co_filename) else 2


def _is_ours(file: str) -> bool:
    return file.startswith(_OURS) or file.startswith("<")  # code that torch writes has no file


def summary(report: Report) -> str | None:
    """The text of the warning, None where everything runs as asked."""
    lines = []
    places = {(site.fqn, site.pattern) for site in report.sites if not site.outside}
    for emulated, verb in ((False, "stay in high precision"), (True, "are emulated")):
        fallen = [site for site in report.fallbacks if (site.kernel == "emulated") == emulated]
        if fallen:
            count = len({(site.fqn, site.pattern) for site in fallen})
            lines.append(f"te_inductor: {count} of {len(places)} linear sites {verb}:")
        for reason, group in grouped(fallen, lambda site: site.reason).items():
            share = report.flops.share_of(group)
            part = "" if share is None else f" ({percent(share)} of FLOPs)"
            lines.append(f"  {reason}: {shown(site.fqn for site in group)}{part}")
    if report.flops.total and any(site.kernel == "high_precision" for site in report.fallbacks):
        lines.append(f"te_inductor: {report.flops}")
    for entry in report.unused_policy if places else ():  # an optimizer's graph is not what a policy is about
        known = sorted({fqn for fqn, _ in places})
        lines.append(
            f"te_inductor: policy entry {entry!r} matches no linear site of this graph{HIDDEN}"
            f" (sites: {', '.join(known[:4])}{', …' * (len(known) > 4)}){nearest(entry, known)}"
        )
    for (option, reason), unmet in grouped(report.unmet, lambda one: (one.option, one.reason)).items():
        lines.append(f"te_inductor: option {option!r} does not reach, because {reason}: {shown(u.fqn for u in unmet)}")
    for reason, attention in grouped((site for site in report.attention if site.slow), lambda one: one.reason).items():
        names = shown(site.fqn for site in attention)
        lines.append(
            "te_inductor: attention stores its scores or reads its mask as a tensor, several times slower, because"
            f" {reason}: {names}"
        )
    if report.failure:
        lines.append(f"te_inductor: compiled without low precision, because a pass of ours failed:\n{report.failure}")
    return "\n".join(lines) or None


def uncompiled(failure: str) -> str:
    """The text of the warning about a graph whose code Inductor could not write to a file."""
    return (
        "te_inductor: a graph runs uncompiled, as files could not be written; set TORCHINDUCTOR_CACHE_DIR to a"
        f" folder that can be written\n{failure}"
    )


NEGATED = (
    "te_inductor: a graph runs uncompiled, as one of its inputs is a view that negates what it reads (Tensor.is_neg()), as"
    " z.conj().imag is, whose sign Inductor loses; pass x.resolve_neg()"
)


def without_state(fqns: Iterable[str]) -> str:
    """The text of the warning about delayed scaling that has to cast and has recorded no amax yet."""
    return (
        "te_inductor: delayed scaling has seen no step of these sites. This graph runs without gradients, so it records no"
        " amaxes, and casts by each tensor's own amax, which is as slow as recipe 'current':"
        f" {shown(fqns)};"
        " train first, or load what te_inductor.state_dict returned with te_inductor.load_state_dict"
    )


def without_amaxes(fqns: Iterable[str], calls: int) -> str:
    """The text of the warning about training in which delayed scaling never sees some tensor."""
    return (
        f"te_inductor: after {calls} calls delayed scaling has no amax of some tensors of these sites, as their gradients"
        " were zero, or no backward ran. Until it has, all of their graph casts by each tensor's own amax, which is as"
        f" slow as recipe 'current': {shown(fqns)};"
        " call the model under torch.no_grad() where no backward follows, and leave layers that get no gradient out by"
        " the option 'policy'"
    )


def misfitting(found: Sequence[tuple[str, Any, float]]) -> str:
    """The text of the warning about scales of delayed scaling that did harm; `found` are
    `runtime.state.misfits.Harm`."""
    name, counts, excess = max(found, key=lambda one: (one[1].failing, one[2]))
    many = f"{len(found)} tensors, the worst of them {name}" if len(found) > 1 else name
    beyond = f", its amax at most {excess:.3g} times the largest value that the scale held" if counts.cut else ""
    return (
        "te_inductor: delayed scaling cast tensors with scales that did not suit them, as their amaxes were far from those"
        f" of earlier steps: {many}, from its step {counts.first} on: values were cut off in {counts.cut} and digits lost in"
        f" {counts.coarse} of {counts.steps} steps{beyond} (said once a process; te_inductor.statistics(model) has all);"
        " clip outliers in front of these layers, or keep them out of histories by the option guard='heal'. Where"
        " magnitudes change from step to step, give the layers recipe 'current', which needs no history, by the option"
        " 'policy', or pass DelayedScaling(margin=…) against values cut off, and a shorter amax_history_len against lost"
        " digits"
    )


GUARD_RESIZED = (
    "te_inductor guard: sizes of inputs changed by a factor of 2 or more, so that this call casts by own amaxes"
)


def guard_kept_out(tensors: Sequence[str]) -> str:
    """The text of the log about outliers that enter no history."""
    return f"te_inductor guard: an outlier was kept out of the history of {first_of(tensors)}"


def guard_casts(tensors: Sequence[str]) -> str:
    """The text of the log about calls in which tensors are cast by their own amaxes."""
    return (
        f"te_inductor guard: calls cast by own amaxes until scales suit again, as those of {first_of(tensors)} did not; a"
        " layer that keeps coming back is moved to another recipe"
    )


def guard_moved(tensors: Sequence[str], recipes: Sequence[str]) -> str:
    """The text of the log about layers that run by another recipe."""
    return (
        f"te_inductor guard: no scale of delayed scaling kept suiting {first_of(tensors)}; the layers that read them run by"
        f" recipe {_either(recipes)} from the next call on, or in high precision where that is refused. Their graph is"
        " compiled anew for it, once, and te_inductor.state_dict saves it"
    )


def guard_stays(tensors: Sequence[str], why: str) -> str:
    """The text of the warning about layers that a guard would move and cannot."""
    return (
        f"te_inductor: no scale of delayed scaling kept suiting {first_of(tensors)}, and the layers that read them are"
        f" not moved to another recipe, because {why} (said once); give these layers recipe 'rowwise', 'block' or 'none'"
        " by the option 'policy'"
    )


def moved_elsewhere(fqns: Iterable[str], recipes: Sequence[str]) -> str:
    """The text of the warning about layers that saved state says are moved, and that this graph does not."""
    return (
        f"te_inductor: the state that was loaded says that a guard had moved these layers to recipe {_either(recipes)}, and"
        f" this graph runs them under delayed scaling: {shown(fqns)}; load it before the first call, compile with"
        f" guard='heal', or give them recipe {_either(recipes)} by the option 'policy'"
    )


def _either(recipes: Sequence[str]) -> str:
    return " or ".join(map(repr, recipes))


def state_was_lost(fqns: Iterable[str]) -> str:
    """The text of the warning about training that resumes without its scales."""
    return (
        "te_inductor: delayed scaling starts without history at sites whose parameters were trained before, as the"
        f" optimizer's state tells: {shown(fqns)}; save te_inductor.state_dict(model) in each checkpoint, and load it"
        " with te_inductor.load_state_dict(model, state) before training goes on"
    )


def amaxes_stay_local(reason: str) -> str:
    """The text of the warning about ranks that do not reduce the amaxes of delayed scaling together."""
    return (
        f"te_inductor: amaxes of delayed scaling are not reduced over ranks, as {reason}; each rank scales by its own;"
        f" pass {_LOCAL} where that is meant"
    )


_LOCAL = "options={'amax_group': 'none'} or DelayedScaling(reduce_amax=False)"


def amaxes_have_no_group(fqns: Iterable[str]) -> str:
    """The text of the warning about delayed scaling on several ranks that reduces nothing, as nobody says over what."""
    return (
        "te_inductor: amaxes of delayed scaling are not reduced over ranks, as the parameters of these sites are neither"
        " sharded (FSDP2, DTensor) nor in a DistributedDataParallel whose ranks run the same layers equally often (without"
        f" find_unused_parameters and join()): {shown(fqns)}; each rank scales by its own; pass options={{'amax_group':"
        f" …}}, a DeviceMesh, a ProcessGroup or its name, to reduce them, or {_LOCAL} where that is meant"
    )


COMPUTED_AGAIN = (
    "te_inductor: a checkpoint around a compiled module runs its forward again, which under delayed scaling is another"
    " step: it records its amaxes twice, and its gradients belong to a forward with the next step's scales; compile the"
    " function that calls torch.utils.checkpoint, not the module that it is given, or use a recipe without state"
)


CUT_BY_DDP = (
    "te_inductor: Dynamo cuts graphs where DistributedDataParallel's buckets of gradients end, 25 MB by default, and each"
    " piece is compiled by itself: casts are not fused with what lies in another piece, and layers that read one input"
    " are not one GEMM. Where blocks are compiled one by one, set torch._dynamo.config.optimize_ddp = False; where the"
    " whole model is, give DistributedDataParallel a bucket_cap_mb of a few blocks"
)
