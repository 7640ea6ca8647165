"""What the package replaces of torch: each place has a record, torch has the fault that the record names, and the docs
say the same."""

import ast
import functools
import pkgutil
import re
from collections.abc import Iterator, MutableMapping
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

import te_inductor
from te_inductor.compat import PATCHES, Patch, patch, patches
from tests.faults import FAULTS
from tests.patches import Source

PACKAGE = Path(te_inductor.__file__).parent
BY_TARGET = [pytest.param(record, id=record.target) for record in PATCHES]


@functools.cache
def sources() -> dict[str, Source]:
    """The sources of the package's modules, by path."""
    return {str(path.relative_to(PACKAGE)): Source(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


# What changes something of torch's and is no patch: by the module of ours and the part of torch, why.
NO_PATCHES = {
    ("api/saved_programs.py", "torch.ops.te_inductor"): "the namespace of our own ops",
    ("compat/dynamo.py", "torch._dynamo.eval_frame.cached_backends"): "an entry of our own backend, which has ended",
    (
        "lowerings/codegen/direct_calls.py",
        "torch._inductor.select_algorithm.extern_kernels",
    ): "names of our own kernels, as `ExternKernelChoice` gives them",
    (
        "lowerings/codegen/known_launches.py",
        "torch._inductor.select_algorithm.extern_kernels.te_inductor_know_launches",
    ): "a name of our own, which generated code calls",
    ("lowerings/codegen/programmatic_launch.py", "torch._inductor.virtualized.V.graph"): "a mark on the graph in hand",
    **{
        (
            file,
            "torch._inductor.virtualized.V.graph.never_reuse_buffers",
        ): "the graph's own list of buffers that are kept"
        for file in ("lowerings/casts/quantize.py", "lowerings/gemm/weight_grads.py")
    },
}
# What Inductor, Dynamo and AOTAutograd offer for others' code, and this package uses: no patches either.
EXTENSION_POINTS = {
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch._dynamo.config.patch",
    "torch._functorch.config.patch",
    "torch._inductor.codegen.triton.TritonKernel",
    "torch._inductor.codegen.triton.TritonKernelOverrides",
    "torch._inductor.config.patch",
    "torch._inductor.custom_graph_pass.CustomGraphPass",
    "torch._inductor.custom_graph_pass.CustomPartitionerFn",
    "torch._inductor.ir.NonOwningLayout",
    "torch._inductor.ir.NopKernel",
    "torch._inductor.lowering.register_lowering",
    "torch._inductor.output_code.OutputCode",
    "torch._inductor.virtualized.V.graph.register_buffer",
    "torch._inductor.virtualized.V.graph.register_operation",
    "torch._inductor.virtualized.V.set_choices_handler",
    "torch._library.opaque_object.register_custom_class",
    "torch._library.opaque_object.register_opaque_type",
}
# Options that it sets for a while. Those that work around faults have records.
OPTIONS = {
    "automatic_dynamic_shapes": "calibrating traces one call, whose sizes say nothing of later ones",
    "bundled_autograd_cache": "the cache keeps a graph that is interpreted, of which Inductor's own has nothing",
    "enable_autograd_cache": "ranks that agree on what to interpret ask each other at each compile",
    "force_non_lazy_backward_lowering": "an estimate of a step has the backward scheduled, which is not called; a cache"
    " that keeps whole graphs has it beside the forward",
    "is_non_builtin_to_include": "the partitioner's own switch for ops that are not torch's",
    "max_autotune": "a library's GEMM is not measured where it is the only choice",
    "max_autotune_gemm": "likewise",
    "optimize_ddp": "what traces a model wants its graph whole",
    "recompile_limit": "2.11 and 2.12 have no `isolate_recompiles`",
    "skip_tensor_guards_with_matching_dict_tags": "2.11 asks no guard of a tensor in a dict that has not changed",
}


@pytest.fixture(autouse=True)
def a_place_for_contexts():
    """A thread has none before its first."""
    with torch._guards.tracing(None):
        yield


def test_nothing_else_patches_torch():
    found = {(path, part) for path, source in sources().items() for part in source.changes()}
    assert found == set(NO_PATCHES)


def test_places_that_torch_offers():
    found = set()
    for source in sources().values():
        named = [meant for meant, _ in source.calls()] + list(source.bases())
        found |= {meant for meant in source.bases() if meant.startswith("torch._inductor.")}
        found |= {meant for meant in named if re.match(r"torch\._.*\.(register_|set_|skip_|patch$)", meant)}
    assert found - {record.target for record in PATCHES} == EXTENSION_POINTS


def test_options_that_are_set():
    calls = [node for source in sources().values() for meant, node in source.calls() if meant.endswith("config.patch")]
    assert {keyword.arg for node in calls for keyword in node.keywords} == set(OPTIONS)


def test_every_record_is_of_one_patch():
    """Every patch names its part of torch where it is made, too."""
    made = []
    for source in sources().values():
        for meant, node in source.calls():
            if meant in ("te_inductor.compat.patch", "te_inductor.compat.patches.patch"):
                assert isinstance(node.args[0], ast.Constant)
                made.append(node.args[0].value)
    assert sorted(made) == sorted(record.target for record in PATCHES)


@pytest.mark.parametrize("record", BY_TARGET)
def test_a_record_says_it_all(record: Patch):
    assert record.scope in (
        patches.COMPILE,
        patches.OPTION,
        patches.BUFFER,
        patches.IMPORT,
        patches.FOR_GOOD,
        patches.FOR_GOOD_LATER,
    )
    assert re.fullmatch(r"[^\n]+\.", record.why) and len(re.findall(r"\.(?= [A-Z]|$)", record.why)) == 1
    assert all(re.fullmatch(r"[\w-]+/[\w-]+#\d+", issue) for issue in record.issues)
    owner, _, name = record.target.rpartition(".")
    assert torch.__version__ < record.since or hasattr(pkgutil.resolve_name(owner), name)
    assert record.until is None or TorchVersion(patches.OLDEST) < record.until, "no supported release needs it"


@pytest.mark.parametrize(
    "record",
    [
        # A fresh process has to import Dynamo: ten seconds and more on a machine that others use.
        pytest.param(record, id=record.target, marks=[pytest.mark.thorough] * (record.scope == patches.IMPORT))
        for record in PATCHES
    ],
)
def test_torch_needs_it(record: Patch):
    """The release of a new torch for which this fails is the record's `until`."""
    assert FAULTS[record.target]() == record.is_needed(), f"torch {torch.__version__}: {record.why}"


def test_no_fault_without_a_record():
    assert set(FAULTS) == {record.target for record in PATCHES}


def test_no_patch_without_a_record():
    with pytest.raises(KeyError):
        patch("torch.add", None)


@pytest.mark.parametrize("record", [p for p in BY_TARGET if p.values[0].scope in (patches.COMPILE, patches.IMPORT)])
def test_it_holds_inside_alone(record: Patch):
    owner, _, name = record.target.rpartition(".")
    place = pkgutil.resolve_name(owner)
    before, ours = getattr(place, name, None), object()
    if isinstance(before, MutableMapping):
        entries = dict(before)
        with patch(record.target, lambda table: {"new": ours, next(iter(table)): ours}):
            assert before["new"] is before[next(iter(before))] is ours
        assert before == entries
    else:
        with patch(record.target, ours):
            assert getattr(place, name) is ours
    assert getattr(place, name, None) is before


def test_an_option_of_the_users_stays():
    name = "loop_index_inversion_in_fusion"
    for given, found in (({}, False), ({name: True}, True)):
        patch(f"torch._inductor.config.{name}", False, on=given)
        assert given == {name: found}
    assert torch._inductor.config.loop_index_inversion_in_fusion


def test_one_buffer_is_changed():
    from torch._inductor.ir import ComputedBuffer

    inductors, ours = ComputedBuffer._apply_loop_reordering, object()
    one, other = (ComputedBuffer.__new__(ComputedBuffer) for _ in range(2))
    patch("torch._inductor.ir.ComputedBuffer._apply_loop_reordering", ours, on=one)
    assert one._apply_loop_reordering is ours
    assert other._apply_loop_reordering is inductors is ComputedBuffer._apply_loop_reordering


def rows() -> Iterator[str]:
    """The rows of the table in docs/compatibility.md."""
    for record in PATCHES:
        since = f"{record.since} and later" if record.since != patches.OLDEST else ""
        releases = " and ".join(filter(None, [since, f"before {record.until}" if record.until else ""])) or "all"
        issues = ", ".join(record.issues) or "none found"
        yield f"| `{record.target}` | {record.scope} | {record.why} | {issues} | {releases} |"


def test_the_docs_have_the_same_table():
    page = (PACKAGE.parent / "docs" / "compatibility.md").read_text()
    table = re.search(r"^\| what is replaced .*\n\|[-|]+\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert table is not None and table[1].splitlines() == list(rows())


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.compile = f",
        "import torch\ntorch.compile, x = f, 1",
        "import torch\ntorch._inductor.config.x += 1",
        "import torch\ndel torch.compile",
        "import torch\nfor torch.x in y: pass",
        "import torch._inductor.lowering\ntorch._inductor.lowering.lowerings[op] = f",
        "from torch._inductor import config as c\ndef f():\n    c.x = 1",
        "from torch._inductor.lowering import lowerings\nlowerings[op] = f",
        "from torch._inductor.lowering import lowerings\ntable = lowerings\ntable.update({})",
        "import torch\nvars(torch)['compile'] = f",
        "import torch\ntorch.__dict__['compile'] = f",
        "import sys\nsys.modules['torch._inductor.config'].x = 1",
        "import sys\nc = sys.modules.get('torch._inductor.config')\nc.x = 1",
        "import importlib\nimportlib.import_module('torch.export').export = f",
        "import torch\nsetattr(torch, name, f)",
        "import torch\nobject.__setattr__(torch, name, f)",
        "import torch\ndelattr(torch, name)",
        "from unittest import mock\nimport torch\nmock.patch.object(torch, 'compile', f)",
        "from unittest import mock\nmock.patch('torch.compile', f)",
        "from unittest.mock import patch\nfrom torch.utils.flop_counter import flop_registry\npatch.dict(flop_registry, {})",
        "import unittest.mock as m\nimport torch\nm.patch.multiple(torch, x=1)",
        "from torch._inductor.virtualized import V\nV.graph.never_reuse_buffers.add(name)",
    ],
)
def test_a_patch_is_found(text):
    assert list(Source(text).changes())


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nx = torch.empty(3)\nx[0] = 1\nx.y = 2",
        "import torch\nself.add = torch.add\ntorch.add(x, y)\ntorch.ops.aten.add.Tensor(x, y)",
        "import torch\nnode.meta['x'] = torch.compile",
        "from unittest.mock import patch\nimport quack\npatch.object(quack, 'x', 1)",
        "import torch\nfrom torch._inductor import config\nwith config.patch(x=1): pass",
        "from te_inductor import compat\ncompat.patch('torch.compile', f)",
    ],
)
def test_what_is_no_patch(text):
    assert not list(Source(text).changes())
