"""Fixtures of several files of tests. Imports nothing large, as pytest-xdist's first process runs no test."""

import pytest


@pytest.fixture
def casts(monkeypatch):
    """How many weights have been cast anew."""
    from te_inductor.runtime.weights import cached_weights

    made, make = [], cached_weights._make
    monkeypatch.setattr(cached_weights, "_make", lambda *args: (made.append(args[0]), make(*args)))
    return made
