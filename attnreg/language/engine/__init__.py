"""The rules of an engine beside its selector: blocks, layouts, graphs and memory of runs, and what it serves."""
