"""Inductor IR of casts to low precision and back."""
