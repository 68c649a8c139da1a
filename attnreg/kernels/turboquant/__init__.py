"""The kernels of a packed KV cache beside the attention kernel: the store of new rows, and rotations."""
