"""Kernel modules, one for each registry row, imported by name once chosen; subpackages hold what several share."""
