"""What a forward saves for its backward: by default no more bytes than plain torch.compile saves, with few tokens or
many.

The graphs are those that Inductor gets, and run without its code."""

import pytest
import torch
import torch._inductor.compile_fx
from torch._functorch.aot_autograd import make_boxed_func
from torch.autograd.graph import saved_tensors_hooks

HIDDEN, HEADS, VOCABULARY, POSITIONS = 128, 2, 256, 1024
RECIPES = ("current", "delayed", "rowwise", "block")


def llama(t):
    return t.LlamaForCausalLM(t.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=1,
        num_attention_heads=HEADS, num_key_value_heads=1, use_cache=False,
    ))  # fmt: skip


def gpt2(t):
    return t.GPT2LMHeadModel(t.GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=1, n_head=HEADS, n_positions=POSITIONS, attn_pdrop=0.0,
        embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    ))  # fmt: skip


def gptj(t):  # attention and the MLP read one norm
    return t.GPTJForCausalLM(t.GPTJConfig(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=1, n_head=HEADS, n_positions=POSITIONS, rotary_dim=16,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    ))  # fmt: skip


def bert(t):
    return t.BertForMaskedLM(t.BertConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=1,
        num_attention_heads=HEADS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        max_position_embeddings=POSITIONS,
    ))  # fmt: skip


def saved_bytes(model, ids, recipe: str) -> int:
    """Of storages that are not the model's own."""
    torch._dynamo.reset()
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), ids)}
    found = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes(), x  # held, so that nothing else takes its address
        return x

    run = torch.compile(model, backend="te", options={"policy": {"*": recipe}, "fallback": "silent"})
    with saved_tensors_hooks(pack, lambda x: x):
        loss = run(input_ids=ids, labels=ids).loss
    del loss
    return sum(size for size, _ in found.values())


QUICK = ("delayed",)
CASES = [
    (llama, QUICK),
    *(
        pytest.param(make, recipes, marks=pytest.mark.thorough)
        for make, recipes in (
            (llama, tuple(name for name in RECIPES if name not in QUICK)),
            (gpt2, RECIPES),
            (gptj, RECIPES),
            (bert, RECIPES),
        )
    ),
]


@pytest.mark.parametrize(("make", "recipes"), CASES)
def test_no_more_than_in_high_precision(make, recipes, monkeypatch, no_caches):
    import transformers

    transformers.logging.set_verbosity_error()
    monkeypatch.setattr(
        torch._inductor.compile_fx, "compile_fx_inner", lambda gm, *_, **__: make_boxed_func(gm.forward)
    )
    model = make(transformers).bfloat16()
    for tokens, tried in ((HIDDEN, recipes), (8 * HIDDEN, [name for name in recipes if name == "block"])):
        if not tried:
            continue
        ids = torch.randint(VOCABULARY, (1, tokens))
        most = saved_bytes(model, ids, "none")
        found = {recipe: saved_bytes(model, ids, recipe) for recipe in tried}
        assert all(size < most for size in found.values()), (tokens, most, found)
