"""Every part of torch that this package replaces: the table `PATCHES`, and `patch`, the only function that does it.

What torch offers for others is no patch and not here: options under `config.patch`, `register_lowering`, graph passes,
`V.set_choices_handler`. tests/backend/test_compat.py lists those, and holds that nothing else in the package replaces a
part of torch. It also shows, for each record, the fault of torch that the record names: where a release no longer has
it, that test fails, the record's `until` is due, and the patch goes with the last supported release that needs it."""

import pkgutil
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

OLDEST = "2.11"  # release of torch that is supported

COMPILE = "during a compile"
OPTION = "option of a compile, unless the user sets it"
BUFFER = "of one buffer of ours"
IMPORT = "during an import, in the process that builds CUTLASS kernels"
FOR_GOOD = "for good, once the backend is imported"
FOR_GOOD_LATER = "for good, once a graph under delayed scaling is called where it is imported"


@dataclass(frozen=True)
class Patch:
    """A part of torch that this package replaces, and why."""

    target: str  # its dotted name
    scope: str  # where the replacement holds
    why: str  # one sentence
    issues: tuple[str, ...] = ()  # upstream issues and pull requests; empty where none was found
    since: str = OLDEST  # the first release that needs it
    until: str | None = None  # the first release that does not

    def is_needed(self) -> bool:
        """Whether the torch that is imported has the fault."""
        version: Any = torch.__version__
        return bool(version >= self.since and (self.until is None or version < self.until))


PATCHES = (
    Patch(
        "torch._functorch.partitioners.choose_saved_values_set",
        COMPILE,
        "Under an activation memory budget, where nothing is left to weigh, the partitioner saves a list that is "
        "marked MUST_SAVE as a list and not as its tensors.",
        ("pytorch/pytorch#188014",),
        until="2.14",
    ),
    Patch(
        "torch._functorch.partitioners.solve_min_cut",
        COMPILE,
        "The partitioner does not return the minimum cuts that it found, one of which replaces that list.",
        ("pytorch/pytorch#188014",),
        until="2.14",
    ),
    Patch(
        "torch._functorch.partitioners.get_default_op_list",
        COMPILE,
        "The partitioner's list of expensive ops lacks cuDNN's attention and the CPU's, so that a budget has the "
        "backward compute them again as if they were free.",
    ),
    Patch(
        "torch.utils.flop_counter.flop_registry",
        COMPILE,
        "The table of FLOPs has no formula for the CPU's attention, and before 2.12 its others refuse grouped queries.",
        ("pytorch/pytorch#195460", "pytorch/pytorch#177188"),
    ),
    Patch(
        "torch._inductor.config.loop_index_inversion_in_fusion",
        OPTION,
        "Inductor takes a read at [i // 128], which is that of a block's scale, for a permutation, and writes beyond "
        "the buffer.",
        ("pytorch/pytorch#190401",),
        until="2.14",
    ),
    Patch(
        "torch._inductor.lowering._cat_inputs_recombine_reduction",
        COMPILE,
        "The lowering of cat takes the result of the graph's node for its own, and fails where another op, which has "
        "several results, calls it.",
        ("pytorch/pytorch#179091",),
        since="2.13",
    ),
    Patch(
        "torch._inductor.sizevars.join_dimensions",
        COMPILE,
        "Inductor looks for terms of an index that join by matching every term with every other, also those of different "
        "indices, which is a tenth of the time that it takes for graphs with casts both ways.",
    ),
    Patch(
        "torch._inductor.lowering.lowerings",
        COMPILE,
        "Inductor never splits the reduction of an arg max, so that one program reads a whole vocabulary.",
    ),
    Patch(
        "torch._inductor.codegen.triton.TritonScheduling.kernel_type",
        COMPILE,
        "Inductor has no hook for another class of Triton kernels on CUDA.",
    ),
    Patch(
        "torch._inductor.scheduler.ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels",
        COMPILE,
        "Where Inductor combines kernels it asks nobody for their tiles, without which those of ours cannot be written.",
    ),
    Patch(
        "torch._inductor.ir.ExternKernel.set_python_kernel_name",
        COMPILE,
        "Inductor calls every op that it does not lower through torch's dispatcher, which takes 10 us for one in Python.",
    ),
    Patch(
        "torch._inductor.codegen.wrapper.get_opaque_obj_repr",
        COMPILE,
        "Inductor writes a constant as the expression that makes it, which generated code evaluates at each call.",
    ),
    Patch(
        "torch._inductor.codegen.wrapper.PythonWrapperCodegen.write_async_compile_wait",
        COMPILE,
        "Inductor asks a kernel at each launch what its first one has answered, and the driver of each pointer whose it is.",
        ("pytorch/pytorch#180507",),
        until="2.13",
    ),
    Patch(
        "torch._inductor.ir.ComputedBuffer._apply_loop_reordering",
        BUFFER,
        "Inductor orders a buffer's loops by the strides of its reads, and has no way to keep those as written.",
    ),
    Patch(
        "torch._guards._TLS.tracing_context",
        COMPILE,
        "torch._guards.tracing, which sets the context of a compile, also destroys the stacks of the shape environment, "
        "with which Dynamo's own compile goes on.",
    ),
    Patch(
        "torch.export._trace._export",
        FOR_GOOD,
        "torch.export asks no backend and has no hook, so that it would drop a model's recipe without a warning.",
        ("pytorch/pytorch#164171",),
    ),
    Patch(
        "torch._dynamo.backends.registry._COMPILER_FNS",
        FOR_GOOD,
        "torch looks whether a backend is registered, imports it and registers it without a lock, and refuses a second "
        "registration, so that of threads that ask for a backend at once all but one fail.",
    ),
    Patch(
        "torch._dynamo.variables.builder.safe_grad",
        FOR_GOOD,
        "Dynamo breaks the graph, and tells nobody, at each parameter whose gradient stands in another dtype, as its "
        "grad_dtype may have it.",
    ),
    Patch(
        "torch._subclasses.meta_utils.safe_grad",
        FOR_GOOD,
        "A fake tensor is made of a parameter with its gradient, before it is told the grad_dtype that lets it have one of "
        "another dtype.",
    ),
    Patch(
        "torch.utils.swap_tensors",
        FOR_GOOD,
        "torch refuses to swap the contents of tensor objects that anything refers to weakly, though references stay "
        "right, so that such a model could not be moved or cast once it has run.",
    ),
    Patch(
        "torch.utils.checkpoint.CheckpointFunction.forward",
        FOR_GOOD,
        "A checkpoint with reentry calls its function again outside of the DistributedDataParallel in whose forward it "
        "was called, whose ranks then would not know that they share its parameters.",
    ),
    Patch(
        "torch.optim.Optimizer.zero_grad",
        FOR_GOOD,
        "An optimizer that throws gradients away tells nobody, so that weight gradients that wait would be added to those "
        "of the next batch.",
    ),
    Patch(
        "torch.nn.Module.zero_grad",
        FOR_GOOD,
        "A module that throws gradients away tells nobody, so that weight gradients that wait would be added to those of "
        "the next batch.",
    ),
    Patch(
        "torch.distributed.pipelining.stage.PipelineStage._forward_metadata_inference",
        FOR_GOOD_LATER,
        "A stage of a pipeline is run on memory that nothing was written to, to find the shapes that it sends, and nobody "
        "is told, so that delayed scaling would record amaxes of nothing.",
        since="2.13",
    ),
    Patch(
        "torch.compile",
        IMPORT,
        "quack decorates functions that no build calls, and the decorator imports Dynamo and much of Inductor, which takes "
        "longer than importing quack and CUTLASS.",
    ),
    Patch(
        "torch.compiler.disable",
        IMPORT,
        "quack decorates functions that no build calls, and the decorator imports Dynamo and much of Inductor, which takes "
        "longer than importing quack and CUTLASS.",
    ),
)
_RECORDS = {record.target: record for record in PATCHES}


def patch(target: str, new: Any, on: Any = None) -> AbstractContextManager[Any]:
    """Replace a part of torch where its record in `PATCHES` says.

    Under the scopes COMPILE and IMPORT the replacement holds inside of what is returned, under the others at once.
    `new` is what stands there instead; of a table it is a function from the table to the entries that it gets. `on` is
    the object of ours that is changed: the buffer (BUFFER), or the options of a compile (OPTION).

    Raises:
        KeyError: the table has no such record.
    """
    record = _RECORDS[target]
    place, _, name = target.rpartition(".")
    if record.scope == OPTION:
        on.setdefault(name, new)
        return nullcontext()
    if record.scope == BUFFER:
        setattr(on, name, new)
        return nullcontext()
    owner = pkgutil.resolve_name(place)
    if record.scope in (FOR_GOOD, FOR_GOOD_LATER):
        setattr(owner, name, new)
        return nullcontext()
    if isinstance(table := getattr(owner, name, None), MutableMapping):
        return _entries(target, table, new)
    # A release before `since` may not have it.
    return mock.patch.object(owner, name, new, create=record.since != OLDEST)


@dataclass
class _Entries:
    """The entries of one table that are replaced."""

    compiles: int  # of ours that run now: two threads may compile
    replaced: dict[Any, tuple[Any, Any]]  # torch's and ours, by key


_NONE = object()  # torch's entry where it had none
_lock = threading.Lock()
_tables: dict[str, _Entries] = {}


@contextmanager
def _entries(
    target: str, table: MutableMapping[Any, Any], new: Callable[[Mapping[Any, Any]], Mapping[Any, Any]]
) -> Iterator[None]:
    """Have a table hold our entries while one of our compiles runs. Other entries are left alone, also those that
    somebody registers meanwhile."""
    with _lock:
        held = _tables.get(target)
        if held is None:
            ours = new(table)
            held = _tables[target] = _Entries(0, {key: (table.get(key, _NONE), entry) for key, entry in ours.items()})
            table.update(ours)
        held.compiles += 1
    try:
        yield
    finally:
        with _lock:
            held.compiles -= 1
            if held.compiles == 0:
                del _tables[target]
                _put_back(table, held)


def _put_back(table: MutableMapping[Any, Any], held: _Entries) -> None:
    for key, (theirs, ours) in held.replaced.items():
        if table.get(key) is not ours:
            continue
        if theirs is _NONE:
            del table[key]
        else:
            table[key] = theirs
