"""The use of engines: their default backends, their log lines, and launch recipes."""
