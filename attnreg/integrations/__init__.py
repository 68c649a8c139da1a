"""Adapters for engines: they run attnreg inside one, or answer in its own terms."""
