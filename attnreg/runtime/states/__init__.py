"""Partial attention states (outputs over disjoint parts of the keys, each with its LSE) and their merge."""
