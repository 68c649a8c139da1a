"""The differences between releases of transformers, and tensors that stand in for transformers' own."""
