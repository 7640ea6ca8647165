"""Faults of what lives between the calls of a graph: state, ranks, experts' rows, weights that follow."""

from tests.mutations.mutation import Mutation

MUTATIONS = [
    # runtime
    Mutation(
        "hooks on saved tensors copy what a backward writes",
        "        with compat.saved_as_they_are(extra):\n",
        "        if True:\n",
        ("tests/backend/test_autograd.py", "-k", "copy_what"),
    ),
    Mutation(
        "a group's padding holds its last row",
        "return starts.int(), tiles.int(), torch.where(known, row, -1).flatten().int()",
        "return starts.int(), tiles.int(), row.clamp(0, rows - 1).flatten().int()",
        ("tests/numerics/test_grouped.py", "-k", "layout"),
    ),
    Mutation(
        "ranks do not reduce their amaxes",
        "            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group)\n",
        "            pass\n",
        ("tests/backend/test_ranks.py",),
    ),
    Mutation(
        "a rank that does something else later on takes the amaxes of other layers",
        "        if number in self.met:\n",
        "        if False:\n",
        ("tests/backend/test_late_ranks.py", "-k", "forward"),
    ),
    Mutation(
        "replicas of a pipeline's stage leave their amaxes to a forward that never comes",
        "    return ddp in _in_pipelines\n",
        "    return False\n",
        ("tests/backend/test_pipelines.py",),
    ),
    Mutation(
        "ranks that were in other numbers of groups have other keys for each other",
        'store.add(f"te_inductor/groups/{rank}", 1)',
        "1 + rank",
        ("tests/backend/test_regrouped.py",),
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
        "gradients that wait outlive a zero_grad",
        "compat.after_zero_grad(_forget)\n",
        "",
        ("tests/backend/test_deferred_wgrads.py", "-k", "thrown_away"),
    ),
    Mutation(
        "gradients that wait are added to those of the next batch where the program has set the others to None",
        "    _look(queue for queue in queues if queue not in running.queues)\n",
        "",
        ("tests/backend/test_deferred_wgrads.py", "-k", "by_hand"),
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
        "rewrite_attention, *_WEIGHED, follow_ranks, *_DECIDED, *_BEGUN, *_REWRITE)",
        "rewrite_attention, *_WEIGHED, *_DECIDED, *_BEGUN, *_REWRITE)",
        ("tests/backend/test_expert_parallel.py", "-k", "unequal"),
    ),
    Mutation(
        "a rollout does not see steps of fused optimizers",
        "                steps[0] += 1\n",
        "                steps[0] += 0\n",
        ("tests/backend/test_rollouts.py", "-k", "fused"),
    ),
    Mutation(
        "a rollout does not see that a buffer of weights was written behind a step of others",
        "_any_steps if in_buffer else ",
        "",
        ("tests/backend/test_rollouts.py", "-k", "buffer"),
    ),
    Mutation(
        "graphs of a model whose weights are stored already let a view's be stale",
        "following(compiled, looks)",
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
