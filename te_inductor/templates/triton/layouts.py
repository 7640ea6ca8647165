"""Indices along one dimension of a tensor in Gluon, whose layout says which bit of which dimension each bit of a
register's and a lane's number is. Kept apart, what a lane adds to an address is computed and what a register adds is a
constant."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def of_dimension(layout, dim):  # type: ignore[no-untyped-def]
    """The layout of a tensor that has only this dimension. (Triton hashes annotations too, and on Python 3.10 not
    `Any`.)"""
    for other in range(layout.rank - 1, -1, -1):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def index(dim: gl.constexpr, layout: gl.constexpr):
    """The index along one dimension of a linear layout, broadcast to the others."""
    RANK: gl.constexpr = layout.rank
    found = gl.arange(0, layout.shape[dim], layout=of_dimension(layout, dim))
    for other in gl.static_range(RANK):
        if other != dim:
            found = gl.expand_dims(found, other)
    return found
