"""This machine: its devices and packages, and which backends are usable here."""
