"""Puts faults into copies of the package, one at a time, and reports which of them `make test` finds:

    python -m tests.mutations [NAME ...] [--list] [--jobs N]

A mutation is found by the text that it replaces, which occurs once in the package, whichever module that is in. Its
`first` are the tests that should find it; where none of them fails, the whole of `make test` has to. Exits with 1 where
a fault is missed, or a mutation's text is no more to be found."""

import argparse
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUICK = "not gpu and not gpu2 and not thorough"
# pytest's codes; the last with -x and several workers, or where it cannot import tests
PASSED, FAILED, STOPPED = 0, 1, 2


@dataclass(frozen=True)
class Mutation:
    name: str  # what is wrong in the mutant
    text: str  # of the package, once
    becomes: str
    first: tuple[str, ...]  # arguments of pytest


MUTATIONS = [
    # recipes
    Mutation(
        "the option backward reaches no recipe",
        "recipe = None if recipe is None else recipe.with_backward(backward)",
        "pass",
        ("tests/backend/test_backward.py",),
    ),
    Mutation(
        "weights that learn have scales of their own, where stored ones share it",
        "layers = fused(site.fqn) if site.recipe is not None and site.recipe.of_stored_weights else None",
        "layers = None",
        ("tests/backend/test_stored_training.py",),
    ),
    Mutation(
        "wgrad has dgrad's precision",
        "return of_dgrad, of_dgrad if wgrad == dgrad else self._with(wgrad)",
        "return of_dgrad, of_dgrad",
        ("tests/numerics/test_backward.py",),
    ),
    Mutation(
        "what a copy of two levels stands for lacks a factor",
        "return (found * (copy.amax / quantizer.two_level_max)).to(dtype)",
        "return found.to(dtype)",
        ("tests/numerics/test_backward.py",),
    ),
    Mutation(
        "what copies stand for is saved for the backward",
        "backward |= _values_of_copies(graph, backward)",
        "pass",
        ("tests/backend/test_backward.py",),
    ),
    Mutation(
        "delayed scaling's margin is ignored",
        "return self.format.max / 2.0**self.recipe.margin",
        "return self.format.max",
        ("tests/numerics/test_delayed.py",),
    ),
    Mutation(
        "the last policy entry that matches wins",
        "return next((entry for entry in self.entries if entry.matches(names, sizes)), None)",
        "return next((entry for entry in reversed(self.entries) if entry.matches(names, sizes)), None)",
        ("tests/backend/test_policy.py",),
    ),
    Mutation(
        "a quantizer without history is given up after some calls",
        "state.asked, state.has_history = state.recordings, found",
        "state.asked, state.has_history = state.recordings, found or state.recordings > 16",
        ("tests/backend/test_first_step.py",),
    ),
    Mutation(
        "a graph that draws Inductor's random numbers is interpreted",
        'target.namespace == "prims" and not target._opname.startswith("inductor_")',
        'target.namespace == "prims"',
        ("tests/backend/test_interpreted.py",),
    ),
    Mutation(
        "a backward that is interpreted counts what it writes",
        "with _unsafe_preserve_version_counter(tuple(inputs[place] for place in written)):",
        "with _unsafe_preserve_version_counter(()):",
        ("tests/backend/test_interpreted.py",),
    ),
    Mutation(
        "each rank chooses the graph of a first step alone",
        "lacks = agreement.any_rank(group, lacks)",
        "pass",
        ("tests/backend/test_graph_fsdp.py",),
    ),
    Mutation(
        "a scale that cuts values off is not counted",
        "cuts, losses = cuts + cut, losses + coarse",
        "losses = losses + coarse",
        ("tests/backend/test_misfits.py",),
    ),
    # merged layers
    Mutation(
        "strides that were traced do not keep layers apart",
        "operators.read(user).name not in _COPIES_IF_NEEDED or _is_read_by_strides(user)",
        "operators.read(user).name not in _COPIES_IF_NEEDED",
        ("tests/backend/test_compiles.py",),
    ),
    # losses of output layers
    Mutation(
        "logits that something else reads are left out",
        'return read.refused("%s reads its logits too", user.name)',
        "continue",
        ("tests/backend/test_output_loss.py",),
    ),
    Mutation(
        "words that are cut off a row of logits count",
        "if reaches and (not whole or index[-1] is not Ellipsis) and index[-1] != slice(None):",
        "if False:",
        ("tests/backend/test_output_loss.py",),
    ),
    Mutation(
        "what the gradient of a loss is does not reach the weight",
        "column = copies([x * each], 0, of_x, None, rowwise=False, columnwise=True)[1]",
        "column = copies([x], 0, of_x, None, rowwise=False, columnwise=True)[1]",
        ("tests/numerics/test_output_loss.py",),
    ),
    Mutation(
        "the gradient of a capped logit is that of a plain one",
        "return loss.outer * z, loss.inner * loss.outer * (1 - z * z)",
        "return loss.outer * z, loss.inner * loss.outer",
        ("tests/numerics/test_output_loss.py",),
    ),
    Mutation(
        "what reads sums of other rows than the loss does counts as a z-loss",
        "if not read_alike or not same_rows or",
        "if not read_alike or",
        ("tests/backend/test_output_loss.py", "-k", "z-loss"),
    ),
    Mutation(
        "a label's row of the weight's gradient lacks its own part",
        "return dw.index_add(0, words, totals.to(dw.dtype))",
        "return dw",
        ("tests/numerics/test_output_loss.py", "-k", "sums"),
    ),
    # attention, and other forms of layers
    Mutation(
        "a strict condition of a mask holds on its border",
        "sympy.expand(below - above + (1 if isinstance(condition, sympy.Lt) else 0))",
        "sympy.expand(below - above)",
        ("tests/backend/test_attention_masks.py",),
    ),
    Mutation(
        "a query whose keys all have the smallest number attends to none",
        "return True if filled is not None and filled == sympy.Rational(torch.finfo(dtype).min) else None",
        "return False if filled is not None and filled == sympy.Rational(torch.finfo(dtype).min) else None",
        ("tests/backend/test_attention_bias.py", "tests/backend/test_attention_masks.py"),
    ),
    Mutation(
        "a block of scores is what its first place is",
        "last = (first + block - 1).clamp(max=length - 1)",
        "last = first",
        ("tests/backend/test_attention_sizes.py", "-k", "borders"),
    ),
    Mutation(
        "a convolution whose channels are not last is a layer",
        """return is_of_one_element(node) and all(map(has_channels_last, (value(operands(node)["input"]), value(node))))""",
        "return is_of_one_element(node)",
        ("tests/backend/test_convolutions.py",),
    ),
    Mutation(
        "rows of logits that are stacked in another order count as all of them",
        'operators.read(row).name != "getitem" or row.args[1] != place',
        'operators.read(row).name != "getitem"',
        ("tests/backend/test_output_loss.py",),
    ),
    # launches
    Mutation(
        "a kernel that was compiled for the integer one is launched with others",
        "+ 2 * (value == 1) + bits",
        "+ bits",
        ("tests/backend/test_launcher.py",),
    ),
    Mutation(
        "a constant that is given by position is taken for an integer",
        "if wanted not in ([], constants) or constants",
        "if constants",
        ("tests/backend/test_launcher.py",),
    ),
    # graphs of forward and backward, and checkpoints
    Mutation(
        "a product that AOTAutograd has marked as a backward's is taken for a layer",
        'return node.meta.get("partitioner_tag") == "is_backward"',
        "return False",
        ("tests/backend/test_single_products.py",),
    ),
    Mutation(
        "an operand that is a transposed view is read as it lies",
        "root, swapped = start, found",
        "root, swapped = start, False",
        ("tests/backend/test_single_products.py",),
    ),
    Mutation(
        "a stored weight is written in the order that kernels read",
        "saved = matrices[place // per].saved()",
        "saved = matrices[place // per].parts",
        ("tests/backend/test_written_checkpoints.py",),
    ),
    Mutation(
        "a folder's weights are multiplied as its format is published",
        "self._stored, recipes=recipes, device=_device(model))",
        "self._stored, recipes=(), device=_device(model))",
        ("tests/models/test_pretrained.py",),
    ),
    # ops and eager kernels
    Mutation(
        "a scale is half of what it should be",
        "    encoded = on.quotient(quantizer.format.max, amax)\n",
        "    encoded = on.quotient(quantizer.format.max / 2, amax)\n",
        ("tests/numerics/test_quantize.py", "-k", "eager"),
    ),
    Mutation(
        "epsilon is added to the amax",
        "amax = on.where(amax < epsilon, epsilon, amax)",
        "amax = amax + epsilon",
        ("tests/numerics/test_quantize.py", "-k", "eager"),
    ),
    Mutation(
        "an infinity saturates",
        "return torch.where(x.isinf(), torch.nan, product).to(dtype)",
        "return product.to(dtype)",
        ("tests/numerics/test_quantize.py", "-k", "eager"),
    ),
    Mutation(
        "two-level scales: the other operand's amax is in alpha",
        "alpha = a.amax * (b.amax.t() if b.amax.dim() else b.amax) *",
        "alpha = a.amax * (a.amax.t() if a.amax.dim() else a.amax) *",
        ("tests/numerics/test_linear.py", "-k", "nvfp4"),
    ),
    Mutation(
        "a column copy is made without the Hadamard transform",
        "column = _copy(hadamard(x.t()) if quantizer.hadamard else x.t(), quantizer) if columnwise else None",
        "column = _copy(x.t(), quantizer) if columnwise else None",
        ("tests/numerics/test_linear.py", "-k", "nvfp4"),
    ),
    Mutation(
        "the gradient is cast with the input's scale",
        "place = 2 * self.slots.index(operand.slot)",
        "place = 0",
        ("tests/numerics/test_delayed.py",),
    ),
    Mutation(
        "rows behind the last group reach the gradients",
        "            dy = grouped.mask_rows(dy, ends)\n",
        "            dy = dy * 1\n",
        ("tests/numerics/test_grouped.py", "-k", "rows_behind"),
    ),
    Mutation(
        "each rank casts its rows of a weight with a scale of its own",
        "amaxes = largest(torch.stack([tensor_amax(_rounded(shard, dtype)) for shard in shards]), ranks_of(shards[0]))",
        "amaxes = torch.stack([tensor_amax(_rounded(shard, dtype)) for shard in shards])",
        ("tests/backend/test_graph_fsdp.py", "-k", "same"),
    ),
    Mutation(
        "a row's gradient is the sum of others' copies",
        ".scatter(0, order, places).view(-1, each)",
        ".scatter(0, order, places).view(each, -1).t()",
        ("tests/numerics/test_grouped.py", "-k", "places"),
    ),
    # runtime
    Mutation(
        "a group's padding holds its last row",
        "return starts.int(), tiles.int(), torch.where(known, row, -1).flatten().int()",
        "return starts.int(), tiles.int(), row.clamp(0, rows - 1).flatten().int()",
        ("tests/numerics/test_grouped.py", "-k", "layout"),
    ),
    Mutation(
        "ranks do not reduce their amaxes",
        "        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, process_group(name))\n",
        "        pass\n",
        ("tests/backend/test_ranks.py",),
    ),
    Mutation(
        "a graph that was compiled for one group of ranks serves another",
        "    return amax_groups.mesh_of(parameter) == mesh\n",
        "    return True\n",
        ("tests/backend/test_amax_groups.py",),
    ),
    Mutation(
        "a history forgets its newest amax",
        "history[:, 2:], history[:, :1]], 1)",
        "history[:, 1:], history[:, :1]], 1)",
        ("tests/numerics/test_delayed.py",),
    ),
    Mutation(
        "a kept weight that has changed is not cast again",
        "if not torch.equal(look.cached.digests, found):",
        "if not look.cached.digests.any():",
        ("tests/backend/test_cached_weights.py",),
    ),
    Mutation(
        "an optimizer steps while weight gradients wait",
        "    check_before_each(_refuse_step)\n",
        "",
        ("tests/backend/test_deferred_wgrads.py",),
    ),
    Mutation(
        "main_grad is overwritten",
        "dw.split([total.shape[0] for total in totals]), strict=True):\n        total.data.add_(gradient)",
        "dw.split([total.shape[0] for total in totals]), strict=True):\n        total.data.copy_(gradient)",
        ("tests/backend/test_main_grad.py",),
    ),
    Mutation(
        "an unexpected key is loaded without a word",
        "if strict and (missing or unexpected):",
        "if strict and missing:",
        ("tests/backend/test_saved_state.py",),
    ),
    Mutation(
        "an embedding outside of the graph leaves the flag of main_grad set",
        "node.register_prehook(_clear_flag)",
        "pass",
        ("tests/backend/test_main_grad.py",),
    ),
    # patterns, passes, diagnostics
    Mutation(
        "what reads a parameter besides its layer is forgotten",
        "shared = {parameter for parameter, _ in other_readers(sites, bodies)}",
        "shared = set()",
        ("tests/backend/test_weights_used_twice.py",),
    ),
    Mutation(
        "gradients are laid out as their GEMM has them",
        "if not (self.turned and self.gemm.transposes):",
        "if True:",
        ("tests/backend/test_gradient_layouts.py",),
    ),
    Mutation(
        "backwards that are written by hand are read as forwards",
        "return [module.graph for module in plan.graph_modules() if module.graph not in backwards]",
        "return [module.graph for module in plan.graph_modules()]",
        ("tests/backend/test_functions_by_hand.py",),
    ),
    Mutation(
        "an empty weight is no reason to refuse a layer",
        'if n == 0 or k == 0:\n        return Refusal("empty weight %d x %d", n, k)\n',
        "",
        ("tests/numerics/test_linear.py", "-k", "empty"),
    ),
    Mutation(
        "layers that do not pay are cast",
        "if weight is None or weight.saved_s >= weigher.margin * weight.cost_s:",
        "if weight is None or weight.saved_s >= 0:",
        ("tests/backend/test_size_rule.py",),
    ),
    Mutation(
        "a graph that gains little is cast",
        "least = SHARE * high",
        "least = 0.0",
        ("tests/backend/test_size_rule.py",),
    ),
    Mutation(
        "a graph that the host cannot launch in time is cast",
        "if host is not None and device - host < SHARE * high:",
        "if host is not None and device - host < -SHARE * high:",
        ("tests/backend/test_size_rule.py",),
    ),
    Mutation(
        "narrow layers of rows that nothing tells are cast",
        "LAYERS = _Weigher(_weigh_layers, MARGIN, NARROW, 0)",
        "LAYERS = _Weigher(_weigh_layers, MARGIN, 0, 0)",
        ("tests/backend/test_size_rule.py",),
    ),
    # post-grad passes and PTX
    Mutation(
        "erfc of negative numbers is that of positive ones",
        "selp.f32 $0, t, e, low; }}",
        "selp.f32 $0, e, e, low; }}",
        ("tests/backend/test_gelu.py",),
    ),
    Mutation(
        "GELU is made of erfc(z) for erfc(-z)",
        "_replace(plus_one, _call(plus_one, aten.erfc.default, z))",
        "_replace(plus_one, _call(plus_one, aten.erfc.default, inner.args[0]))",
        ("tests/backend/test_gelu.py",),
    ),
    Mutation(
        "a row copy keeps its rows of zeros",
        "(item, 0, 0, rows))",
        "(item, 0, 0, rows + 1))",
        ("tests/backend/test_padded_rows.py",),
    ),
    Mutation(
        "a backward computes again what it finds different by then",
        "    _save_what_changes(graph, backward)\n",
        "",
        ("tests/backend/test_memory_budgets.py", "-k", "finds_what or scales_that"),
    ),
    Mutation(
        "a warning is swallowed",
        "        warnings.warn(text, FallbackWarning, stacklevel=_users_level())\n",
        "        pass\n",
        ("tests/backend/test_fallback.py",),
    ),
    Mutation(
        "a gather is read behind a write of its rows",
        "    if not _source_is_written(match, literal, writes, last or last_read(match.node)):",
        "    if True:",
        ("tests/backend/test_experts.py", "-k", "gathered_behind"),
    ),
    # lowerings
    Mutation(
        "an infinite amax has no guard",
        "usable = on.both(amax > zero, amax < infinity)",
        "usable = amax > zero",
        ("tests/numerics/test_quantize.py", "-k", "test_compiled"),
    ),
    Mutation(
        "a block of NVFP4 goes to the second candidate where errors are equal",
        "found = on.where(errors[place] < smallest, scales[place], found)",
        "found = on.where(errors[place] <= smallest, scales[place], found)",
        ("tests/numerics/test_nvfp4_variants.py", "-k", "by_hand"),
    ),
    Mutation(
        "a tile of swizzled scales reads rows beyond the last",
        "for at, end, holds in ((row, rows, tiles * ROWS), (block, blocks, across * BLOCKS))",
        "for at, end, holds in ((block, blocks, across * BLOCKS),)",
        ("tests/offline/test_blackwell.py",),
    ),
    Mutation(
        "an amax in a cast's kernel counts what the mask leaves out",
        "        if masks:\n            tile = f\"tl.where(tl.broadcast_to({' & '.join(masks)}, {size}), {tile}, 0)\"",
        '        if False:\n            tile = ""',
        ("tests/offline/test_delayed.py", "-k", "record"),
    ),
    Mutation(
        "a bias gradient in a cast's kernel counts what the mask leaves out",
        "tile = f\"tl.where(tl.broadcast_to({' & '.join(masks)}, [{', '.join(size)}]), {tile}, 0.0)\"",
        'tile = f"{tile}"',
        ("tests/offline/test_column_sums.py",),
    ),
    Mutation(
        "pairs of rows are stored in the wrong order",
        '"1, 2, 0") if self._paired == "y" else',
        '"2, 1, 0") if self._paired == "y" else',
        ("tests/offline/test_interpreter.py", "-k", "pairs"),
    ),
    # templates
    Mutation(
        "a stage is read before it is filled",
        "    mbarrier.wait(full.index(place), phase)\n    units = ",
        "    units = ",
        ("tests/offline/test_gluon.py",),
    ),
    Mutation(
        "a kernel that starts early does not wait",
        "    inside = m[:, None] < M\n    if ASSEMBLY:\n        tl.extra.cuda.gdc_wait()\n    y = ",
        "    inside = m[:, None] < M\n    y = ",
        ("tests/offline/test_small_m.py",),
    ),
    Mutation(
        "of programs that share K unevenly none has a block more",
        "    if K // BLOCK_K % SPLITS > 0:\n",
        "    if K // BLOCK_K % SPLITS > BLOCK_K:\n",
        ("tests/offline/test_nvfp4.py", "-k", "interpreted"),
    ),
    Mutation(
        "a row that names its expert meets the next one's weight",
        "yield expert % experts, (ids == expert).nonzero()[:, 0]",
        "yield (expert + 1) % experts, (ids == expert).nonzero()[:, 0]",
        ("tests/backend/test_stored_experts.py", "-k", "every_form"),
    ),
    Mutation(
        "every tile of an expert's rows begins at its first one",
        "first = (p - tl.sum(tl.where(mine, last - tiles, 0), 0)) * ROWS",
        "first = p * 0",
        ("tests/offline/test_experts_decode.py", "-k", "interpreted"),
    ),
    # experts over ranks, and their rows
    Mutation(
        "a token has the rows of the next one",
        "return rows[places].sum(1",
        "return rows[places.roll(1, 0)].sum(1",
        ("tests/backend/test_permutations.py",),
    ),
    Mutation(
        "experts' rows meet those of other tokens",
        "            made = _call(reader, aten.index.Tensor, node, [places])\n",
        "            made = node\n",
        ("tests/backend/test_token_order.py",),
    ),
    Mutation(
        "halves of a gradient are cast with rows of no expert",
        "            made[step] = [_of_piece(step, source, piece) for piece in made[source]]\n",
        "            made[step] = made[source]\n",
        ("tests/backend/test_concatenations.py",),
    ),
    Mutation(
        "the amax of a long row is that of its end",
        "{turns} = tl.maximum({turns}, {tile})",
        "{turns} = {tile}",
        ("tests/offline/test_delayed.py", "-k", "long_rows"),
    ),
    Mutation(
        "zeros that were read before rows are added to them have the sum in them",
        "    if (readers and not operators.read(node).in_place) or not all(node < reader for reader in readers):\n",
        "    if readers and not operators.read(node).in_place:\n",
        ("tests/backend/test_permutations.py",),
    ),
    Mutation(
        "what lies behind the last group is multiplied",
        "        return inductor_ops.where(inside, load(index), inductor_ops.constant(0, torch.uint8))\n",
        "        return load(index)\n",
        ("tests/backend/test_permutations.py",),
    ),
    Mutation(
        "each rank decides for itself whether its experts pay",
        "rewrite_attention, *_WEIGHED, follow_ranks, *_DECIDED, *_REWRITE)",
        "rewrite_attention, *_WEIGHED, *_DECIDED, *_REWRITE)",
        ("tests/backend/test_expert_parallel.py", "-k", "unequal"),
    ),
    Mutation(
        "a rollout does not see steps of fused optimizers",
        "                _steps[parameter] = steps + 1\n",
        "                _steps[parameter] = steps\n",
        ("tests/backend/test_rollouts.py", "-k", "fused"),
    ),
    Mutation(
        "graphs of a model whose weights are stored already let a view's be stale",
        "following(compiled, [place for place, given in enumerate(example_inputs) if isinstance(given, StoredWeight)])",
        "compiled",
        ("tests/backend/test_rollouts.py", "-k", "generation_follows or graphs_of"),
    ),
    Mutation(
        "the size rule decides by the number of rows what is batch-invariant",
        "    weigh_sites: (),\n",
        "",
        ("tests/backend/test_batch_invariance.py", "-k", "size_rule"),
    ),
    Mutation(
        "layers that 'batch_invariant' leaves in high precision are products of a library",
        "in_order=why is None)",
        "in_order=False)",
        ("tests/backend/test_batch_invariance.py", "-k", "high_precision_is_rewritten"),
    ),
    Mutation(
        "layers that are computed again count as what is saved",
        "        if not bodies.is_computed_again(site.match.node.graph)\n",
        "",
        ("tests/backend/test_memory_rule.py",),
    ),
]


@functools.cache
def _sources(package: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in package.rglob("*.py")}


def place_of(text: str, package: Path) -> Path | None:
    """The one module that has it, once."""
    found = [path for path, source in _sources(package).items() for _ in range(source.count(text))]
    return found[0] if len(found) == 1 else None


def check(mutation: Mutation, folder: Path) -> tuple[bool, str]:
    """Whether the tests find it, and how that went."""
    started, ignored = (
        time.monotonic(),
        shutil.ignore_patterns("__pycache__", ".git", ".venv*", ".*_cache", ".hypothesis", "out"),
    )
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=ignored, symlinks=True)
    place = place_of(mutation.text, tree / "te_inductor")
    if place is None:
        return False, "its text is not once in the package"
    place.write_text(place.read_text().replace(mutation.text, mutation.becomes))
    for arguments in (mutation.first, ()):
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", QUICK, "-p", "no:cacheprovider", *arguments]
        command += [] if arguments else ["-n", "2"]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if failed and done.returncode in (FAILED, STOPPED):
            return True, f"{failed[0].split(' - ')[0]}, {time.monotonic() - started:.0f} s"
        if done.returncode != PASSED:
            return False, f"pytest {' '.join(arguments)} is no run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return False, f"missed, {time.monotonic() - started:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of those to check; all by default")
    parser.add_argument("--list", action="store_true", help="list them, and where each is")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    given = parser.parse_args()
    chosen = [one for one in MUTATIONS if not given.names or any(part in one.name for part in given.names)]
    if given.list:
        places = [place_of(one.text, ROOT / "te_inductor") for one in chosen]
        for one, place in zip(chosen, places, strict=True):
            print(f"{place.relative_to(ROOT) if place else 'nowhere, or not once'}: {one.name}")
        return int(None in places)

    def checked(mutation: Mutation) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            found, how = check(mutation, Path(folder))
        print(f"{'caught' if found else 'MISSED'}  {mutation.name}: {how}", flush=True)
        return found

    with ThreadPoolExecutor(given.jobs) as pool:
        results = list(pool.map(checked, chosen))
    print(f"{sum(results)} of {len(results)} caught")
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
