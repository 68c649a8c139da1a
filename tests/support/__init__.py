"""What several test files share: small registries, ways to ask, small models, cases and stand-ins."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
