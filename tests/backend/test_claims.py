"""What CONTRIBUTING.md says of the package's modules, where no other test holds it: tests/backend/test_imports.py has the
order of imports, tests/backend/test_targets.py who asks devices, tests/backend/test_compat.py who patches torch."""

import ast
from collections.abc import Iterator

from tests.house import trees

# The modules that read the environment besides config.py, and what of it.
ENVIRONMENT = {
    "command/bench.py": "hands it to the process of an arm",
    "command/doctor.py": "prints it, and gives its checks a cache folder",
    "presentation/tables.py": "COLUMNS, as every program that prints tables",
    "templates/cutlass/build.py": "hands it to the process that builds",
}


def modules_with(expression: str, within: type[ast.AST] = ast.Module) -> Iterator[str]:
    """The modules in which an expression stands inside of such a node."""
    for path, tree in trees().items():
        nodes = (node for outer in ast.walk(tree) if isinstance(outer, within) for node in ast.walk(outer))
        if any(isinstance(node, ast.Attribute) and ast.unparse(node) == expression for node in nodes):
            yield path


def test_config_alone_reads_the_packages_variables():
    assert set(modules_with("os.environ")) == {"config.py", *ENVIRONMENT}
    assert not list(modules_with("os.getenv"))


def test_compat_alone_asks_for_torchs_version():
    """Others print it."""
    assert {path.partition("/")[0] for path in modules_with("torch.__version__", ast.Compare)} == {"compat"}
