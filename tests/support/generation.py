"""Language models with stored weights that generate, beside what their weights stand for."""

import torch
from torch import Tensor, nn

from te_inductor.ops.stored_weight import StoredWeight

VOCABULARY, LAYERS, HIDDEN = 1024, 2, 512
TAIL = 6.0  # standard deviations that no logit exceeds
STEPS = 4
OPTIONS = {"recipe": "none", "fallback": "error"}
GENERATE = {
    "max_new_tokens": STEPS,
    "min_new_tokens": STEPS,
    "do_sample": False,
    "pad_token_id": 0,
    "output_logits": True,
    "return_dict_in_generate": True,
}


def config_of(kind: type, **fields: object) -> object:
    """A small model's configuration, of that class of transformers."""
    return kind(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        initializer_range=HIDDEN**-0.5,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        **fields,
    )


class Models:
    """One model three times: with stored weights (`stored`), with what they stand for in bf16 (`plain`), and in float64
    (`exact`). A class derived from this one makes them, and has `check(logits, tokens, rows)`, for the last positions of
    these tokens, where at most `rows` rows met a weight at a time."""

    device: str
    stored: nn.Module
    each = 1  # rows of a token

    def restore(self, *models: nn.Module) -> None:
        """Gives the models the values that stored weights stand for."""
        with torch.no_grad():
            for model in models:
                for name, parameter in model.named_parameters():
                    weight = self.stored.get_parameter(name)
                    parameter.copy_(weight.dequantize() if isinstance(weight, StoredWeight) else weight)

    def prompt(self, batch: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * batch + length)
        return torch.randint(1, VOCABULARY, (batch, length), generator=generator).to(self.device)

    def generated(self, batch: int, length: int, **options: object) -> None:
        prompt = self.prompt(batch, length)
        out = self.stored.generate(prompt, attention_mask=torch.ones_like(prompt), **GENERATE, **options)
        logits = torch.stack(out.logits, 1)
        assert out.sequences.shape == (batch, length + STEPS) and torch.equal(out.sequences[:, :length], prompt)
        assert torch.equal(logits.argmax(-1), out.sequences[:, length:])
        self.check(logits, out.sequences, batch * length * self.each)
