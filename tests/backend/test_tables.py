"""Tables of measured GEMMs: the package's, a user's, what lies between measured shapes, and how one is made."""

import dataclasses
import json
from argparse import Namespace

import pytest
import torch

from te_inductor import config, targets
from te_inductor.command import doctor, tune
from te_inductor.errors import OptionError, TEInductorError
from te_inductor.kernels import cutlass_packages as cutlass
from te_inductor.kernels import cutlass_tables as tables
from te_inductor.kernels import cutlass_tiles
from te_inductor.kernels.cutlass_tiles import FAST_TILES, Tile
from te_inductor.kernels.problem import NOTHING, OUTPUT, Problem
from te_inductor.kernels.select import select
from te_inductor.numerics.activation import Activation
from te_inductor.passes.graph.custom_pass import GraphPass
from tests.support import kernels
from tests.support.kernels import dense

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
H200, NEW = "NVIDIA H200", "NVIDIA H20"  # NEW has no table
TILE = FAST_TILES[0]


def problem(m: int, n: int, k: int, product: str = H200, arch: str = "90", **changes) -> Problem:
    return dense(m, n, k, target=dataclasses.replace(kernels.H200, product=product, cutlass=arch), **changes)


def kind(row: dict) -> dict:
    fields = {"scope": row["scope"], "fast_accum": row["fast_accum"], "added": row["added"]}
    if row.get("quantized", False):
        return {**fields, "out": E4M3, "activation": Activation()}
    return {**fields, "out": torch.float32 if row["added"] == OUTPUT else BF16}


def row(m: int, n: int = 4096, k: int = 4096, tile: Tile | None = TILE, gain: float = 1.1) -> dict:
    found = None if tile is None else dataclasses.asdict(tile)
    date = "2026-11-25"
    us = {"us": 100.0, "cublaslt_us": 100.0 * gain, "date": date}
    return {"m": m, "n": n, "k": k, "scope": "tensor", "fast_accum": True, "added": NOTHING, "tile": found, **us}


def table(*rows: dict, device: str = NEW, path=tables.FOLDER / "none.json") -> tables.Table:
    return tables.Table(device, "90", "2.11.0", ("quack-kernels 0.6.5",), rows, path)


def written(folder, *rows: dict, device: str = NEW) -> tables.Table:
    made = table(*rows, device=device, path=folder / tables.file_name(device))
    tables.write(made)
    return made


def test_a_start_reads_no_table_and_asks_for_versions_once(monkeypatch):
    """The package's tables, of hundreds of rows, are for who has their devices."""
    monkeypatch.setattr(tables, "_tables", None)
    tables.check()
    asked, found = [], cutlass.metadata.version
    monkeypatch.setattr(cutlass.metadata, "version", lambda name: asked.append(name) or found(name))
    cutlass.identity.cache_clear()
    keys = [GraphPass(None, []).uuid() for _ in range(3)]
    assert keys[0] == keys[1] == keys[2] and len(asked) <= 2 * len(cutlass.REQUIRED)


def test_every_row_of_the_package_is_a_kernel_that_supports_its_problem():
    found = tables.of(H200)
    assert len(found.rows) > 700 and not found.is_users
    for one in found.rows:
        if one["tile"] is not None:
            asked = problem(one["m"], one["n"], one["k"], **kind(one))
            assert Tile(**one["tile"]) in cutlass_tiles.tiles(asked)
            assert one["us"] < one["cublaslt_us"]


def test_a_device_without_a_table_has_cublaslt(monkeypatch):
    """A device with a table has the tile that it names. Devices are told apart by their names."""
    one = max((row for row in tables.of(H200).rows if row["tile"] and row["scope"] == "tensor" and row["fast_accum"]
               and row["added"] == NOTHING and not row.get("quantized")), key=lambda row: row["m"])  # fmt: skip
    asked = problem(one["m"], one["n"], one["k"])
    assert tables.choose(asked) == Tile(**one["tile"])
    monkeypatch.setattr(cutlass, "missing", lambda: None)
    others = [problem(one["m"], one["n"], one["k"], product) for product in (NEW, "NVIDIA H200 NVL")]
    assert [tables.choose(other) for other in others] == [None, None]
    names = [select(each).name for each in (asked, others[0])]
    assert names == [f"cutlass:{Tile(**one['tile'])}", "cublaslt"]


def test_between_measured_shapes_two_rows_have_to_agree():
    choose = tables.choose_in
    both, close = table(row(4096), row(8192)), problem(4096 + 160, 4096, 4096)
    assert (
        choose(problem(4096, 4096, 4096), both)
        == choose(close, both)
        == choose(problem(5888, 4096, 4096), both)
        == TILE
    )
    one_lost, barely = table(row(4096), row(8192, tile=None)), table(row(4096), row(8192, gain=1.02))
    for other in (one_lost, barely, table(row(4096))):
        assert choose(close, other) == TILE and choose(problem(5888, 4096, 4096), other) is None
    assert choose(problem(4 * 8192, 4096, 4096), both) is None  # nothing near
    assert choose(problem(8192, 4096, 4096), one_lost) is None
    assert choose(problem(4096, 4096, 4096, arch="100"), both) is None
    assert choose(problem(4096, 4096, 4096, fast_accum=False), both) is None


def test_a_users_table_is_read_and_takes_the_place_of_the_packages(tmp_path, monkeypatch):
    asked, new, before = problem(4096, 4096, 4096), problem(4096, 4096, 4096, NEW), GraphPass(None, []).uuid()
    written(tmp_path, row(4096))
    written(tmp_path, row(4096, tile=None), device=H200)
    monkeypatch.setenv(config.TABLES, str(tmp_path))
    assert tables.choose(new) == TILE and tables.choose(asked) is None
    assert tables.of(NEW).is_users and tables.of(NEW).dates == "2026-11-25"
    assert GraphPass(None, []).uuid() != before  # of compile caches: other kernels
    monkeypatch.delenv(config.TABLES)
    assert tables.choose(new) is None and GraphPass(None, []).uuid() == before


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (None, "expected a folder"),
        ("{", "no table of measured GEMMs (JSONDecodeError"),
        ("[]", "no table of measured GEMMs (TypeError"),
        ('{"device": "a", "torch": "", "packages": [], "arch": "80", "rows": []}', "arch is '80'"),
        ('{"device": "a", "torch": "", "packages": [], "arch": "90", "rows": [{"m": 1}]}', "KeyError"),
        (json.dumps({**row(4096), "us": -1}), "expected a file that `te-inductor tune` has written"),
        (json.dumps({**row(4096), "tile": {"m": 1}}), "TypeError"),
    ],
)
def test_what_is_no_table_is_named_before_anything_is_compiled(text, what, tmp_path, monkeypatch):
    from te_inductor import explain

    if text is not None:
        if '"scope"' in text:
            text = f'{{"device": "a", "torch": "", "packages": [], "arch": "90", "rows": [{text}]}}'
        (tmp_path / "some.json").write_text(text)
    monkeypatch.setenv(config.TABLES, str(tmp_path if text is not None else tmp_path / "nowhere"))
    with pytest.raises(TEInductorError) as raised:
        explain(torch.nn.Linear(32, 32), torch.randn(4, 32))
    assert what in str(raised.value)
    assert doctor._guarded("GEMM table", doctor._table).state == doctor.BROKEN


def test_the_doctor_says_which_table_is_used(tmp_path, monkeypatch):
    assert doctor._table() == (doctor.NOTE, "none, as there is no GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cutlass, "missing", lambda: None)
    kernels.pretend(monkeypatch, (9, 0))
    state, found = doctor._table()
    assert state == doctor.OK and f"GEMMs on {H200}, 2026-11-21 to 2026-11-24, of the package" in found
    kernels.pretend(monkeypatch, (9, 0), NEW)
    state, found = doctor._table()
    assert state == doctor.NOTE and f"none of {NEW}, cuBLASLt multiplies; `te-inductor tune`" in found
    path = written(tmp_path, row(4096)).path
    monkeypatch.setenv(config.TABLES, str(tmp_path))
    assert doctor._table() == (doctor.OK, f"1 GEMMs on {NEW}, 2026-11-25, of {path}")
    monkeypatch.setattr(cutlass, "missing", lambda: "quack-kernels is not installed")
    state, found = doctor._table()
    assert state == doctor.NOTE and "not used: " in found


def arguments(**changes) -> Namespace:
    given = {"folder": None, "shapes": [(6144, 4096)], "tokens": [4096], "kinds": ["plain"], "rounds": 2}
    return Namespace(**given | changes)


def test_tuning_writes_a_table_that_is_then_used(tmp_path, monkeypatch, capsys):
    """Clocks of our own stand in place of kernels: cuBLASLt takes 100 us, one tile less; when both are timed again, of
    the first two GEMMs alone. What the folder or the package had of the device stays."""
    looks = []

    def timed(arms, rounds, calls):
        looks.append(len(arms))
        if len(arms) > 2:
            return [100.0, 90.0] + [120.0] * (len(arms) - 2)
        return [100.0, 90.0 if len(looks) < 5 else 99.0]

    def arms(p, table, complain):
        return {None: None} | dict.fromkeys(cutlass_tiles.tiles(p))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    kernels.pretend(monkeypatch, (9, 0), NEW)
    for place, name, value in (
        (cutlass, "missing", lambda: None), (cutlass, "versions", lambda: ("quack-kernels 0.6.5 /some where",)),
        (tune, "arms", arms), (tune, "time_us", timed), (tune.build, "start", lambda kernels: list(kernels)),
    ):  # fmt: skip
        monkeypatch.setattr(place, name, value)
    assert tune.run(arguments(folder=tmp_path)) == 0
    said = capsys.readouterr().out
    assert f"export {config.TABLES}={tmp_path}" in said and "2 of 6 GEMMs" in said
    found = tables.read(tmp_path / "nvidia_h20.json")
    assert (found.device, found.packages) == (NEW, ("quack-kernels 0.6.5",)) and len(found.rows) == 6
    assert [one["tile"] is None for one in found.rows] == [False, False, True, True, True, True]
    monkeypatch.setenv(config.TABLES, str(tmp_path))
    assert tables.choose(problem(4096, 6144, 4096, NEW)) == TILE
    tune.run(arguments(tokens=[8192]))  # into the same, by the variable
    assert len(tables.read(found.path).rows) == 12 and "export" not in capsys.readouterr().out
    assert len(tune.started(H200, tmp_path).rows) == len(tables.of(H200).rows)  # the package's


def test_what_is_tuned_is_what_models_have():
    asked = tune.problems(kernels.H200, None, tune.TOKENS, tune.KINDS)
    assert {tune.kind_of(one) for one in tables.of(H200).rows} == set(tune.KINDS)
    of_package = {(one["m"], one["n"], one["k"], tune.kind_of(one)) for one in tables.of(H200).rows}
    assert len(asked) > 600 and all(cutlass_tiles.tiles(one) for one in asked)
    sizes = {(one.sizes.m, one.sizes.n, one.sizes.k) for one in asked}
    assert all((m, n, k) in sizes for m, n, k, kind in of_package if m % 128 == n % 128 == 0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, f"no folder for the table: pass --folder, or set {config.TABLES}"),
        ({"folder": "x", "kinds": ["plian"]}, "unknown kind of GEMMs 'plian'; did you mean 'plain'?"),
        ({"folder": "x"}, "torch finds no GPU here"),
    ],
)
def test_wrong_uses_of_tune(changes, text):
    with pytest.raises(OptionError) as raised:
        tune.run(arguments(**changes))
    assert text in str(raised.value)


def test_names_of_files():
    assert tables.file_name(H200) == "nvidia_h200.json" == tables.of(H200).path.name
    assert targets.of(torch.device("cpu")).cutlass is None
