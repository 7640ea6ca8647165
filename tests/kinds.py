"""What a program of ranks tells by kind: `python -m MODULE RANK WORLD FILE KINDS`, KINDS with commas in between. Each kind
has a process group of its own."""

import functools
import gc
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from te_inductor import compat
from tests import uncompiled


def of_the_first_rank(function: Callable[[], Any]) -> Any:
    """What it computes there, on all ranks."""
    box = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


def told_of(kinds: Mapping[str, Callable[..., Any]], make: Callable[[int, int], Any]) -> dict[str, Any]:
    """Of each kind that the command line names, what its function tells and what the package has said. `make` makes of a
    rank and their number what the functions take, whose `see` is shown each graph. Graphs are not compiled, except those
    of "compiled KIND"."""
    number, world, file, found = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], {}
    for each in sys.argv[4].split(","):
        print(each, file=sys.stderr)
        store = f"file://{file}-{each.replace(' ', '-')}"
        dist.init_process_group("gloo", init_method=store, rank=number, world_size=world)
        torch._dynamo.reset()
        rank = make(number, world)
        name, *arguments = each.removeprefix("compiled ").split()
        seen = functools.partial(uncompiled.compile_fx, see=rank.see)
        compile = compat.compile_fx if each.startswith("compiled") else seen
        with warnings.catch_warnings(record=True) as caught, mock.patch.object(compat, "compile_fx", compile):
            warnings.simplefilter("always")
            told = kinds[name](rank, *arguments)
        found[each] = {"told": told, "said": [str(one.message) for one in caught if "te_inductor" in str(one.message)]}
        dist.barrier()
        torch._dynamo.reset()
        gc.collect()
        dist.destroy_process_group()
    return found
