"""What CONTRIBUTING.md says of the package's modules, where no other test holds it: tests/backend/test_imports.py has the
order of imports, tests/backend/test_targets.py who asks devices, tests/backend/test_compat.py who patches torch."""

import ast

from tests.house import nodes

# The modules that read the environment besides config.py, and what of it.
ENVIRONMENT = {
    "command/bench.py": "hands it to the process of an arm",
    "command/doctor.py": "prints it, and gives its checks a cache folder",
    "presentation/tables.py": "COLUMNS, as every program that prints tables",
    "templates/cutlass/build.py": "hands it to the process that builds",
}


def is_attribute(node: ast.AST, expression: str) -> bool:
    same_end = isinstance(node, ast.Attribute) and expression.endswith(f".{node.attr}")
    return same_end and ast.unparse(node) == expression


def test_config_alone_reads_the_packages_variables():
    asking = {path for path, node in nodes(ast.Attribute) if is_attribute(node, "os.environ")}
    assert asking == {"config.py", *ENVIRONMENT}
    assert not [path for path, node in nodes(ast.Attribute) if is_attribute(node, "os.getenv")]


def test_compat_alone_asks_for_torchs_version():
    """Others print it."""
    compared = ((path, part) for path, node in nodes(ast.Compare) for part in ast.walk(node))
    assert {path.partition("/")[0] for path, part in compared if is_attribute(part, "torch.__version__")} == {"compat"}
