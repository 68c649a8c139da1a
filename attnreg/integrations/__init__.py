"""Adapters that run attnreg inside engines: they translate an engine's terms to attnreg's."""
