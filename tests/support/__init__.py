"""Helpers that several test files share: small registries, requests, small models, cases and stand-ins."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
