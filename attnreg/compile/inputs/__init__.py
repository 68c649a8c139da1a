"""Reads the files of a registry: of a bundled registry, of overlays and of installed plugins."""
