"""PyTorch's own fused kernels over packed sequences, one module for each, and the record of their operators."""
