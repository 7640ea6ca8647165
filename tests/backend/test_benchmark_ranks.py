"""The benchmark of ranks (`python -m benchmarks.ranks --tiny`): that each work runs with each arm on gloo, that arms train
alike, and what it counts."""

import json

import pytest

from benchmarks import ranks, ranks_predict
from benchmarks.ranks_job import Job
from benchmarks.ranks_works import WORKS, built
from tests.ranks import ranks as told_by_ranks

STEPS = 4
PHASES = ["process group", "model", "warm up", "measurement", "scaling state"]


def run(world: int, jobs: list[dict], timeout: int = 300) -> list[dict]:
    """A row for each job, as the command makes them."""
    fields = [{"steps": STEPS, **job} for job in jobs]
    texts = [json.dumps(job, separators=(";", ":")) for job in fields]
    cases = [f"measures {number} {text}" for number, text in enumerate(texts)]
    told = told_by_ranks("tests.backend.benchmark_ranks", world, ",".join(cases), timeout=timeout)
    made = [Job(device="cpu", world=world, model="tiny", **job) for job in fields]
    return [ranks.gathered(job, told[case]) for job, case in zip(made, cases, strict=True)]


def check(rows: list[dict]) -> None:
    for row in rows:
        assert row["states_equal"] and set(PHASES) <= row["seconds"].keys()
        assert len(row["losses"]) == STEPS and row["first_loss"] == row["losses"][0]
        assert 1.5 < row["loss"] < 2.5  # of two independent values of variance 1
        assert all(abs(loss - other) < 0.02 for loss, other in zip(row["losses"], rows[0]["losses"], strict=True))


def test_a_block_is_gathered_in_fp8():
    """Twice, half of it from the other rank: seven weights by bytes, two norms in bf16."""
    [row] = rows = run(2, [{"work": "fsdp", "arm": "gather:current", "layers": 1}])
    check(rows)
    assert row["wire"]["gathered"] == row["received"] - row["wire"]["scattered"] - row["wire"]["summed"]
    assert row["wire"]["gathered"] == 4 * 256 * 256 + 3 * 256 * 512 + 2 * 256 * 2
    assert row["wire"]["scattered"] == 4 * 256 * 256 + 3 * 256 * 512 + 2 * 256  # bf16, once


@pytest.mark.thorough
def test_deep_models_learn():
    """Eight blocks, uncompiled: by as much in FP8 as in bf16."""
    jobs = [{"work": "fsdp", "arm": arm, "layers": 8, "steps": 50} for arm in ("bf16", "te:delayed")]
    high, low = run(2, jobs, timeout=900)
    assert high["loss"] < 0.8 * high["first_loss"] and abs(low["loss"] / high["loss"] - 1) < 0.01


@pytest.mark.parametrize("work", ["fsdp", "ep"])
def test_sizes_of_weights(work):
    """0.02 at a width of 4096; what eight blocks add, 16 times, is a 4th as large."""
    job = Job(work, "", "tiny", "cpu", 1, layers=8)
    sizes = {name: weight.std().item() for name, weight in built(job, 0).named_parameters() if "norm" not in name}
    added = {name for name in sizes if ".o." in name or ".down" in name}
    wanted = 0.02 * (4096 / job.shape.dim) ** 0.5
    assert len(added) == 16
    assert sizes == pytest.approx({name: wanted / 4 if name in added else wanted for name in sizes}, rel=0.1)


def test_losses_are_those_of_the_first_step_and_the_last_ten():
    told = {"ms": 1.0, "peak_gib": None, "states_equal": True, "losses": [2.0] * 20 + [1.0] * 5 + [0.5] * 5}
    row = ranks.gathered(Job("fsdp", "bf16", "tiny", "cpu", 1), [told])
    assert (row["first_loss"], row["loss"]) == (2.0, 0.75)


@pytest.mark.thorough
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("work", WORKS)
def test_works(work, world):
    """Uncompiled."""
    arms = [arm for arm in WORKS[work].arms if arm != "torchao"]
    tp = {"tp": world, "fsdp_tp": 2}.get(work, 1)
    check(run(world, [{"work": work, "arm": arm, "tp": tp} for arm in arms], timeout=900))


@pytest.mark.thorough
def test_the_command(tmp_path, capsys):
    """One rank and two, compiled; what it prints and writes."""
    given = [
        "--tiny",
        "--work",
        "ddp",
        "--ranks",
        "1",
        "2",
        "--arms",
        "bf16",
        "te:delayed",
        "--json",
        str(tmp_path / "x.json"),
    ]
    assert ranks.main(given) == 0
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [row["world"] for row in rows] == [1, 1, 2, 2] and rows[3]["wire"]["summed"] > 0
    assert "DistributedDataParallel: tiny, 64 tokens a rank" in capsys.readouterr().out


def test_prediction_counts_bytes():
    """The bytes of eight ranks, Llama-3-8B: weights twice in bf16 or FP8, gradients once in bf16, seven eighths of
    each."""
    high, low, gathers = ranks_predict.predict(Job("fsdp", "", "llama8b", "cuda", 8))
    weights = 32 * 218103808 * 7 / 8
    assert high.received == low.received == 6 * weights and gathers.received == 4 * weights
    one, other = ranks_predict.predict(Job("tp", "", "llama8b", "cuda", 8, 8))
    assert other.received / one.received == pytest.approx(12 / 22)
