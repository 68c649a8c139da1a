"""Sparse MLA: what a call is given beside others'."""
