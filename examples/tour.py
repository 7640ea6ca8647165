"""A tour in cells, from a compile to stored weights; `python -m examples.tour`, or cell by cell in an editor. The site
shows it as a notebook."""

# %% [markdown]
# # A tour in one notebook
#
# A small language model is compiled with FP8 layers, looked at, trained beside plain `torch.compile`, and stored for
# generation. All of it runs on a CPU, with the values that a GPU computes, in a minute or two.

# %%
from typing import Any

import torch
from matplotlib import pyplot

import te_inductor
from examples.llama import Llama, LlamaConfig


def build() -> Llama:
    """The same weights each time."""
    torch.manual_seed(0)
    return Llama(LlamaConfig(vocab=256, dim=64, layers=1, heads=2, hidden=192, context=64))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that go up by one, and the next ones: something that can be learned in a few steps."""
    begin = torch.randint(256, (8, 1), generator=torch.Generator().manual_seed(step))
    tokens = (begin + torch.arange(65)) % 256
    return tokens[:, :-1], tokens[:, 1:]


# %% [markdown]
# ## What would run where
#
# `explain` traces the model and compiles nothing. Each row is a GEMM of a layer: forward (fprop), the gradient of the
# input (dgrad) and of the weight (wgrad).

# %%
model, (tokens, targets) = build(), batch(0)
report = te_inductor.explain(model, tokens, options={"recipe": "current"})
print(report)

# %% [markdown]
# ## Train it
#
# The training loop is the one that you have. Only the backend's name and its options differ.


# %%
def losses(backend: str, options: dict[str, Any], steps: int = 20) -> list[float]:
    """The loss of each step of training from the same weights."""
    model = build()
    compiled = torch.compile(model, backend=backend, options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for step in range(steps):
        tokens, targets = batch(step)
        logits = compiled(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


curves = {
    "plain torch.compile": losses("inductor", {}),
    "te, current": losses("te", {"recipe": "current"}),
}
figure, axis = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
for name, curve in curves.items():
    axis.plot(curve, label=name)
axis.set_xlabel("step")
axis.set_ylabel("loss")
axis.legend()
pyplot.show()

# %% [markdown]
# FP8 lies on the plain curve: [loss curves](../docs/numerics.md#loss-curves) of larger runs, and of four bits.
#
# ## What each layer loses
#
# `accuracy_report` runs the model once in high precision, and quantizes each layer's own tensors beside it. A layer
# that loses much is a candidate for a [policy](../docs/guides/explain.md#policy).

# %%
print(te_inductor.accuracy_report(model, tokens, options={"recipe": "nvfp4"}))

# %% [markdown]
# ## Store the weights
#
# For generation, `quantize_` stores weights once, in 4.5 bits or in FP8. Names and the keys of the `state_dict` stay.

# %%
stored = te_inductor.quantize_(build().eval(), "rowwise", policy={"head": "none"})
with torch.no_grad():
    error = (stored(tokens) - build()(tokens)).norm() / build()(tokens).norm()
print(f"the logits of FP8 weights are {error:.1%} from those of fp32")
print(next(weight for name, weight in stored.named_parameters() if "blocks" in name and weight.dim() == 2))

# %% [markdown]
# On: [quick starts](../docs/start/finetuning.md), [which recipe](../docs/guides/training.md#which-recipe),
# [inference](../docs/guides/inference.md).
