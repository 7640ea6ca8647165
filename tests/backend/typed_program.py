"""Calls as users write them, for mypy (`make lint`). Those that no type allows are marked with the error that they have, and
mypy fails where one has none."""

from typing import Any

import torch
from torch import nn

import te_inductor
from te_inductor import CompileOptions, Report, recipes


class Model(nn.Module):
    def generate(self) -> str:
        return ""


def right(model: Model) -> None:
    text: str = te_inductor.quantize_(model).generate()
    te_inductor.quantize_(model, recipes.NVFP4WeightOnly(), {"head": "none"}, "silent").generate()
    te_inductor.quantize_(model, "rowwise", policy={"head": recipes.Float8CurrentScaling()})
    te_inductor.load_quantized(model, "folder", recipes=["block"]).generate()
    policy = {"head": "none"}
    options: CompileOptions = {"recipe": "current", "policy": policy, "wgrad": "main_grad", "fallback": "error"}
    report: Report = te_inductor.explain(model, torch.ones(1), options=options)
    print(text, report.table(), [option.variable for option in te_inductor.list_options()])
    torch.compile(model, backend="te", options=dict[str, Any](options))
    more: CompileOptions = {"policy": {lambda path, sizes: True: "none"}, "recipe": recipes.DelayedScaling()}
    te_inductor.accuracy_report(model, torch.ones(1), options=more)


def wrong(model: Model) -> None:
    te_inductor.quantize_(model).generat()  # type: ignore[operator]
    te_inductor.quantize_(model, 8)  # type: ignore[arg-type]
    te_inductor.quantize_(model, fallback="wran")  # type: ignore[arg-type]
    te_inductor.quantize_(torch.ones(1))  # type: ignore[type-var]
    te_inductor.load_quantized(model, "folder", recipes=[3])  # type: ignore[list-item]
    wrong_name: CompileOptions = {"receipt": "current"}  # type: ignore[typeddict-unknown-key]
    wrong_value: CompileOptions = {"weights": "twice"}  # type: ignore[typeddict-item]
    print(wrong_name, wrong_value)
