"""Compiles YAML files to one immutable Registry, or reports every problem in them with its location."""
