"""Shell scripts, read with tree-sitter: the commands that run an engine, as far as the text decides."""
