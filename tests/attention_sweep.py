"""One step of classes of transformers with attention as on a GPU, beside eager; what each mask is proven to be, and why
others stay::

    python -m tests.attention_sweep                                      # all of tests/sweep.py's, an hour of one core
    python -m tests.attention_sweep LlamaForCausalLM --written eager     # attention by hand
    python -m tests.attention_sweep --kinds masked --json out/masks.json

The passes of attention run alone, in float64, with FlexAttention as torch computes it on a CPU, for two batches of one
program: padded on both sides, and not padded. So an output or a gradient that is off by more than rounding is a mask
that was proven to be what it is not. Windows and chunks are shorter than the sequence. Exits with 1 if a class is
wrong."""

import signal
import sys
import traceback
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from tests import sweep

NEAR = 8  # tokens of a window, or a chunk
BOUND = 1e-5  # of the norm: models cast to float32, in norms
NOTHING = 1e-4  # of the largest gradient's norm, below which one is nothing but rounding, as of the biases of keys
IMPORTS = (*sweep.IMPORTS, "tests.attention", "pytest")
SIZES = dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size", "local_attention"), NEAR)


def batches(model: nn.Module, kind: str) -> list[dict[str, Tensor]]:
    given = sweep.batch(model, kind)
    if kind == "image":
        return [{name: one.double() for name, one in given.items()}]
    mask = torch.ones_like(given["input_ids"])
    padded = mask.clone()
    padded[0, : NEAR + 1], padded[1, -NEAR:] = 0, 0
    return [{**given, "attention_mask": one} for one in (padded, mask)]


def build(name: str, kind: str, key_heads: int, written: str) -> tuple[nn.Module, list[dict[str, Tensor]], list[Any]]:
    """A model, its batches, and what eager code makes of them.

    Raises:
        ValueError: it does not write attention so.
    """
    model = sweep.build(name, key_heads).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # type: ignore[operator]  # grouped products know no float64
    if written == "eager":
        if model.config._attn_implementation == "eager":  # type: ignore[union-attr]
            raise ValueError("it has no other attention")
        model.set_attn_implementation("eager")  # type: ignore[operator]
    given = batches(model, kind)
    return model, given, [copied(sweep.step(model, model, one)) for one in given]


def copied(step: tuple[float, dict[str, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    return step[0], {name: one.clone() for name, one in step[1].items()}


def apart_by(found: Tensor, expected: Tensor) -> Tensor:
    """The norm of the difference; infinite where one of them alone is NaN."""
    if not torch.equal(found.isnan(), expected.isnan()):
        return torch.tensor(torch.inf)
    return (found - expected).nan_to_num().norm()


def furthest(
    found_loss: float, found: dict[str, Tensor], loss: float, gradients: dict[str, Tensor]
) -> tuple[float, str]:
    """How far off, of its norm, the loss or the worst gradient is, and which."""
    sizes = {key: gradient.nan_to_num().norm() for key, gradient in gradients.items()}
    least = NOTHING * max(sizes.values())
    off = {key: apart_by(found[key], gradients[key]) / (sizes[key] + least) for key in sizes.keys() & found.keys()}
    losses = torch.tensor(found_loss), torch.tensor(loss)
    off["loss"] = apart_by(*losses) / losses[1].nan_to_num(1.0).abs()
    return max((one.item(), key) for key, one in off.items())


def look(name: str, kind: str, written: str) -> dict[str, Any]:
    """What one class does, of this process."""
    import pytest

    from tests.attention import Passes, as_on_a_gpu

    warnings.simplefilter("ignore")
    sweep.SIZES |= SIZES
    for key_heads in (2, 4):
        try:
            model, given, expected = build(name, kind, key_heads, written)
            break
        except Exception as error:  # as in tests/sweep.py
            left = f"{type(error).__name__}: {error}"[:120]
    else:
        return {"left": left}
    backend, worst, lost = Passes(traced=True), (0.0, ""), set[str]()
    try:
        with as_on_a_gpu(pytest.MonkeyPatch()):
            compiled = torch.compile(model, backend=backend)
            for one, (loss, gradients) in zip(given, expected, strict=True):
                found_loss, found = sweep.step(model, compiled, one)
                lost |= gradients.keys() ^ found.keys()
                worst = max(worst, furthest(found_loss, found, loss, gradients))
        if lost or not worst[0] <= BOUND:
            torch.compiler.reset()
            plain = torch.compile(model, backend="aot_eager")
            steps = [copied(sweep.step(model, plain, one)) for one in given]
            if any(not furthest(*step, *one)[0] <= BOUND for step, one in zip(steps, expected, strict=True)):
                return {"left": "its graph, without the passes too, computes what its code does not"}
    except Exception:
        torch.compiler.reset()
        try:
            sweep.step(model, torch.compile(model, backend="aot_eager"), given[0])
        except Exception:
            return {"left": "torch does not run its graph uncompiled"}
        return {"error": traceback.format_exc()[-1500:]}
    sites = Counter(f"{site.mask} | {site.kernel} | {site.reason or ''}" for site in backend.found)
    return {"worst": worst, "lost": sorted(lost), "sites": dict(sites)}


def is_wrong(found: dict[str, Any]) -> bool:
    return "left" not in found and bool("error" in found or found["lost"] or not found["worst"][0] <= BOUND)


def main() -> None:
    ends = {
        signal.SIGALRM: {"left": f"no end after {sweep.SECONDS} s"},
        signal.SIGKILL: {"left": "killed for its memory"},
    }
    given = {"choices": ("sdpa", "eager"), "default": "sdpa", "help": "torch's function, or by hand"}
    found = sweep.swept(__doc__, "tests.attention_sweep", look, is_wrong, IMPORTS, ends, "written", 1, **given)
    sites, of_class = Counter[str](), Counter[str]()
    for one in found.values():
        sites.update(one.get("sites", {}))
        of_class.update(one.get("sites", {}).keys())
    print("\nsites, classes: mask | kernel | why not otherwise")
    for site, count in sites.most_common():
        print(f"{count:5}, {of_class[site]:4}: {site}")
    sys.exit(any(map(is_wrong, found.values())))


if __name__ == "__main__":
    main()
