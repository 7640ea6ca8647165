"""Programs around attention whose batches are padded, with attention as on a GPU: each beside itself without a compiler."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tests.attention import Passes, as_on_a_gpu

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
LENGTHS = (21, 13, 34, 27, 16)  # of rows, of which a batch has two and pads the shorter


def made():
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, vocab_size=64, num_hidden_layers=2, pad_token_id=0, use_cache=False)
    return LlamaForCausalLM(config)


def rows(count):
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, 60, (LENGTHS[i % len(LENGTHS)],), generator=draw) for i in range(count)]


def collate(batch, left=False):
    """What a collator makes of rows: ids, a mask of what is padded, labels that leave it out."""
    side = "left" if left else "right"
    ids = nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_side=side)
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def step(model, run, batch):
    model.zero_grad()
    out = run(**batch)
    out.loss.backward()
    return [out.loss.detach(), *(one.grad for one in model.parameters())]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-7


PROGRAMS = {
    "plain": lambda model: None,
    "checkpointed": lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}),
    "checkpointed, reentrant": lambda model: model.gradient_checkpointing_enable({"use_reentrant": True}),
}


@pytest.mark.quick("checkpointed")
@pytest.mark.parametrize("name", PROGRAMS)
def test_steps_of_any_length(name, monkeypatch):
    """Two programs serve all lengths, the second of a symbolic one, and paddings on either side."""
    model, backend = made(), Passes()
    exact = copy.deepcopy(model)
    PROGRAMS[name](model.train())
    data = rows(10)
    torch._dynamo.reset()
    with as_on_a_gpu(monkeypatch):
        run = torch.compile(model, backend=backend)
        for place in range(0, 10, 2):
            batch = collate(data[place : place + 2], left=place % 4 == 0)
            assert_same(step(model, run, batch), step(exact, exact, batch))
    assert backend.graphs == 2
    assert {(site.kernel, site.mask) for site in backend.found} == {("flex_attention", "causal, padded")}


@pytest.mark.thorough
def test_an_exported_program(monkeypatch):
    """A program of `torch.export`, with a length that is symbolic, given to the backend. Dynamo (2.13) cuts it at regions
    without gradients; what lies behind has the mask as an input."""
    model, backend = made().eval(), Passes()
    batch = collate(rows(2))
    del batch["labels"]
    length = torch.export.Dim("length", min=2, max=64)
    shapes = {name: {1: length} for name in batch}
    program = torch.export.export(model, (), dict(batch), dynamic_shapes=shapes)
    torch._dynamo.reset()
    with as_on_a_gpu(monkeypatch), torch.no_grad():
        run = torch.compile(program.module(), backend=backend)
        for some in (batch, {name: one[:, -15:] for name, one in batch.items()}):
            torch.testing.assert_close(run(**some).logits, model(**some).logits)
    kept = [site for site in backend.found if site.kernel != "flex_attention"]
    assert len(kept) < len(backend.found) and all("an input of fewer" in site.reason for site in kept)


@pytest.mark.thorough
def test_a_trainer(monkeypatch, tmp_path):
    """Training, evaluation, and a run that goes on from what was saved, as without a compiler."""

    def trained(backend, folder, steps, resume=None):
        model = made()
        if backend is not None:
            model.compile(backend=backend)
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, per_device_eval_batch_size=2,
            save_steps=2, eval_strategy="steps", eval_steps=2, logging_steps=1, report_to=[], disable_tqdm=True,
            use_cpu=True, seed=3, dataloader_pin_memory=False,
        )  # fmt: skip
        data = [{"row": one} for one in rows(8)]
        trainer = Trainer(
            model,
            arguments,
            train_dataset=data,
            eval_dataset=data[:4],
            data_collator=lambda batch: collate([one["row"] for one in batch]),
        )
        trainer.args.remove_unused_columns = False
        trainer.train(resume_from_checkpoint=resume)
        return [one.get("loss", one.get("eval_loss")) for one in trainer.state.log_history[:-1]]

    expected = trained(None, tmp_path / "eager", 4)
    torch._dynamo.reset()
    backend = Passes()
    with as_on_a_gpu(monkeypatch):
        assert trained(backend, tmp_path / "compiled", 4) == pytest.approx(expected, rel=1e-4)
        resumed = trained(backend, tmp_path / "compiled", 4, resume=str(tmp_path / "compiled" / "checkpoint-2"))
    assert resumed == pytest.approx(expected, rel=1e-4)
    assert {(site.kernel, site.reason) for site in backend.found} == {("flex_attention", None)}
