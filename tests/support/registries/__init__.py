"""Registries, overlays and requests that are small enough to try all of."""
