"""Arithmetic of scales, elements and blocks, written once for torch's tensors and for values of Inductor IR."""
