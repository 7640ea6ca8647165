"""Inductor IR of low-precision GEMMs."""
