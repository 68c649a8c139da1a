"""The files that a registry is compiled from: those of a bundled registry, of overlays and of installed plugins."""
