"""What differs between releases of torch from 2.11 on, each difference in one function, and what this package replaces
of torch (`patches.py`). Nothing else asks for torch's version, or patches torch."""

import torch

if torch.__version__ < (2, 11):  # type: ignore[operator]
    raise ImportError(
        f"te_inductor needs torch 2.11 or later, found {torch.__version__}; pip install --upgrade 'torch>=2.11'"
    )

from te_inductor.compat.backwards import before_backward
from te_inductor.compat.checkpoints import checkpoint_of_call, saved_as_they_are
from te_inductor.compat.dynamo import (
    ConstantMeta,
    before_export,
    before_lowering,
    captures_a_backward,
    collective_behind,
    compiled_apart,
    compiled_inside,
    compiles_ahead,
    constant_type_name,
    guard_on,
    guard_on_attribute,
    guard_on_tensor,
    in_uncompiled_frame,
    is_compiling,
    is_decomposed_by_export,
    is_of_a_module,
    is_translating,
    let_gradients_differ,
    let_threads_register,
    method_call,
    never_compile,
    options_of_compiled,
    register_constant,
    trace_artifact,
    traced_beside,
    unwinding_transforms,
)
from te_inductor.compat.inductor import (
    MASK_MOD,
    autotune,
    bypass_graph_cache,
    compile_fx,
    concatenated,
    flex_constants,
    keep_out_of_graph_cache,
    keeping_whole_graphs,
    let_marks_be_saved,
    miss_graph_cache,
    saving_a_minimum_cut,
    size_hint,
    width_of_right_vectors,
    without_graph_cache,
)
from te_inductor.compat.patches import PATCHES, Patch, patch
from te_inductor.compat.wrappers import (
    Gathered,
    after_zero_grad,
    around_swaps,
    ddp_group_of,
    ddp_reduces_later,
    fsdp_group_of,
    gathered,
    guard_on_wrappers,
    in_metadata_inference,
    in_reentrant_forward,
    inside_ddp,
    inside_ddp_again,
    is_cut_by_ddp,
    is_flattened_module,
    is_gathered,
    is_sharded_module,
    local_of,
    mesh_of_dtensor,
    name_in_ddp,
    shard_of,
)
