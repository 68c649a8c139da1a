"""Adapters to AMD's aiter kernels that several registry rows share, and the record of the functions they call."""
