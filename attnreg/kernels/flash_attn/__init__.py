"""Adapters over FlashAttention: one module for each of its versions, and the record of the functions that they call."""
