"""Reads the text of files: values with their places, and the rules for quoting in messages."""
