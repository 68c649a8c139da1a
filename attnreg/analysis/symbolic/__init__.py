"""A registry's selection as decision diagrams: its conditions, its start and its choice of a backend."""
