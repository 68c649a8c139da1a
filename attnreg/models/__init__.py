"""Reads a config.json: the facts of each layer, and the attention request that it makes."""
