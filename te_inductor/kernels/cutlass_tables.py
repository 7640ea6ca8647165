"""The tables of where a CUTLASS tile was measured to multiply faster than cuBLASLt: one table a device, by the device's
name.

The package's tables are the files of `measured/`. A folder that TE_INDUCTOR_TABLES names may hold more, as
`te-inductor tune` writes them; there a device's table takes the place of the package's. cuBLASLt multiplies on a device
without a table.

# Note [Between measured shapes]
A table has some hundred shapes, a model others. With each row of the H200's table for plain GEMMs left out in turn, the
row nearest to it, mostly a factor of two away, named a tile 391 times; in 100 of them no tile had beaten cuBLASLt at
that shape, and the best was up to 15% slower. So a row answers alone for shapes within `SAME` of its own. For shapes up
to `NEAR` away the two nearest rows have to name a tile, and both have to have gained `CLEAR`: then it is 25 of 198, at
the price of half the gains between rows. Measure a model's own shapes where that matters (``te-inductor tune
--shapes``)."""

import functools
import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from te_inductor import config
from te_inductor.errors import OptionError
from te_inductor.kernels.cutlass_tiles import ARCHITECTURES, Tile, scope_of, supports
from te_inductor.kernels.problem import Problem, Sizes

FOLDER = Path(__file__).parent / "measured"
SAME = 1.1  # M, N and K are each within this factor of a measured shape's: the same shape
NEAR = 2.0  # likewise: near enough for two rows to stand for it
CLEAR = 1.03  # cuBLASLt's time over the tile's, of rows that stand for shapes further away than SAME
SIZES = ("m", "n", "k")
# The steps of a gating, SwiGLU's, with which tables are made: a tanh takes many instructions, which no product hides.
MEASURED_STEPS = frozenset({"add", "sub", "mul", "neg", "sigmoid"})


@dataclass(frozen=True, eq=False)  # by identity, so that it may be an argument of a cached function
class Table:
    """What was measured on one device."""

    device: str  # as torch names it, such as "NVIDIA H200"
    arch: str  # a key of ARCHITECTURES
    torch: str  # its version
    packages: tuple[str, ...]  # CUTLASS's and their versions
    # A problem, the tile (None: cuBLASLt), microseconds of both, the date.
    rows: tuple[dict[str, Any], ...]
    path: Path

    @property
    def dates(self) -> str:
        """The first and the last day of its measurements."""
        days = sorted({row["date"] for row in self.rows})
        return "nothing" if not days else days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"

    @property
    def is_users(self) -> bool:
        """Whether it is of the user's folder."""
        return self.path.parent != FOLDER


def of(device: str) -> Table | None:
    """The table of a device by its name; None where there is none.

    Raises:
        OptionError: the user's folder is not there, or has a file that is no table.
    """
    return _tables(config.tables()).get(device)


def check() -> None:
    """Read the user's tables, if there are any; the package's are read where a device has one.

    Raises:
        OptionError: as `of`.
    """
    if config.tables() is not None:
        _tables(config.tables())


def identity() -> str:
    """The identity of the user's tables, for the keys of generated code. The package's are part of its digest."""
    folder = config.tables()
    return "" if folder is None else _digest(folder)


def file_name(device: str) -> str:
    return re.sub("[^a-z0-9]+", "_", device.lower()).strip("_") + ".json"


@functools.cache
def _tables(folder: Path | None) -> dict[str, Table]:
    """The tables by device. A process reads them once: what is measured later counts in the next one."""
    files = sorted(FOLDER.glob("*.json"))
    if folder is not None:
        if not folder.is_dir():
            raise OptionError(f"{config.TABLES} is {str(folder)!r}, expected a folder, as `te-inductor tune` writes it")
        files += sorted(folder.glob("*.json"))
    return {table.device: table for table in map(read, files)}


@functools.cache
def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.json")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read(path: Path) -> Table:
    """A table's file.

    Raises:
        OptionError: it is no table, with what is wrong.
    """
    try:
        data = json.loads(path.read_text())
        rows = tuple(data["rows"])
        if data["arch"] not in ARCHITECTURES:
            raise ValueError(f"arch is {data['arch']!r}")
        for row in rows:
            _check_row(row)
        return Table(str(data["device"]), data["arch"], str(data["torch"]), tuple(data["packages"]), rows, path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise OptionError(
            f"{path} is no table of measured GEMMs ({what:.200}), expected a file that `te-inductor tune` has written"
        ) from None


def _check_row(row: dict[str, Any]) -> None:
    if row["tile"] is not None:
        Tile(**row["tile"])
    numbers = [row[name] for name in (*SIZES, "cublaslt_us")] + ([] if row["tile"] is None else [row["us"]])
    if not all(isinstance(number, int | float) and number > 0 for number in numbers):
        raise ValueError(f"a row has {numbers} where numbers above 0 are expected")
    for name in ("scope", "fast_accum", "added", "date"):
        row[name]


def write(table: Table) -> None:
    """Writes a table to its path, a line a row."""
    head = {"arch": table.arch, "device": table.device, "torch": table.torch, "packages": table.packages}
    lines = ",\n".join(f"  {json.dumps(row)}" for row in table.rows)
    table.path.parent.mkdir(parents=True, exist_ok=True)
    table.path.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')


def choose(problem: Problem) -> Tile | None:
    """The tile that runs a problem of known sizes faster than cuBLASLt by its device's table: Note [Between measured
    shapes]. None where none does, nothing near was measured, or the device has no table."""
    table = of(problem.target.product)
    return None if table is None else choose_in(problem, table)


@functools.cache  # a model's layers ask the same again and again
def choose_in(problem: Problem, table: Table) -> Tile | None:
    """`choose` by a table."""
    gating = problem.epilogue.gating
    if gating is not None and not {name for name, *_ in gating.steps} <= MEASURED_STEPS:
        return None
    if problem.target.cutlass != table.arch:
        return None
    sizes = problem.sizes
    rows = sorted((row for row in table.rows if _alike(row, problem)), key=lambda row: _distance(row, sizes))
    near = [row for row in rows if _distance(row, sizes) <= math.log2(NEAR)][:2]
    if not near:
        return None
    if _distance(near[0], sizes) > math.log2(SAME) and not (len(near) == 2 and all(map(_is_clear, near))):
        return None
    tile = None if near[0]["tile"] is None else Tile(**near[0]["tile"])
    return tile if tile is not None and supports(tile, problem) else None


def _is_clear(row: dict[str, Any]) -> bool:
    return row["tile"] is not None and row["cublaslt_us"] >= CLEAR * row["us"]


def _alike(row: dict[str, Any], problem: Problem) -> bool:
    # The 8-bit format that an operand has is nothing to the tensor core; that the accumulation is split is. What the
    # activation is, was not asked: it was measured with GELU, gatings with SwiGLU.
    more = problem.epilogue
    found = {
        "scope": scope_of(problem),
        "fast_accum": problem.gemm.fast_accum,
        "added": more.added,
        "quantized": more.activation is not None,
        "gated": more.gating is not None,
    }
    return all(row.get(kind, False) == value for kind, value in found.items())


def _distance(row: dict[str, Any], sizes: Sizes) -> float:
    """The largest of the factors between the sizes, as a power of two."""
    return max(abs(math.log2(row[size] / getattr(sizes, size))) for size in SIZES)
