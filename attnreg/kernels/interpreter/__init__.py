"""Kernels in Triton's interpreter, on a CPU: what verification without a GPU runs."""
