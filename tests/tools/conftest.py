"""Fixtures of the tests of the tools: the generator of the docs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from support import ROOT
from support.pages.site import asked, build_site, shown
from support.suite.once import once


@pytest.fixture(scope="session")
def gen_docs() -> ModuleType:
    """tools/gen_docs.py as a module, with those beside it."""
    spec = importlib.util.spec_from_file_location("gen_docs_under_test", ROOT / "tools/gen_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def built_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, one for all processes of a run."""
    return once(tmp_path_factory, "site", lambda folder: build_site(folder, shown(), asked()))
