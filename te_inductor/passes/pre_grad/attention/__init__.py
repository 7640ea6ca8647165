"""Attention: what its mask is proven to be, and which kernel then computes it."""
