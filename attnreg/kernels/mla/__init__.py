"""Triton kernels of MLA: attention over cached latents, and the writes of latents to the cache."""
