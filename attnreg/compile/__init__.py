"""YAML files -> one immutable Registry, every problem with its place."""
