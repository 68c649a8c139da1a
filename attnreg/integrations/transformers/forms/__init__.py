"""The forms that transformers takes from release to release, and what stands in for its tensors."""
