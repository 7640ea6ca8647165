"""The operators of this package that a lowered program has."""


def called(program) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


def ours(program) -> set[str]:
    return {name for name in called(program) if name.startswith("te_inductor")}
