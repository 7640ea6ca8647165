"""Benchmarks: `train_step` (a training step against its peers), `quantize`, `gemm`, and `floor` (what to expect)."""
