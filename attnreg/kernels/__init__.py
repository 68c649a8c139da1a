"""Kernel modules, one for each registry row and imported by name once chosen; subpackages hold what they share."""
