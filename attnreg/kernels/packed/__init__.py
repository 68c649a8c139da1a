"""Packed keys and values in kernels: TURBOQUANT writes them, and TRITON_ATTN's kernel reads them."""
