"""A CPU: the same casts, and fp32 products of their exact values, for tests and not for speed."""

from te_inductor.targets.target import Target

TARGET = Target("cpu")
