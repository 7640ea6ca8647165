"""Reads in a module's source which parts of torch it changes, and what it uses of Inductor's places for others' code."""

import ast
import pkgutil
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet
from typing import Any

MUTATORS = {name for kind in (dict, list, set) for name in dir(kind)}
MUTATORS -= {name for kind in (dict, tuple, frozenset) for name in dir(kind)} - {
    "clear", "pop", "popitem", "setdefault", "update", "__setitem__", "__delitem__", "__ior__",
}  # fmt: skip


class Source:
    """A module, with the dotted names that its own names stand for."""

    def __init__(self, text: str) -> None:
        self.nodes = list(ast.walk(ast.parse(text)))
        self.names: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    self.names[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                self.names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
        while self._learn_aliases():
            pass

    def _learn_aliases(self) -> bool:
        """Names that are assigned a part of torch; whether there was a new one."""
        known = len(self.names)
        for node in self.nodes:
            if isinstance(node, ast.Assign | ast.NamedExpr):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                    pairs = zip(target.elts, node.value.elts, strict=False) if both else [(target, node.value)]
                    for name, value in pairs:
                        if isinstance(name, ast.Name) and (meant := self.meaning(value)) is not None:
                            self.names.setdefault(name.id, meant)
        return len(self.names) > known

    def meaning(self, node: ast.AST) -> str | None:
        """The dotted name that an expression stands for, of an entry that of its table; None of any other."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.meaning(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        if isinstance(node, ast.Subscript):
            owner = self.meaning(node.value)
            return _text(node.slice) if owner == "sys.modules" else owner
        if isinstance(node, ast.Call) and node.args:
            called = node.func.id if isinstance(node.func, ast.Name) else self.meaning(node.func)
            if called == "vars":
                return self.meaning(node.args[0])
            if called in ("sys.modules.get", "importlib.import_module", "pkgutil.resolve_name"):
                return _text(node.args[0])
        return None

    def of_torch(self, node: ast.AST) -> str | None:
        """The meaning, if it is a part of torch."""
        meant = self.meaning(node) or ""
        return meant if meant.partition(".")[0] == "torch" else None

    def changes(self) -> Iterator[str]:
        """The parts of torch that are assigned, deleted, changed by a method, or patched by `unittest.mock`."""
        for node in self.nodes:
            if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
                changed = [self.of_torch(node)]
            elif isinstance(node, ast.Call):
                changed = [self._set(node), self._mutated(node), self._mocked(node)]
            else:
                changed = []
            yield from (one for one in changed if one is not None)

    def _set(self, node: ast.Call) -> str | None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return self.of_torch(node.args[0]) if node.args and name.strip("_") in ("setattr", "delattr") else None

    def _mutated(self, node: ast.Call) -> str | None:
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in MUTATORS:
            return None
        table = self.of_torch(node.func.value)
        return table if table is not None and _is_table(table) else None

    def _mocked(self, node: ast.Call) -> str | None:
        meant = self.meaning(node.func)
        if meant is None or not meant.startswith("unittest.mock.patch") or not node.args:
            return None
        text = _text(node.args[0]) or ""
        return self.of_torch(node.args[0]) or (text if text.partition(".")[0] == "torch" else None)

    def calls(self) -> Iterator[tuple[str, ast.Call]]:
        """Calls of what has a dotted name."""
        for node in self.nodes:
            if isinstance(node, ast.Call) and (meant := self.meaning(node.func)) is not None:
                yield meant, node

    def bases(self) -> Iterator[str]:
        """The parts of torch that classes derive from."""
        for node in self.nodes:
            if isinstance(node, ast.ClassDef):
                yield from (meant for base in node.bases if (meant := self.of_torch(base)) is not None)


def _text(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _is_table(name: str) -> bool:
    """Whether it is something that a method may change; yes where it has no value outside of a compile."""
    try:
        found: Any = pkgutil.resolve_name(name)
    except (AttributeError, ImportError, NotImplementedError):
        return True
    return isinstance(found, MutableMapping | MutableSequence | MutableSet)
