"""Whether the generated docs of a checkout still say what its data says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def stale_docs(root: Path | None = None) -> str | None:
    """What regenerating the docs of a checkout would change, with the command that does it; "" if nothing.

    root: the checkout, by default the one that this package is in. None where there is none, as in a wheel.
    """
    root = root or Path(__file__).resolve().parents[2]
    tool = root / "tools" / "gen_docs.py"
    if not tool.is_file():
        return None
    spec = importlib.util.spec_from_file_location("attnreg_gen_docs", tool)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # the generator imports the modules beside it, as it does when it is run
    sys.path.insert(0, str(tool.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(tool.parent))
    difference: str = module.stale(root)
    return difference
