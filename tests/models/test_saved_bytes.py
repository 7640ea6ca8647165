"""What a forward saves for its backward: by default no more bytes than plain torch.compile saves, with few tokens or
many.

The graphs are those that Inductor gets, and run without its code."""

import pytest
import torch
import torch._inductor.compile_fx
import torch.nn.functional as F
from torch import nn
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


def opt(t):  # ReLU, and norms of a stream that is a sum
    return t.OPTForCausalLM(t.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, ffn_dim=4 * HIDDEN, num_hidden_layers=1, num_attention_heads=HEADS,
        word_embed_proj_dim=HIDDEN, max_position_embeddings=POSITIONS, dropout=0.0, use_cache=False,
    ))  # fmt: skip


def gemma3(t):
    return t.Gemma3ForCausalLM(t.Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=1,
        num_attention_heads=HEADS, num_key_value_heads=1, head_dim=HIDDEN // HEADS, use_cache=False,
    ))  # fmt: skip


class ReluMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


def saved_bytes(model, recipe: str, **inputs) -> int:
    """The bytes of storages that are not the model's own."""
    torch._dynamo.reset()
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *inputs.values())}
    found = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes(), x  # held, so that nothing else takes its address
        return x

    run = torch.compile(model, backend="te", options={"policy": {"*": recipe}, "fallback": "silent"})
    with saved_tensors_hooks(pack, lambda x: x):
        found_by_autograd = run(**inputs)
    del found_by_autograd
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
            (opt, RECIPES),
            (gemma3, RECIPES),
        )
    ),
]


@pytest.fixture
def uncompiled(monkeypatch, no_caches):
    run = lambda gm, *_, **__: make_boxed_func(gm.forward)  # noqa: E731
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx_inner", run)


@pytest.mark.parametrize(("make", "recipes"), CASES)
def test_no_more_than_in_high_precision(make, recipes, uncompiled):
    """Copies of weights, which square blocks keep or not, weigh more the fewer tokens there are."""
    import transformers

    transformers.logging.set_verbosity_error()
    model = make(transformers).bfloat16()
    blocks = [name for name in recipes if name == "block"]
    for tokens, tried in ((HIDDEN, recipes), (4 * HIDDEN, blocks), (8 * HIDDEN, blocks)):
        if not tried:
            continue
        ids = torch.randint(VOCABULARY, (1, tokens))
        most = saved_bytes(model, "none", input_ids=ids, labels=ids)
        found = {recipe: saved_bytes(model, recipe, input_ids=ids, labels=ids) for recipe in tried}
        assert all(size < most for size in found.values()), (tokens, most, found)


def test_relus_mask_is_counted(uncompiled):
    """There is no room for copies of weights beside ReLU's mask and the copy of its output."""
    model, x = ReluMlp().bfloat16(), torch.randn(4 * HIDDEN, HIDDEN, dtype=torch.bfloat16)
    most, found = (saved_bytes(model, recipe, x=x) for recipe in ("none", "block"))
    assert found <= most
