"""What the package replaces of torch: each place has a record, and for each record torch has the fault that it names."""

import ast
import pkgutil
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet
from pathlib import Path
from typing import Any

import te_inductor

PACKAGE = Path(te_inductor.__file__).parent


class Module:
    """What a module's names mean, as far as they are torch's or the standard library's."""

    def __init__(self, source: str) -> None:
        self.tree = ast.parse(source)
        self.names: dict[str, str] = {}  # dotted names, by the name that stands for them
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.names[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                self.names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
        while self._aliases():
            pass

    def _aliases(self) -> bool:
        """Learn names that are given to parts of torch; whether there was a new one."""
        known = len(self.names)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign | ast.NamedExpr):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    pairs = [(target, node.value)]
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                        pairs = [*zip(target.elts, node.value.elts, strict=False)]
                    for name, value in pairs:
                        if isinstance(name, ast.Name) and (meant := self.meaning(value)) is not None:
                            self.names.setdefault(name.id, meant)
        return len(self.names) > known

    def meaning(self, node: ast.AST) -> str | None:
        """The dotted name that an expression stands for: of an entry, that of its table."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.meaning(node.value)
            return f"{owner}.{node.attr}" if owner is not None else None
        if isinstance(node, ast.Subscript):
            owner = self.meaning(node.value)
            return _module_named(node.slice) if owner == "sys.modules" else owner
        if isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else self.meaning(node.func)
            if called == "vars" and node.args:
                return self.meaning(node.args[0])
            if called in ("sys.modules.get", "importlib.import_module") and node.args:
                return _module_named(node.args[0])
        return None

    def torchs(self, node: ast.AST) -> str | None:
        """The dotted name, if it is torch's."""
        meant = self.meaning(node)
        return meant if meant is not None and meant.partition(".")[0] == "torch" else None

    def patches(self) -> Iterator[str]:
        """Whatever replaces a part of torch, as the name of that part."""
        for node in ast.walk(self.tree):
            targets: list[ast.AST] = []
            if isinstance(node, ast.Assign | ast.Delete):
                targets = [one for target in node.targets for one in ast.walk(target) if hasattr(one, "ctx")]
                targets = [one for one in targets if not isinstance(one.ctx, ast.Load)]
            elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
                targets = [node.target]
            for target in targets:
                if isinstance(target, ast.Attribute | ast.Subscript) and (meant := self.torchs(target)) is not None:
                    yield meant
            if isinstance(node, ast.Call):
                yield from self._called(node)

    def _called(self, node: ast.Call) -> Iterator[str]:
        if isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr") and node.args:
            if (meant := self.torchs(node.args[0])) is not None:
                yield meant
        elif isinstance(node.func, ast.Attribute):
            table = self.torchs(node.func.value)
            if node.func.attr in ("__setattr__", "__delattr__") and node.args:
                table = self.torchs(node.args[0]) or table
            elif node.func.attr not in MUTATORS or table is None or not _is_table(table):
                table = None
            if table is not None:
                yield table
        meant = self.meaning(node.func)
        if meant is not None and meant.startswith("unittest.mock.patch") and node.args:
            if (target := self.torchs(node.args[0]) or _module_named(node.args[0])) is not None:
                yield target


MUTATORS = {name for kind in (dict, list, set) for name in dir(kind)} - {
    name for kind in (tuple, frozenset) for name in dir(kind)
}
MUTATORS -= {"copy", "get", "items", "keys", "values", "fromkeys"}


def _module_named(node: ast.AST) -> str | None:
    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    return text if text.partition(".")[0] == "torch" else None


def _is_table(name: str) -> bool:
    """Whether it is something that a method can change; taken for one where it has no value here."""
    try:
        found: Any = pkgutil.resolve_name(name)
    except (AttributeError, NotImplementedError, ImportError):
        return True
    return isinstance(found, MutableMapping | MutableSequence | MutableSet)


if __name__ == "__main__":
    for path in sorted(PACKAGE.rglob("*.py")):
        m = Module(path.read_text())
        for name in m.patches():
            print(path.relative_to(PACKAGE), name)
    print(MUTATORS)
    seen = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        m = Module(path.read_text())
        for node in ast.walk(m.tree):
            if isinstance(node, ast.Call) and (meant := m.torchs(node.func)):
                last = meant.rpartition(".")[2]
                if last.startswith(("register", "set_", "patch", "add_", "define","impl", "allow", "skip")):
                    seen.setdefault(meant, []).append(str(path.relative_to(PACKAGE)))
            if isinstance(node, ast.ClassDef):
                for b in node.bases:
                    if (meant := m.torchs(b)):
                        seen.setdefault("class " + meant, []).append(str(path.relative_to(PACKAGE)))
    for k, v in sorted(seen.items()): print(k, v)
