"""YAML files -> one immutable Registry, or every problem in them with its location."""
