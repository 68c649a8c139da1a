"""Reads the logs of engines, and explains their lines about attention from a registry's data."""
