"""Kernels in Triton's interpreter, on a processor: what verification without a GPU runs."""
