"""Files that deploy an engine, read as launches: one module for each format."""
