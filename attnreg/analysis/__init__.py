"""The same selection, exactly, for all configurations: what check, diff and lock ask."""
