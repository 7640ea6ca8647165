"""Faults of recipes, of what finds and changes layers in graphs, and of what is reported."""

from tests.mutations.mutation import Mutation

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
        "bits of the second half of a mask's neighbours are those of the first",
        "for half in (lanes < WORD, lanes >= WORD))",
        "for half in (lanes < WORD, lanes < WORD))",
        ("tests/backend/test_saved_values.py",),
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
        "with _unsafe_preserve_version_counter(counted):",
        "with _unsafe_preserve_version_counter(()):",
        ("tests/backend/test_interpreted.py",),
    ),
    Mutation(
        "a cached graph saves in low precision what the modules of another model are named for",
        "SavingPartitioner(theirs, entries, tell, modules)",
        "SavingPartitioner(theirs, entries, tell)",
        ("tests/backend/test_caches.py",),
    ),
    Mutation(
        "a function that reads another global is the same one in caches",
        "read = hashlib.sha256(repr(_read(value, set())).encode()).hexdigest()[:8]",
        'read = ""',
        ("tests/backend/test_constants.py",),
    ),
    Mutation(
        "a cache keeps a graph whose lowering failed",
        'cached = {} if known == 0 else {"fx_graph_cache": False, "fx_graph_remote_cache": False}',
        "cached = {}",
        ("tests/backend/test_failed_lowerings.py",),
    ),
    Mutation(
        "each rank chooses the graph of a first step alone",
        "lacks = any_rank(group, lacks)",
        "pass",
        ("tests/backend/test_graph_fsdp.py",),
    ),
    Mutation(
        "a scale that cuts values off is not counted",
        "cuts + cut, losses + coarse",
        "cuts, losses + coarse",
        ("tests/backend/test_misfits.py",),
    ),
    Mutation(
        "a layer that keeps failing is moved in this process alone",
        "self.earlier, self.moved = (kept_out, own), bool(moved)",
        "self.earlier, self.moved = (kept_out, own), False",
        ("tests/backend/test_guard.py",),
    ),
    Mutation(
        "Dynamo does not ask whether a guard has moved a layer",
        "return store.is_moved(parameter) is expected",
        "return True",
        ("tests/backend/test_guard.py",),
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
    Mutation(
        "ranks that share words take each other's labels for their own",
        "places = labels - first",
        "places = labels",
        ("tests/backend/test_output_loss_ranks.py", "-k", "share"),
    ),
    Mutation(
        "ranks that share words cut chunks by the words that each has",
        "(words if loss.shared is None else loss.shared.most)",
        "words",
        ("tests/numerics/test_output_loss.py", "-k", "as_often"),
    ),
    # attention, and other forms of layers
    Mutation(
        "attention of few queries reads a cache that was written behind its copy",
        "if plan.writes.anywhere(source) if learns else plan.writes.between([source], node, until):",
        "if learns and plan.writes.anywhere(source):",
        ("tests/backend/test_attention_few_queries.py",),
    ),
    Mutation(
        "attention of few queries takes one mask for all of them",
        "    return of_batch and all(\n",
        "    return of_batch and any(\n",
        ("tests/backend/test_attention_few_queries.py",),
    ),
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
        "a node is read as what wrote it last, whatever that wrote",
        "if written is None or (written and not _writes_all(written[-1], node)):",
        "if written is None:",
        ("tests/backend/test_attention_traps.py", "-k", "written"),
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
    Mutation(
        "values that a program holds in FP8 are read behind a write as they were in front of it",
        "    return None if writes.between(nodes, min(nodes), match.node) else found\n",
        "    return found\n",
        ("tests/backend/test_held_weights.py",),
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
    # patterns, passes, diagnostics
    Mutation(
        "what reads a parameter besides its layer is forgotten",
        "shared = {parameter for parameter, _ in other_readers((site for site in plan.candidates if site.low), bodies)}",
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
]
