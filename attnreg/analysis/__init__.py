"""Exact statements about the selections of all configurations, for check and diff; locked selections, for lock."""
