"""Passes of ours where torch has room for one on its graphs, and the digest of the package that both compile caches
hold."""

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from te_inductor.kernels import cutlass_packages, cutlass_tables


class GraphPass(CustomGraphPass):  # type: ignore[misc]
    """A pass of ours where torch has room for one: it runs after the user's own, if there is one.

    Its `uuid` also stands in both compile caches for everything of ours that Inductor's key does not see: the
    lowerings, whether CUTLASS is installed, and which, and the user's tables."""

    def __init__(
        self, user_pass: Callable[[fx.Graph], Any] | None, passes: Sequence[Callable[[fx.Graph], None]]
    ) -> None:
        self.user_pass, self.passes = user_pass, tuple(passes)

    def __call__(self, graph: fx.Graph) -> None:
        if self.user_pass is not None:
            self.user_pass(graph)
        for one in self.passes:
            one(graph)

    def uuid(self) -> Any:
        """None, which turns the cache off, where the user's pass has no identity."""
        ours = package_hash(), cutlass_packages.identity(), cutlass_tables.identity()
        if self.user_pass is None:
            return ours
        theirs = self.user_pass.uuid() if isinstance(self.user_pass, CustomGraphPass) else None
        return None if theirs is None else (*ours, theirs)


@functools.cache
def package_hash() -> str:
    """A digest of the package's sources: an edited package never meets kernels that an older one wrote."""
    digest, root = hashlib.sha256(), str(Path(__file__).parents[2])
    files = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
    for path in sorted(path for path in files if path.endswith((".py", ".json"))):  # and tuned tables
        digest.update(path.removeprefix(root).encode())
        with open(path, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()
