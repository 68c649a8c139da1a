"""Sparse MLA: the indices of a call, which dense calls do not have."""
