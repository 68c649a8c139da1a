"""Packed keys and values in kernels: what TRITON_ATTN's kernel reads, and TURBOQUANT writes."""
