"""This machine: its devices and packages, and the backends that are usable on it."""
