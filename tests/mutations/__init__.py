"""Faults that are put into copies of the package, one at a time, by `python -m tests.mutations`."""

from tests.mutations import kernels, passes, running

MUTATIONS = [*passes.MUTATIONS, *kernels.MUTATIONS, *running.MUTATIONS]
