"""What the tree may become: no circle of imports, no file and no package that is too long to read in one go."""

from __future__ import annotations

import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest
from support import ROOT

MOST_LINES = {"attnreg": 400, "tools": 400, "tests": 500}
MOST_MODULES = 12


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Module -> the modules of attnreg that it imports at the top, inside a function, or for types alone."""
    graph = grimp.build_graph("attnreg", cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def test_no_circle_of_imports(imports: dict[str, set[str]]) -> None:
    # import-linter sees circles among the modules of a package; this one those through a package's own names too
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as e:
        pytest.fail(f"imports run in a circle: {' <- '.join(e.args[1])}")


def test_imports_in_functions_and_for_types_count(imports: dict[str, set[str]]) -> None:
    assert "attnreg.loader" in imports["attnreg.machine.detect"]
    assert "attnreg.selection.trace" in imports["attnreg.selection.refusal"]


def test_every_floor_of_the_core_is_kept_from_frameworks() -> None:
    contracts = {
        c["id"]: c for c in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    }
    core = set(contracts["floors"]["layers"]) - {"integrations", "tuning", "conformance", "kernels", "ops", "runtime"}
    assert contracts["frameworks"]["source_modules"] == sorted(f"attnreg.{floor}" for floor in core)


@pytest.mark.parametrize("folder", MOST_LINES)
def test_no_file_is_too_long(folder: str) -> None:
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in (ROOT / folder).rglob("*.py")}
    assert {p: n for p, n in lengths.items() if n > MOST_LINES[folder]} == {}


def test_no_package_is_too_large() -> None:
    packages: dict[Path, int] = {}
    for file in (ROOT / "attnreg").rglob("*.py"):
        packages[file.parent] = packages.get(file.parent, 0) + (file.stem not in ("__init__", "__main__"))
    assert {str(p.relative_to(ROOT)): n for p, n in packages.items() if n > MOST_MODULES} == {}
