"""Faults of torch that the package works around: for each record of `compat.PATCHES` a function that tells whether the
torch that is imported has the fault, without the patch.

Where a fault would show in a kernel's speed or in memory of a GPU, what is looked at is the decision of Inductor that
leads there, which it takes on any machine; the function says so."""

import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import sympy
import torch
from torch import nn
from torch._functorch import config as functorch
from torch._functorch import partitioners
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._inductor import config, ir, lowering
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.cuda_combined_scheduling import CUDACombinedScheduling
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.codegen.triton_combo_kernel import ComboKernel
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv, ModularIndexing
from torch.utils.checkpoint import CheckpointFunction, CheckpointPolicy, checkpoint
from torch.utils.flop_counter import FlopCounterMode

from te_inductor.recipes import Quantizer

aten = torch.ops.aten


class _Stop(Exception):
    pass


def saves_a_list() -> bool:
    """The partitioner saves a list marked MUST_SAVE as one node, which is no tensor."""
    real, chosen = partitioners.choose_saved_values_set, []

    def choose(*args: Any, **kwargs: Any) -> Any:
        chosen.extend(real(*args, **kwargs))
        raise _Stop

    def partition(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        for node in joint.graph.find_nodes(op="call_function", target=aten._foreach_mul.Scalar):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return partitioners.min_cut_rematerialization_partition(joint, *args, **kwargs)

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * torch._foreach_mul([w.expand(64, 64)], 2.0)[0]

    def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(gm.forward)

    budget = functorch.patch(activation_memory_budget=0.5, enable_autograd_cache=False)
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    with mock.patch.object(partitioners, "choose_saved_values_set", choose), budget, suppress(_Stop):
        aot_function(program, keep, keep, partition)(x, w)
    assert chosen
    return any(not isinstance(node.meta["val"], torch.Tensor) for node in chosen)


def lacks_attention() -> bool:
    """Some attention is missing in the list of expensive ops. What the backward then computes again is attention on
    Hopper, which is cuDNN's; only the list is looked at."""
    expensive = partitioners.get_default_op_list().compute_intensive_ops
    kinds = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    return any(getattr(aten, f"_scaled_dot_product_{kind}") not in expensive for kind in kinds)


def counts_no_attention() -> bool:
    """The CPU's attention has no FLOPs."""
    q = torch.randn(1, 2, 64, 16)
    with FlopCounterMode(display=False) as counted:
        nn.functional.scaled_dot_product_attention(q, q, q)
    return bool(counted.get_total_flops() == 0)


def inverts_a_division() -> bool:
    """i // 128 is given an inverse, which would be written to. Inductor uses that for GPUs alone: the formula is looked
    at here, generated code in tests/offline/test_block.py."""
    from torch._inductor.invert_expr_analysis import generate_inverse_formula

    i = sympy.Symbol("i", integer=True, nonnegative=True)
    assert config.loop_index_inversion_in_fusion
    with _graph():
        return generate_inverse_formula(FloorDiv(i, 128), i) is not None


def takes_the_nodes_result() -> bool:
    """The lowering of cat asks the graph's node, whoever calls it, for the size of one result. It asks where inputs
    read the same buffer."""
    recombined = getattr(lowering, "_cat_inputs_recombine_reduction", None)
    if recombined is None:
        return False
    pieces = [SimpleNamespace(get_read_names=lambda: {"buf0"})] * 2
    results = (torch.empty(4), torch.empty(2))
    with _graph(current_node=SimpleNamespace(meta={"val": results}), try_get_buffer=lambda name: None):
        try:
            recombined(pieces, 0)
        except AttributeError:
            return True
    return False


def matches_different_indices() -> bool:
    """Terms of i and of j, which never join, are matched all the same."""
    from torch._inductor import sizevars

    i, j = (sympy.Dummy(integer=True, nonnegative=True) for _ in range(2))  # of which nothing is cached
    with mock.patch.object(sympy.Basic, "match", autospec=True, side_effect=sympy.Basic.match) as match:
        sizevars.join_dimensions(ModularIndexing(i, 1, 32) + 32 * ModularIndexing(j, 32, 4))
    return bool(match.call_count)


def never_splits_an_argmax() -> bool:
    """One program reads a row of 128256 elements for an arg max, where several do for a maximum. Its time shows on a
    GPU alone: the split is looked at that Inductor decides on for an H200."""
    h200 = DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=132,
        cc=90,
        major=9,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        warp_size=32,
    )

    def splits(kind: Any) -> int:
        one, row = [sympy.Integer(1)], [sympy.Integer(128256)]
        cuda, wide = torch.device("cuda"), torch.float32
        found = ir.Reduction.num_splits(cuda, wide, wide, lambda *_: None, one, row, kind, row[0])
        return int(found[1])

    with _graph(has_feature=lambda *_: False), mock.patch.object(DeviceProperties, "create", lambda *_: h200):
        assert splits("max") > 1
        return splits("argmax") == 1


def has_no_hook_for_kernels() -> bool:
    """CUDA's scheduling makes Triton's of this one class, whose class of kernels no choice or option names. That our
    kernels start early shows on a GPU alone."""
    triton = CUDACombinedScheduling(None)._triton_scheduling
    named = [name for place in (InductorChoices, config, config.triton) for name in dir(place)]
    hooks = {name for name in named if "kernel_type" in name or "kernel_class" in name or "kernel_cls" in name}
    return type(triton) is TritonScheduling and not hooks


def combines_without_asking() -> bool:
    """A part of a combined kernel is made without the choices that all other kernels are made with. That such a part
    cannot be written, or is slow, shows in generated code alone."""
    asked = []

    class Kernel:
        apply_feature_required_overrides = staticmethod(lambda *_: None)

        def __init__(self, *_: Any, **given: Any) -> None:
            asked.append(given)

    class Choices(InductorChoices):
        def triton_kernel_kwargs(self, *_: Any) -> dict[str, Any]:
            return {"fixed_config": None}

    with V.set_choices_handler(Choices()):
        ComboKernel.create_triton_kernel({}, SimpleNamespace(), False, Kernel)
    return "fixed_config" not in asked[0]


def calls_through_the_dispatcher() -> bool:
    """An op of Python's is called by its name in torch.ops."""
    with torch.library._scoped_library("te_inductor_faults", "DEF") as library:
        library.define("same(Tensor x) -> Tensor")
        library.impl("same", torch.clone, "CompositeExplicitAutograd")
        torch.library.register_fake("te_inductor_faults::same", torch.empty_like, lib=library)
        op = torch.ops.te_inductor_faults.same
        _, [code] = run_and_get_code(torch.compile(lambda x: op(x)), torch.ones(4))
    return "torch.ops.te_inductor_faults.same.default(" in code


def makes_constants_at_each_call() -> bool:
    """What stands for a constant in a call's arguments is the expression that makes it."""
    with _graph(opaque_value_type_classes={}):
        return "Quantizer(" in PythonWrapperCodegen.val_to_arg_str(None, Quantizer("e4m3"))


def asks_at_each_launch() -> bool:
    """A kernel of Inductor's makes no launcher that is called by itself."""
    return not hasattr(CachingAutotuner, "_build_fast_launcher")


def orders_loops() -> bool:
    """Loops that read along the first dimension are turned round. Which is faster shows on a GPU alone."""
    i, j = sympy.symbols("i j", integer=True, nonnegative=True)
    sizes = [sympy.Integer(64), sympy.Integer(32)]
    with _graph():
        return ir.ComputedBuffer._apply_loop_reordering([i, j], [], sizes, [i + 64 * j])[0] != sizes


def destroys_stacks() -> bool:
    """`torch._guards.tracing` cleans up the shape environment of the context that it leaves."""
    shapes = ShapeEnv()
    context = torch._guards.TracingContext(FakeTensorMode(shape_env=shapes))
    with mock.patch.object(shapes, "cleanup") as cleanup, torch._guards.tracing(context):
        pass
    return bool(cleanup.called)


def exports_without_asking() -> bool:
    """A compiled model is exported, and its backend does not hear of it."""
    asked = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        asked.append(gm)
        return gm.forward

    torch.export.export(torch.compile(nn.Linear(2, 2), backend=backend), (torch.randn(1, 2),))
    return not asked


def refuses_references() -> bool:
    """A tensor that anything refers to weakly cannot be swapped; of this package's own references torch sees none."""
    one = torch.zeros(1)
    reference = weakref.ref(one)
    try:
        torch.utils.swap_tensors(one, torch.ones(1))
    except RuntimeError:
        return reference() is one
    return False


def registers_a_backend_once() -> bool:
    """A backend that is registered again, as the slower of two threads does, is an error."""
    from torch._dynamo.backends import registry

    registry.list_backends()  # torch registers its own once a process: not where they would be taken back below
    with mock.patch.dict(registry._BACKENDS), mock.patch.dict(registry._COMPILER_FNS):
        registry.register_backend(take := lambda gm, inputs: gm, name="registered_twice")
        try:
            registry.register_backend(take, name="registered_twice")
        except AssertionError:
            return True
    return False


def _beside_a_wide_gradient() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    parameter.grad_dtype = torch.float32
    parameter.grad = torch.ones(2)
    return parameter


def traces_no_other_dtype() -> bool:
    """A parameter with a gradient of another dtype is in no graph; of another backend's, as ours has the patch."""
    parameter = _beside_a_wide_gradient()
    try:
        torch.compile(lambda: parameter + 1, backend="eager", fullgraph=True)()
    except torch._dynamo.exc.Unsupported:
        return True
    return False


def fakes_no_other_dtype() -> bool:
    """No fake tensor is made of such a parameter."""
    try:
        FakeTensorMode().from_tensor(_beside_a_wide_gradient())
    except RuntimeError:
        return True
    return False


def computes_again_outside_ddp() -> bool:
    """What a checkpoint with reentry calls again runs outside of the DistributedDataParallel that ran it."""
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(nn.parallel.DistributedDataParallel._get_active_ddp_module())
        return x.exp()

    torchs = getattr(CheckpointFunction.forward, "__wrapped__", CheckpointFunction.forward)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        with ddp._inside_ddp_forward(), mock.patch.object(CheckpointFunction, "forward", staticmethod(torchs)):
            y = checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=True)
        y.sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    return seen == [ddp, None]


def has_no_hook(module: ModuleType) -> bool:
    """torch calls nobody where gradients are thrown away."""
    return not any("zero_grad" in name for name in vars(module) if name.startswith("register_"))


def runs_a_stage_as_any_call() -> bool:
    """A pipeline's stage that is to find its shapes is run on tensors as any others are, not on `meta`."""
    from torch.distributed.pipelining import PipelineStage

    if not hasattr(PipelineStage, "_forward_metadata_inference"):
        return False
    seen = []
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        module = nn.Identity()
        module.register_forward_pre_hook(lambda _, args: seen.append((type(args[0]), args[0].device.type)))
        PipelineStage(module, 0, 1, torch.device("cpu"))._forward_metadata_inference((torch.ones(2),))
    finally:
        torch.distributed.destroy_process_group()
    return seen == [(torch.Tensor, "cpu")]


def imports_dynamo(decorator: str) -> bool:
    """Decorating a function imports Dynamo, in a process that has not imported it."""
    code = (
        "import sys, torch; before = 'torch._dynamo' in sys.modules;"
        f"{decorator}(lambda x: x); print(before, 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split() == ["False", "True"]


def _graph(**more: Any) -> Any:
    """Inductor's graph in hand, as far as these faults ask it."""
    return V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator(), **more))


FAULTS: dict[str, Callable[[], bool]] = {
    "torch._functorch.partitioners.choose_saved_values_set": saves_a_list,
    "torch._functorch.partitioners.solve_min_cut": saves_a_list,
    "torch._functorch.partitioners.get_default_op_list": lacks_attention,
    "torch.utils.flop_counter.flop_registry": counts_no_attention,
    "torch._inductor.config.loop_index_inversion_in_fusion": inverts_a_division,
    "torch._inductor.lowering._cat_inputs_recombine_reduction": takes_the_nodes_result,
    "torch._inductor.sizevars.join_dimensions": matches_different_indices,
    "torch._inductor.lowering.lowerings": never_splits_an_argmax,
    "torch._inductor.codegen.triton.TritonScheduling.kernel_type": has_no_hook_for_kernels,
    "torch._inductor.scheduler.ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels": combines_without_asking,
    "torch._inductor.ir.ExternKernel.set_python_kernel_name": calls_through_the_dispatcher,
    "torch._inductor.codegen.wrapper.get_opaque_obj_repr": makes_constants_at_each_call,
    "torch._inductor.codegen.wrapper.PythonWrapperCodegen.write_async_compile_wait": asks_at_each_launch,
    "torch._inductor.ir.ComputedBuffer._apply_loop_reordering": orders_loops,
    "torch._guards._TLS.tracing_context": destroys_stacks,
    "torch.export._trace._export": exports_without_asking,
    "torch._dynamo.backends.registry._COMPILER_FNS": registers_a_backend_once,
    "torch._dynamo.variables.builder.safe_grad": traces_no_other_dtype,
    "torch._subclasses.meta_utils.safe_grad": fakes_no_other_dtype,
    "torch.utils.swap_tensors": refuses_references,
    "torch.utils.checkpoint.CheckpointFunction.forward": computes_again_outside_ddp,
    "torch.optim.Optimizer.zero_grad": lambda: has_no_hook(sys.modules["torch.optim.optimizer"]),
    "torch.nn.Module.zero_grad": lambda: has_no_hook(nn.modules.module),
    "torch.distributed.pipelining.stage.PipelineStage._forward_metadata_inference": runs_a_stage_as_any_call,
    "torch.compile": lambda: imports_dynamo("torch.compile"),
    "torch.compiler.disable": lambda: imports_dynamo("torch.compiler.disable"),
}
