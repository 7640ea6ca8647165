"""Pairs of quantizers whose products are tested."""

PAIRS = [("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"), ("1x128", "1x128"), ("128x128", "1x128")]
