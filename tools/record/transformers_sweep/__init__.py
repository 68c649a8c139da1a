"""Runs a small model of each architecture of transformers through attnreg and through its own attention."""
