"""The pass that writes GELU and its gradient with erfc and a sigmoid, and the PTX of that erfc."""

import math
import re

import numpy as np
import pytest
import torch
from torch._inductor.decomposition import decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from te_inductor.passes.graph import activations
from te_inductor.templates.triton.ptx import ERFC

aten = torch.ops.aten


def targets(graph):
    return {node.target for node in graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize(("form", "gone"), [("none", aten.erf.default), ("tanh", aten.tanh.default)])
def test_gelu_and_its_gradient_stay_what_they_are(form, gone):
    """The comparison is in fp64, where what the pass changes are a few roundings."""

    def both(x, dy):
        return aten.gelu(x, approximate=form), aten.gelu_backward(dy, x, approximate=form)

    x = torch.cat([torch.linspace(-12, 12, 1001), torch.tensor([0.0, -0.0, 1e-30, math.inf, math.nan])]).double()
    graph = make_fx(both, decomposition_table=decompositions)(x, x.cos())
    assert gone in targets(graph.graph)
    expected = graph(x, x.cos())
    activations.fold_gelu(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert gone not in targets(graph.graph)
    for found, exact in zip(graph(x, x.cos()), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-14, equal_nan=True)


def test_tanh_and_erf_that_others_read_stay():
    def used(x):
        bounded, error = x.tanh(), x.erf()
        return bounded + 1, bounded * x, error * (error + 1)

    x = torch.randn(8)
    graph = make_fx(used)(x)
    expected = graph(x)
    activations.fold_gelu(graph.graph)
    graph.recompile()
    assert {aten.tanh.default, aten.erf.default} <= targets(graph.graph)
    torch.testing.assert_close(graph(x), expected)


PTX = {  # of fp32; approximations are as exact as fp32 allows
    "mov": lambda a: a,
    "abs": abs,
    "neg": lambda a: -a,
    "rcp": lambda a: 1 / a,
    "ex2": np.exp2,
    "mul": lambda a, b: a * b,
    "sub": lambda a, b: a - b,
    "fma": lambda a, b, c: (np.float64(a) * b + c).astype(np.float32),
    "setp": lambda a, b: a < b,
    "selp": lambda a, b, which: np.where(which, a, b),
}


def run_ptx(text: str, x: np.ndarray) -> np.ndarray:
    """Runs PTX of one input."""
    values = {"$1": x}

    def value(name):
        return np.frombuffer(bytes.fromhex(name[2:])[::-1], np.float32)[0] if name.startswith("0f") else values[name]

    for line in filter(None, (line.strip() for line in text.strip("{ }").split(";"))):
        if not line.startswith(".reg"):
            op, result, *operands = re.split(r"[ ,]+", line)
            with np.errstate(all="ignore"):
                values[result] = PTX[op.split(".")[0]](*map(value, operands))
    return values["$0"]


def test_erfc():
    """The result is within 1.2e-7 of erfc, relative, by its source; four roundings beside; and the exponent's, which
    grow with it."""
    x = np.concatenate([np.linspace(-6, 9, 20001), [0, -0.0, 1e-30, -1e-30]]).astype(np.float32)
    exact = np.array([math.erfc(float(one)) for one in x])
    z = np.maximum(x.astype(np.float64), 0)
    assert (abs(run_ptx(ERFC, x) - exact) <= exact * (1.2e-7 + (6 + 2 * (z * z + 2)) * 2.0**-24)).all()
    special = run_ptx(ERFC, np.array([np.inf, -np.inf, np.nan, 30.0], np.float32))
    assert special[0] == special[3] == 0 and special[1] == 2 and np.isnan(special[2])
