"""Attention over a KV cache whose tokens are sharded over the ranks of a process group."""
