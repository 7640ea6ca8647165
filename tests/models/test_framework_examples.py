"""The examples of frameworks, as they are run by hand: losses fall, layers run in low precision, runs resume. Each needs
its framework (requirements/frameworks.txt) and is skipped without it; graphs run uncompiled."""

import os
from collections import Counter
from unittest import mock

import pytest
import torch

import te_inductor

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("without_codegen")]


@pytest.fixture
def restored(monkeypatch):
    """What an example sets, such as the address of its ranks, is undone afterwards."""
    with mock.patch.dict(os.environ):
        yield monkeypatch


@pytest.fixture
def environment(restored):
    restored.setenv("TE_INDUCTOR_RECIPE", "delayed")
    restored.setenv("TE_INDUCTOR_POLICY", '{"*": "delayed"}')
    return restored


def example(name: str, *packages: str):
    """The module of an example, if what it imports is here; torchvision has no CPU build for every torch."""
    for package in packages:
        pytest.importorskip(package, exc_type=ImportError)
    return __import__(f"examples.{name}", fromlist=["main"])


def equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_sft_trains_adapters_and_resumes(environment, tmp_path):
    sft = example("sft", "trl", "peft", "datasets")

    def trained(resume: bool):
        torch._dynamo.reset()
        run = sft.trainer(tmp_path, 4)
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resume else None)
        return run

    whole = trained(False)
    assert (tmp_path / "checkpoint-2/te_inductor_state.pt").exists()
    cut = trained(True)
    losses = sft.losses(whole)
    assert losses[-1] < losses[0] and sft.losses(cut) == pytest.approx(losses, rel=1e-6)
    scales = te_inductor.state_dict(whole.model)
    sites = {key.rsplit(".", 2)[0].rsplit(".", 1)[-1] for key in scales}
    assert {"base_layer", "default"} <= sites and equal(scales, te_inductor.state_dict(cut.model))


def test_grpo_scores_what_it_has_sampled(tmp_path):
    """The log-probabilities of rollout and training are equal in the exact arm, and with weights that are stored as
    training multiplies them to round-off. An arm that stops goes on where it was."""
    grpo = example("grpo", "trl", "datasets")
    given = [
        "--folder",
        str(tmp_path),
        "--device",
        "cpu",
        "--steps",
        "2",
        "--warm-up",
        "5",
        "--batch",
        "16",
        "--layers",
    ]
    for more in (["--seconds", "0"], []):
        grpo.main([*given, "1", *more])
    found = example("grpo_table").read(tmp_path)
    assert {arm: [line["step"] for line in steps] for arm, steps in found.items()} == {arm: [1, 2] for arm in grpo.ARMS}
    apart = {arm: max(line["mean_apart"] for line in steps) for arm, steps in found.items()}
    assert apart["fp8-exact"] == 0 and apart["nvfp4-qat"] < 1e-5 and apart["bf16"] < 1e-5 < apart["fp8"] < 0.2
    with pytest.raises(ValueError, match="name another --folder"):
        grpo.main([*given, "2"])


def test_diffusers_compiles_repeated_blocks(tmp_path):
    run = example("diffusers_run", "diffusers")
    flux = run.model()
    losses = run.trained(flux, 4)
    assert losses[-1] < losses[0]
    report = run.ran(flux)
    assert {site.recipe for site in report.sites if "blocks" in site.fqn} == {"current"}
    assert torch.isfinite(run.denoised(flux, 2)).all()
    flux.save_pretrained(tmp_path)  # of the plain model, though its blocks are compiled
    assert not [key for key in flux.state_dict() if "_orig_mod" in key]


def test_sentence_transformers_train_encode_and_save(tmp_path):
    run = example("sentence_transformers_run", "sentence_transformers", "datasets")
    sentence = run.model(tmp_path / "base")
    trainer = run.trainer(sentence, tmp_path, 6)
    trainer.train()
    losses = run.losses(trainer)
    assert losses[-1] < 0.5 * losses[0]
    assert {site.recipe for site in run.ran(sentence).sites} == {"current"}
    sentence.save(str(tmp_path / "trained"))
    texts = [one for one, _ in run.PAIRS]
    loaded = run.SentenceTransformer(str(tmp_path / "trained"), device=str(sentence.device))
    low, high = (torch.from_numpy(model.encode(texts)) for model in (sentence, loaded))
    assert 0 < (low - high).norm() < 0.1 * high.norm()


def test_accelerate_trains_and_resumes_with_its_scales(tmp_path):
    """The run that was cut ends where the whole one does."""
    run = example("accelerate_run", "accelerate")
    from accelerate.state import AcceleratorState

    def trained(name: str, *arguments):
        torch._dynamo.reset()
        AcceleratorState._reset_state(reset_partial_state=True)  # the first Accelerator of a process decides for all
        return run.trained(tmp_path / name, *arguments)

    whole, losses = trained("whole", 4)
    assert losses[-1] < losses[0]
    trained("cut", 2)
    cut, rest = trained("cut", 2, True)
    assert rest == losses[2:]
    scales = te_inductor.state_dict(whole)
    assert len(scales) == 12 and equal(te_inductor.state_dict(cut), scales)
    for one, other in zip(whole.parameters(), cut.parameters(), strict=True):
        assert torch.equal(one, other)


def test_timm_trains_and_saves_checkpoints(tmp_path):
    run = example("timm_run", "torchvision", "timm")
    vit = run.model()
    losses = run.trained(vit, tmp_path, 6)
    assert losses[-1] < 0.8 * losses[0]
    assert {site.recipe for site in run.ran(vit).sites} == {"current"}
    saved = torch.load(tmp_path / "last.pth.tar", weights_only=False)
    assert saved["state_dict"].keys() == saved["state_dict_ema"].keys() == vit.state_dict().keys()


def test_torchtitan_trains_and_resumes_with_its_scales(environment, tmp_path):
    """The run that was cut ends where the whole one does. Its learning rates are those of four steps in both."""
    titan = example("torchtitan_run", "torchtitan", "torchdata")

    def trained(*arguments: str):
        torch._dynamo.reset()
        given = ["--compile.enable", "--compile.backend", "te", "--checkpoint.enable", "--dump_folder", str(tmp_path)]
        environment.setattr("sys.argv", ["titan", *given, *arguments])
        titan.main()
        return titan.Trainer.last

    whole = trained()
    assert len(whole.losses) == 4 and whole.losses[-1] < whole.losses[0]
    (block, *_) = whole.model_parts[0].layers.values()
    names = {key.removesuffix(".scale") for key in te_inductor.state_dict(block) if key.endswith(".scale")}
    assert {"feed_forward.w2.input", "feed_forward.w2.weight", "feed_forward.w2.grad_output"} <= names
    cut = trained("--checkpoint.load_step", "2")
    assert cut.losses == whole.losses[2:]
    for one, other in zip(whole.model_parts, cut.model_parts, strict=True):
        assert equal(te_inductor.state_dict(one), te_inductor.state_dict(other))


@pytest.mark.parametrize(
    ("config", "products"),
    [("debug", {"scaled_mm": 54}), ("experts", {"scaled_mm": 36, "grouped_mm": 12, "grouped_wgrad": 6})],
)
def test_torchtitan_trains_a_traced_step(restored, config, products):
    """GraphTrainer, whose step has each product in low precision, and none twice."""
    titan = example("torchtitan_graph", "torchtitan", "torchdata")

    def trained(*arguments):
        restored.setattr("sys.argv", ["titan", "--config", config, "--debug.seed", "1", *arguments])
        titan.main()
        run = titan.Trainer.last
        return run.losses, Counter(str(node.target) for node in run._traced_step.gm.graph.nodes)

    losses, found = trained()
    assert {name: found[f"te_inductor.{name}.default"] for name in products} == products
    routers = 6 if config == "experts" else 0
    assert found["aten.mm.default"] == routers and found["aten._grouped_mm.default"] == 0
    plain, _ = trained("--compile.pass_pipeline", "default", "--compile.memory_policy", "default")
    assert losses[-1] < losses[0]
    for one, other in zip(losses, plain, strict=True):
        assert one != other and abs(one - other) < 0.01 * other
