"""Proves the claims of backends: makes cases of the claims, and runs each against a float64 reference."""
