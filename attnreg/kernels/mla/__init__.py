"""Triton kernels of MLA: attention over cached latents, and what writes and reads these."""
