"""tools/codebooks.py as a module: what made the codebooks of TurboQuant."""

from __future__ import annotations

import importlib.util

from support import ROOT

_spec = importlib.util.spec_from_file_location("codebooks_under_test", ROOT / "tools/codebooks.py")
assert _spec is not None
assert _spec.loader is not None
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)
