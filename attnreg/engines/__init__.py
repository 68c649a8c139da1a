"""What people run engines with: the backend that an engine takes by default, its log lines, and launch recipes."""
