"""Observes in transformers what attention each of its models asks for, for the tests of how configs are read."""
