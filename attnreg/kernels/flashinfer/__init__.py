"""Adapters for FlashInfer's kernels for prompts of MLA. Not run on Blackwell hardware yet."""
