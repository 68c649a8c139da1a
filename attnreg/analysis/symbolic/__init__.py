"""A registry's selection as decision diagrams: its conditions, its start and the backend that it chooses."""
