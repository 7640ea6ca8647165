"""One step of every class of transformers that can be made tiny, in low precision beside high precision::

    python -m tests.sweep                                  # all, twenty minutes on two cores
    python -m tests.sweep LlamaForCausalLM --recipe block
    python -m tests.sweep --kinds image --json out/sweep.json

No list says which classes: they are what transformers' automatic classes know. Each runs in a process of its own, on a
CPU, uncompiled (tests/uncompiled.py), so that it takes seconds. What is printed: classes whose step failed, that lost a
gradient, or whose gradients are further off than errors of that size explain; exits with 1 if there are any. Those that
have no layer in low precision are listed too.

**Bound.** `NOISE`, relative and normal, on each weight is about what a copy in E4M3 leaves (docs/numerics.md), and
`NOISE_OF_4` what one in 4 bits does. A gradient may be `SLACK` times as far off as it is in the worst of `DRAWS` with
that, as activations and gradients have such errors too: models differ by more than an order in how they carry them on."""

import argparse
import copy
import json
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests import forked

NOISE, NOISE_OF_4, DRAWS, SLACK = 2.0**-5, 2.0**-3, 3, 6.0
LEAST = 1e-4  # of the largest gradient's rms, below which one is nothing but rounding
ROUNDING = 2.0**-20  # of a gradient that the noise does not reach
FEWEST = 16  # elements of a gradient: of fewer, a few draws of noise do not say how far off they may be
WIDTH = 128  # features: the least that each recipe takes
BATCH, TOKENS, CLASSES, IMAGE = 4, 32, 16, 32
MOST = 20_000_000  # parameters
SECONDS = 150  # of a class
IMPORTS = (*forked.TORCH, "transformers.modeling_utils", "transformers.models.auto.modeling_auto", "tests.uncompiled")
THREAD = threading.local()  # a server of processes for each
KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "pair": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
# Under all names that configurations have for them; those that a configuration lacks are left out.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), WIDTH),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "ffn_hidden_size"),
        2 * WIDTH,
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers",
         "decoder_layers"), 2
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
         "decoder_attention_heads"), 4
    ),
    **dict.fromkeys(
        ("head_dim", "d_kv", "rotary_dim", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        WIDTH // 4,
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
         "expert_ffn_hidden_size"), WIDTH
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(
        ("dropout", "attention_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob",
         "resid_pdrop", "embd_pdrop", "attn_pdrop", "activation_dropout", "dropout_rate", "residual_dropout",
         "embedding_dropout", "layerdrop", "encoder_layerdrop", "decoder_layerdrop"), 0.0
    ),
    "hidden_dim": 2 * WIDTH, "vocab_size": 256, "q_lora_rank": WIDTH, "image_size": IMAGE, "patch_size": 8,
    "num_labels": CLASSES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "multi_query": False, "use_cache": False,
}  # fmt: skip


def known(kinds: list[str]) -> dict[str, str]:
    """Names of classes, and of what kind each is."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for kind in kinds:
        for names in getattr(modeling_auto, KINDS[kind]).values():
            for name in names if isinstance(names, tuple | list) else (names,):
                found.setdefault(name, kind)
    return found


def build(name: str, key_heads: int) -> nn.Module:
    """Tiny, of random weights, in evaluation: nothing is dropped, experts are chosen without noise. `key_heads` of 4 heads
    have keys and values of their own, if the class knows such a thing.

    Raises:
        ValueError: it cannot be made so small.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    kind = getattr(transformers, name)
    config = kind.config_class
    other_names = getattr(config, "attribute_map", {})
    has = {*config().to_dict(), *other_names, "num_labels"}
    known_sizes = {**SIZES, **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), key_heads)}
    sizes = {
        size: value for size, value in known_sizes.items() if size in has and other_names.get(size) not in known_sizes
    }
    made = config(**sizes)
    made._attn_implementation = "sdpa"
    with torch.device("meta"):
        try:
            parameters = kind(made).parameters()
        except ValueError:  # it has no attention by that name
            made._attn_implementation = "eager"
            parameters = kind(made).parameters()
    if (count := sum(one.numel() for one in parameters)) > MOST:
        raise ValueError(f"{count} parameters")
    torch.manual_seed(0)
    model: nn.Module = kind(made).eval()
    return model


def batch(model: nn.Module, kind: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    if kind == "image":
        return {"pixel_values": torch.randn(2 * BATCH, getattr(model.config, "num_channels", 3), IMAGE, IMAGE)}
    ids = torch.randint(3, 250, (BATCH, TOKENS))
    return {"input_ids": ids, **({"decoder_input_ids": ids} if kind == "pair" else {})}


def step(model: nn.Module, run: Callable[..., Any], given: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients by name."""
    model.zero_grad()
    out = run(**given)
    logits = (out.logits if hasattr(out, "logits") else out[0]).float().flatten(0, -2)
    loss = nn.functional.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1])
    loss.backward()
    return loss.item(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def noisy(model: nn.Module, noise: float, draw: int) -> nn.Module:
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(2 + draw)
    with torch.no_grad():
        for one in model.parameters():
            if one.dim() > 1:
                one.mul_(1 + noise * torch.randn(one.shape, generator=generator))
    return model


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative, of gradients that are more than rounding, and more than a few numbers."""
    rms = {name: one.square().mean().sqrt() for name, one in expected.items()}
    return {
        name: ((found[name] - one).norm() / one.norm()).item()
        for name, one in expected.items()
        if name in found and one.numel() >= FEWEST and rms[name] > LEAST * max(rms.values())
    }


def look(name: str, kind: str, recipe: str) -> dict[str, Any]:
    """What one class does, of this process."""
    from te_inductor import compat, explain
    from tests import uncompiled

    compat.compile_fx = uncompiled.compile_fx  # type: ignore[assignment]
    warnings.simplefilter("ignore")
    noise = NOISE_OF_4 if "fp4" in recipe else NOISE
    for key_heads in (2, 4):  # some classes want as many as there are heads, and say so only as they run
        try:
            model = build(name, key_heads)
            given = batch(model, kind)
            others = [noisy(model, noise, draw) for draw in range(DRAWS)]
            loss, expected = step(model, model, given)
            break
        except Exception as error:  # of a class that is not made for such a batch, or such sizes
            left = f"{type(error).__name__}: {error}"[:120]
    else:
        return {"left": left}
    expected = {key: one.clone() for key, one in expected.items()}
    options: dict[str, Any] = {"recipe": recipe, "policy": {"*": recipe}}
    try:
        low_loss, found = step(model, torch.compile(model, backend="te", options=options), given)
    except Exception:
        torch.compiler.reset()
        try:
            step(model, torch.compile(model, backend="aot_eager"), given)
        except Exception:
            return {"left": "torch does not run its graph uncompiled"}
        raise
    found = {key: one.clone() for key, one in found.items()}
    bounds = [errors(step(other, other, given)[1], expected) for other in others]
    worst = max(
        (error / max(ROUNDING, *(one[key] for one in bounds)), key) for key, error in errors(found, expected).items()
    )
    torch.compiler.reset()
    report = explain(model, options=options, **given)
    return {
        "loss": loss, "low_loss": low_loss, "of_bound": worst[0] / SLACK, "worst": worst[1],
        "lost": sorted(expected.keys() ^ found.keys()), "failure": report.failure,
        "sites": len(report.sites), "low": sum(site.kernel != "high_precision" for site in report.sites),
        "share": report.flops.share,
    }  # fmt: skip


def is_wrong(found: dict[str, Any]) -> bool:
    return "left" not in found and bool(
        "error" in found or found["lost"] or found["failure"] or not found["of_bound"] <= 1
    )


def swept(
    doc: str, module: str, look: Callable[[str, str, str], dict[str, Any]], is_wrong: Callable[[dict[str, Any]], bool],
    imports: tuple[str, ...], ends: dict[int, dict[str, Any]], option: str, jobs: int, **given: Any,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """What each class does by `look` of the command `python -m module`, in a process of its own that has the `imports`;
    printed as it is told. `ends` has what a signal says of a class; `given` is of the command's own option."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of classes; default: all")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument(f"--{option}", **given)
    parser.add_argument("--jobs", type=int, default=jobs)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    value = getattr(args, option)
    if args.one:
        print(json.dumps(look(args.names[0], args.one, value)))
        sys.exit()
    classes = {name: kind for name, kind in known(args.kinds).items() if not args.names or name in args.names}

    def apart(name: str) -> dict[str, Any]:
        if not hasattr(THREAD, "server"):
            THREAD.server = forked.Server(imports)
        run = THREAD.server.run(module, name, "--one", classes[name], f"--{option}", value, timeout=SECONDS)
        if run.returncode:
            return ends.get(-run.returncode, {"error": run.stderr[-1500:]})
        found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
        return found

    found = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        for name, result in zip(classes, pool.map(apart, classes), strict=True):
            found[name] = result
            print(name, "WRONG" if is_wrong(result) else "left" if "left" in result else "ok", result, flush=True)
            if args.json:
                args.json.write_text(json.dumps(found, indent=1))
    wrong = [name for name, one in found.items() if is_wrong(one)]
    ran = sum("left" not in one for one in found.values())
    print(f"{ran} of {len(classes)} classes ran, {len(wrong)} wrong: {', '.join(wrong)}")
    return found


def main() -> None:
    ends = {signal.SIGALRM: {"error": f"no end after {SECONDS} s"}}
    found = swept(__doc__, "tests.sweep", look, is_wrong, IMPORTS, ends, "recipe", 2, default="current")
    high = [name for name, one in found.items() if one.get("low") == 0]
    print(f"without a layer in low precision: {', '.join(high) or 'none'}")
    sys.exit(any(map(is_wrong, found.values())))


if __name__ == "__main__":
    main()
