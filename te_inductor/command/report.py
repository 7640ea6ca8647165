"""`te-inductor report`: what each layer loses by quantization, as `te_inductor.accuracy_report` has it."""

import argparse
import json

from te_inductor.api.accuracy import accuracy_report
from te_inductor.command.factory import made, options_of


def run(arguments: argparse.Namespace) -> int:
    """Print it, and draw it."""
    case = made(arguments.model, arguments.set)
    options = {"fallback": "silent"} | options_of(arguments.recipe, arguments.policy)  # the table says it
    report = accuracy_report(case.model, *case.inputs, options=options, loss=case.loss, **case.kwargs)
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=1, default=str))
    else:
        print(report.table(details=arguments.details))
    if arguments.png is not None:
        report.heat_map(arguments.png)
        if not arguments.json:
            print(f"wrote {arguments.png}")
    return 0
