"""Proves statements about the selections of all configurations, for check and diff; compares locked selections."""
