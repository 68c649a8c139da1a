"""The vocabulary of a registry, and the evaluation of conditions over it."""
