"""Bytes that one rank receives in a step, of all collectives, as torch's profiler sees them called."""

import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The bytes of an element, by the names that the profiler has for dtypes.
BYTES = {"float": 4, "int": 4, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "unsigned char": 1, "signed char": 1}
_FUNCTIONAL, _DIRECT = "_c10d_functional::", "c10d::"
_BF16 = 2


def received(step: Callable[[], Any], world: int) -> dict[str, int]:
    """Returns the bytes received, by kind. Sums are what a ring sends. Those outside of graphs, whose dtype the
    profiler does not tell, are taken for bf16 over all ranks, as DistributedDataParallel's are here; they are the
    greater part, if there are any."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found: Counter[str] = Counter()
    outside = 0  # elements
    for event in events:
        name, arguments = event.get("name", ""), event.get("args", {})
        if "Input Dims" not in arguments:
            continue
        if name.startswith(_FUNCTIONAL):
            kind, size, elements = _in_graph(name.removeprefix(_FUNCTIONAL), arguments, world)
            found[kind] += size
            outside -= elements
        elif name == _DIRECT + "_allgather_base_":
            out, given = (_size(arguments, place) for place in (0, 1))
            found["gathered"] += out - given
        elif name == _DIRECT + "_reduce_scatter_base_":
            out, given = (_size(arguments, place) for place in (0, 1))
            found["scattered"] += given - out
        elif name == _DIRECT + "allreduce_":
            outside += sum(map(math.prod, arguments["Input Dims"][0]))
    found["summed"] += int(2 * (world - 1) / world * max(outside, 0) * _BF16)
    return {kind: size for kind, size in sorted(found.items()) if size}


def _in_graph(name: str, arguments: dict[str, Any], world: int) -> tuple[str, int, int]:
    """Returns, of a functional collective, its kind, what one rank receives, and how many elements it sums."""
    if name.startswith("all_gather_into_tensor"):
        return "gathered", _size(arguments, 0) * (_ranks(arguments, 1) - 1), 0
    if name.startswith("reduce_scatter_tensor"):
        ranks = _ranks(arguments, 2)
        return "scattered", _size(arguments, 0) * (ranks - 1) // ranks, 0
    if name.startswith("all_reduce"):
        elements = math.prod(arguments["Input Dims"][0])
        return "summed", int(2 * (world - 1) / world * _size(arguments, 0)), elements
    if name.startswith("all_to_all_single"):
        return "exchanged", _size(arguments, 0) * (world - 1) // world, 0
    return "other", 0, 0


def _ranks(arguments: dict[str, Any], place: int) -> int:
    return int(arguments["Concrete Inputs"][place])


def _size(arguments: dict[str, Any], place: int) -> int:
    return int(math.prod(arguments["Input Dims"][place])) * BYTES.get(arguments["Input type"][place], 1)
