"""Kernels of a step of generation that start before the one in front of them has ended.

# Note [Kernels that start early]
A step of generation is many short kernels, and between two of them a card does nothing for microseconds: it drains,
launches and fills again. On compute capability 9.0 a kernel may be launched "dependent": it starts when every program
of the kernel in front has said `griddepcontrol.launch_dependents` or ended, and its `griddepcontrol.wait` returns when
that kernel has completed and its writes are visible. Streams and CUDA graphs know such launches.

One rule makes that safe, whatever the kernels do: **a kernel that is launched so waits, in every program, before it
reads or writes memory.** Then nothing is touched before the kernel in front has completed; that one, if it was launched
so, completed after its own wait, hence after the one in front of it, and so on back to an ordinary launch. So kernels
need not know each other's buffers, nor who reuses whose memory. Ordinary kernels, copies and events wait for all that
is in front, as ever; a library's dependent kernels (cuBLAS's) wait because they read. Only index arithmetic stands
before the wait; tests/offline/test_nvfp4.py looks, in the PTX of the decode kernel and in generated code.

When to say launch_dependents decides the speed, not the result. Programs of the next kernel that come while some
multiprocessors are full and others are not stay where they were put, and a kernel of one wave is as slow as its fullest
multiprocessor: decode kernels that said it first of all took 37.6 us for 31.2 (28672 x 4096, 16 rows) and 18.2 for 15.3
(4096 x 14336), one behind the other (H200, 2026-11-22). So it is said behind the wait, by the decode kernel behind its
products.

Inductor has an option for such launches (`triton.enable_pdl`), whose kernels wait where they first touch what the
kernel in front made, known by the buffer's name: one that shares its memory has another name (torch 2.15). It is not
used."""

from contextlib import AbstractContextManager
from typing import Any

from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.virtualized import V

from te_inductor import compat
from te_inductor.lowerings.codegen.ordered_sums import OrderedSumsKernel

_EARLY = "te_kernels_start_early"  # attribute of a graph
# Kernels whose programs wait for each other, and such as are written by other code than ours below.
_APART = ("cooperative_reduction", "mix_order_reduction")


def start_early() -> None:
    """Has the kernels of the graph being lowered start early."""
    setattr(V.graph, _EARLY, True)


def is_early() -> bool:
    """Whether the graph in hand is such a one."""
    return hasattr(V.graph, _EARLY)


class DependentLaunchKernel(OrderedSumsKernel):
    """Inductor's Triton kernel, which in such a graph starts early: Note [Kernels that start early]."""

    @staticmethod
    def _enable_pdl_codegen() -> bool:
        if not is_early():
            return bool(TritonKernel._enable_pdl_codegen())
        return not any(getattr(V.kernel, kind, False) for kind in _APART)

    def _handle_pdl_before_access(self, *args: Any, **kwargs: Any) -> None:
        if not is_early():
            super()._handle_pdl_before_access(*args, **kwargs)

    def _handle_pdl_after_load(self, *args: Any) -> None:
        if not is_early():
            super()._handle_pdl_after_load(*args)

    def _filter_pdl(self, code: Any) -> None:
        """Filters the whole body, when it is written."""
        if not is_early():
            super()._filter_pdl(code)
        elif self._enable_pdl_codegen():
            code._lines[:0] = [self.GDC_WAIT, self.GDC_LAUNCH]

    def codegen_kernel(self, *args: Any, **kwargs: Any) -> Any:
        source = super().codegen_kernel(*args, **kwargs)
        # With a torch that does not ask `_filter_pdl` any more, kernels would start early and not wait.
        assert not (is_early() and self._enable_pdl_codegen()) or self.GDC_WAIT in str(source)
        return source


def launched_early() -> AbstractContextManager[None]:
    """Have Triton's kernels be `DependentLaunchKernel`s where their code is generated while this context holds."""
    return compat.patch("torch._inductor.codegen.triton.TritonScheduling.kernel_type", DependentLaunchKernel)
