"""Reads logs: the lines that may be about attention, the templates of known lines, and the values in them."""
