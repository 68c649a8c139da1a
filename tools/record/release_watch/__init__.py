"""Finds releases of engines that attnreg has no table of, records them one by one, and writes one report of all."""
