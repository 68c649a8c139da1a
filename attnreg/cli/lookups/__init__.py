"""The commands that look up the data of a registry, or this machine: `list`, `show`, `models` and `doctor`."""
