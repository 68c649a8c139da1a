"""The shapes of the YAML files, as pydantic models, a module for each kind of file."""
