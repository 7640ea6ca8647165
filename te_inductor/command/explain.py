"""`te-inductor explain`: the report of `te_inductor.explain`, for a model of a factory."""

import argparse
import json

from te_inductor.api.explanation import explain
from te_inductor.command.factory import made, options_of


def run(arguments: argparse.Namespace) -> int:
    """Print it, or write it."""
    case = made(arguments.model, arguments.set)
    options = options_of(arguments.recipe, arguments.policy)
    report = explain(case.model, *case.inputs, options=options, target=arguments.target, **case.kwargs)
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=1, default=str))
        return int(report.failure is not None)
    print(report.table(details=arguments.details))
    if arguments.html is not None:
        arguments.html.write_text(report.to_html())
        print(f"wrote {arguments.html}")
    return int(report.failure is not None)
