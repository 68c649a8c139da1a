"""Claims -> cases -> trials -> evidence: each claim of a backend is run against a float64 reference."""
