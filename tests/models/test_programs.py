"""The programs of examples/ that have text and models of their own, at tiny sizes."""

import json
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from examples import curves, curves_table, full_finetune, run_all, text
from examples.shapes import llama
from tests.forked import ROOT


def test_text_leaves_out_copies(tmp_path):
    """Equal files, and files most of whose lines others have, are read once; what is not text is not read."""
    lines = [f"a line of some length, number {number}" for number in range(20)]
    (tmp_path / "a.py").write_text("\n".join(lines))
    (tmp_path / "b.py").write_text("\n".join(lines))
    (tmp_path / "c.py").write_text("\n".join([*lines[:15], "five others are new, and this is one of them"]))
    (tmp_path / "d.md").write_text("\n".join([*lines[:5], *(line + " more" for line in lines[:15])]))
    (tmp_path / "e.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "f.png").write_text("no text")
    found = text.documents([tmp_path])
    assert [document.count("\n") for document in found] == [19, 19] and found[1].endswith("more")


def test_text_is_kept(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for number in range(60):
        (source / f"{number:02}.txt").write_text(f"text of file {number}\n" * 3)
    first = text.prepare(tmp_path / "kept", roots=[source], vocabulary=280)
    again = text.prepare(tmp_path / "kept")
    assert first.digest == again.digest and torch.equal(first.train, again.train)
    held_out = first.tokenizer.decode(first.held_out.tolist(), skip_special_tokens=True)
    assert held_out == "".join(f"text of file {number}\n" * 3 for number in (0, text.HELD_OUT))


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        (["[3.0, 2.5, 2.0, 1.5]\n9 tensors of scaling state", "[2.0, 1.5]"], None),
        (["[3.0, 2.5, 2.0, 1.5]\n9 tensors of scaling state", "[2.0, 1.6]"], "apart"),
        (["[2.0, 2.0, 2.0, 2.0]\n9 tensors of scaling state", "[2.0, 2.0]"], "does not fall"),
        (["[3.0, 2.5, 2.0, nan]", "[2.0, nan]"], "no losses"),
        (["[3.0, 2.5, 2.0, 1.5]", "[2.0, 1.5]"], "scaling state"),
    ],
)
def test_what_a_resumed_run_promises(outputs, said):
    if said is None:
        assert "0e+00 apart" in run_all.resumes(outputs)
    else:
        with pytest.raises(run_all.Failed, match=said):
            run_all.resumes(outputs)


@pytest.mark.thorough
def test_what_is_stored_is_generated_from(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import PreTrainedTokenizerFast

    from examples import generate

    source = tmp_path / "a.txt"
    source.write_text("some text, and some more of it\n" * 9)
    words = text.trained_tokenizer([source.read_text()], 280)
    llama("tiny", 288).save_pretrained(tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=text.END).save_pretrained(tmp_path / "model")
    generate.store(tmp_path / "model", tmp_path / "stored", "rowwise")
    prompts = torch.tensor([[5, 6, 7]])
    one, other = (generate.generated(generate.load(tmp_path / "stored")[0], prompts, 4) for _ in range(2))
    assert one.shape == (1, 7) and torch.equal(one, other)


@pytest.mark.thorough
@pytest.mark.parametrize("parallel", [1, 2])
def test_ranks_resume(tmp_path, parallel):
    """Two processes: the run that goes on from a distributed checkpoint has the losses of the whole one."""
    program = (
        "import sys\nfrom tests import uncompiled\nfrom examples import fsdp\n"
        "with uncompiled.patched():\n    fsdp.main()\n"
    )
    script = tmp_path / "script.py"
    script.write_text(program)
    sources = [str(ROOT / "examples" / f"{name}.py") for name in ("text", "fsdp", "demo")]

    def printed(*arguments):
        ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        given = ["--folder", str(tmp_path), "--text", *sources, "--steps", "4", "--context", "16"]
        run = subprocess.run(
            [*ranks, *given, "--tensor-parallel", str(parallel), *arguments], cwd=ROOT, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr[-4000:]
        return run.stdout

    whole, rest = run_all.losses(printed()), run_all.losses(printed("--resume", "2"))
    assert len(whole) == 4 and rest == whole[2:]


@pytest.fixture
def sources():
    """Some text for runs of a few steps."""
    return [ROOT / "examples" / f"{name}.py" for name in ("text", "curves", "demo", "experts")]


@pytest.mark.parametrize("shape", [pytest.param("tiny"), pytest.param("tiny-moe", marks=pytest.mark.thorough)])
def test_curves_go_on(shape, sources, tmp_path, monkeypatch, without_tracing):
    """A run that stops once has the log of one that does not; another run is not continued."""
    monkeypatch.setattr(curves, "FLUSH", 2)
    shared = text.prepare(tmp_path / "text", roots=sources, vocabulary=curves.WORDS)
    plan = curves.Plan(shape, "delayed", tokens=4 * 128, batch=2, evaluate=4, held_out=2, digest=shared.digest)

    def trained(name: str, minutes: float) -> list[dict]:
        torch._dynamo.reset()
        curves.Run(plan, tmp_path / name, shared, "cpu", {}).go_on(minutes, plan.steps)
        lines = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]

    whole = trained("whole", 9)
    cut = [trained("cut", 0) for _ in range(2)]
    assert [len(lines) for lines in cut] == [3, 6] and cut[-1] == whole
    assert [line["step"] for line in whole[1:5]] == [1, 2, 3, 4] and len(whole[5]["held_out"]) == 2
    other = curves.Plan(shape, "delayed", tokens=7 * 128, batch=2, digest=shared.digest)
    with pytest.raises(ValueError, match=r"holds a run with .*tokens"):
        curves.Run(other, tmp_path / "cut", shared, "cpu", {})


def test_each_epoch_reads_all_of_the_text():
    plan = curves.Plan("tiny", "bf16", batch=3)
    read = torch.cat([plan.places(step, 6) for step in range(4)]).tolist()
    assert sorted(read[:6]) == sorted(read[6:]) == [*range(6)] and read[:6] != read[6:]


def test_the_table_of_curves(tmp_path, capsys):
    """Gaps are of held-out losses at a recipe's own last evaluation, beside how far bf16's seeds are apart."""
    for recipe, seed, apart, steps in (("bf16", 0, 0.0, 40), ("bf16", 1, 0.01, 40), ("rowwise", 0, 0.02, 20)):
        folder = tmp_path / f"tiny-{recipe}-{seed}"
        folder.mkdir()
        lines = [{"plan": {"shape": "tiny", "recipe": recipe, "seed": seed, "batch": 4}}]
        for step in range(1, steps + 1):
            lines.append({"step": step, "loss": 9 / step + apart, "norm": 1.0, "seconds": 0.05})
            if step % 10 == 0:
                lines.append({"step": step, "held_out": [9 / step + apart, 8 / step + apart]})
        (folder / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    pytest.importorskip("matplotlib")
    curves_table.main(["--folder", str(tmp_path), "--shape", "tiny"])
    rows = capsys.readouterr().out.splitlines()
    assert "| 0.4450 | +0.0200 ± 0.0000 | +4.71% | 50.0 |" in rows[4], rows
    assert rows[-1] == "Runs of bf16 with other seeds end +0.0100 from the first."
    assert (tmp_path / "tiny.png").stat().st_size > 10_000 and (tmp_path / "tiny.md").exists()


@pytest.mark.thorough
def test_an_optimizer_in_the_backward_is_the_optimizer(without_codegen, monkeypatch):
    """Parameters that are stepped in hooks have the losses of a loop that steps them behind the backward, and so have
    checkpoints whose inputs wait on the host."""
    monkeypatch.setattr(full_finetune, "SMALLEST", 0)
    tokens = full_finetune.batches(torch.arange(99) % 32, 4, 2, 16)

    def losses(in_backward: bool, offloads: bool = False) -> list[float]:
        torch._dynamo.reset()
        model = llama("tiny", 32, dtype=torch.bfloat16)
        loss, optimizers = full_finetune.objective(model, "delayed", {}, checkpoints=offloads), []
        if in_backward:
            optimizers = full_finetune.step_in_backward(model, "adamw", 0.0)
        else:
            optimizers = [torch.optim.AdamW(model.parameters(), fused=True)]
        full_finetune.set_rate(optimizers, 1e-2)
        found = []
        for batch in tokens:
            hooks = full_finetune.Offload(model.parameters())
            with hooks if offloads else nullcontext():
                value = loss(batch)
            assert bool(hooks.hosts) == offloads
            value.backward()
            assert not hooks.back and all(one is None for one in hooks.hosts)
            if in_backward:
                assert all(parameter.grad is None for parameter in model.parameters())
            else:
                optimizers[0].step()
                optimizers[0].zero_grad()
            found.append(value.item())
        return found

    assert losses(True) == losses(False) == losses(True, offloads=True)


@pytest.mark.parametrize(
    ("command", "peak"),  # GiB, measured
    [
        ("--recipe bf16", 69.4),
        ("--recipe delayed", 58.4),
        ('--recipe delayed --options {"saved":"low_precision"}', 50.9),
        ("--batch 4 --context 32768 --checkpoint --offload", 62.2),
    ],
)
def test_sums_of_a_full_finetune(command, peak):
    """Sums are of Llama-3-8B; what was measured is in docs/performance.md and docs/guides/checkpointing_and_memory.md."""
    model = llama("8b", 128256, device="meta", dtype=torch.bfloat16)
    args = full_finetune.parsed(command.split())
    sums = full_finetune.expected(model, args.batch * args.context, args)
    assert sums["weights"] == 16_060_522_496
    assert sum(sums.values()) / full_finetune.GIB == pytest.approx(peak, rel=0.05)
