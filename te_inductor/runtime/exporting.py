"""What `torch.export.export` loses of a model that is to run in low precision, said before it does.

Export traces a model without asking any backend: of a model that torch.compile was called with, and of the region that
an `autocast` is around, it takes nothing, and says nothing (torch 2.13)."""

from typing import Any

from torch import nn

from te_inductor import compat
from te_inductor.diagnostics import say
from te_inductor.errors import NOT_EXPORTED
from te_inductor.recipes import regions

_COMPILED = f'te_inductor: torch.export leaves out backend="te" and its recipe, so that {NOT_EXPORTED}'


def note_export(model: object, backend: object) -> None:
    """Say that the export of `model`, which begins, has no low precision: once an export, as the options of the first
    of its compiled modules want it.

    Raises:
        FallbackError: with ``fallback="error"``.
    """
    for module in model.modules() if isinstance(model, nn.Module) else ():
        options: Any = compat.options_of_compiled(module, backend)
        if options is not None:
            say(_COMPILED, options.get("fallback", "warn"))
            return
    regions.export_begins()
