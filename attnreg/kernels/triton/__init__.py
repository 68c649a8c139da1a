"""The Triton kernels that several registry rows share, and the launchers that take plain tensors."""
