"""Attention in PyTorch over keys gathered from a paged cache, shared by the rows without kernels of their own."""
