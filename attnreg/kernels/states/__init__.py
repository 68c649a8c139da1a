"""Partial attention states merged into one: by a Triton kernel on GPUs, by PyTorch elsewhere."""
