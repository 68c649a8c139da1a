"""Layers and batches that run: small ones, odd ones, and the conditions of an engine."""
