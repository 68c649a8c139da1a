"""What the rows without kernels of their own share: keys gathered from a paged cache, attention in PyTorch."""
