"""Stand-ins for other packages, with the signatures that they have."""
