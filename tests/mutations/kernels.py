"""Faults of ops, of their eager kernels, and of the code that is generated and launched."""

from tests.mutations.mutation import Mutation

MUTATIONS = [
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
        ("tests/numerics/test_layers.py", "-k", "nvfp4"),
    ),
    Mutation(
        "a column copy is made without the Hadamard transform",
        "column = _copy(hadamard(x.t()) if quantizer.hadamard else x.t(), quantizer) if columnwise else None",
        "column = _copy(x.t(), quantizer) if columnwise else None",
        ("tests/numerics/test_layers.py", "-k", "nvfp4"),
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
        ".index_put((order,), places).view(-1, each)",
        ".index_put((order,), places).view(each, -1).t()",
        ("tests/numerics/test_grouped.py", "-k", "places"),
    ),
    Mutation(
        "a gradient that autograd is to have in fp32 is rounded to the weight's dtype first",
        "return replace(gradient, dtype=torch.float32).laid_out()",
        "return [None if one is None else one.float() for one in gradient.laid_out()]",
        ("tests/backend/test_grad_dtype.py",),
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
    Mutation(
        "parts of K that differ by a block begin where equal ones would",
        "        first = split * BLOCKS // SPLITS\n        turns = (split + 1) * BLOCKS // SPLITS - first\n",
        "        first, turns = split * (BLOCKS // SPLITS), BLOCKS // SPLITS\n",
        ("tests/offline/test_gluon.py", "-k", "prompts"),
    ),
    Mutation(
        "a product of experts lacks the scale of its right tensor",
        "    if OF_B == 0:\n        y *= gl.load(b_scale, mask=live, other=0.0)\n",
        "",
        ("tests/offline/test_grouped_mm.py", "-k", "wgrad or groups"),
    ),
]
