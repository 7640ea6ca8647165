"""Triton templates. A file is a kernel: its sizes, what it supports, how one is chosen, and the launch; its measured
table lies beside it as JSON."""
