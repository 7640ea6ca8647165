"""The eager form of an op, plain torch: on a CPU, and where no kernel is left."""

from te_inductor.kernels.family import KernelFamily
from te_inductor.kernels.problem import GROUPED, STORED, STORED_EXPERTS

FAMILY = KernelFamily("eager", (GROUPED, STORED, STORED_EXPERTS), lambda problem: None)
