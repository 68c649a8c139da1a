"""`attnreg check`: faults of a registry, each a `Finding`."""
