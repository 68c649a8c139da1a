"""A whole run: what its layers decide together. It starts, or the facts that exclude each other."""
