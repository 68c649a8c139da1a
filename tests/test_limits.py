"""What the tree may become: no circle of imports, no file and no package that is too long to read in one go."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest
from support import ROOT

MOST_LINES = {"attnreg": 400, "tools": 400, "tests": 500}
MOST_MODULES = 12
# lines of Python by package of attnreg, "." for the modules at the top: a change that needs more raises a figure here
BUDGET = {
    ".": 1950,
    "analysis": 5280,
    "cli": 3510,
    "compile": 6100,
    "conformance": 2400,
    "engines": 6100,
    "explain": 2350,
    "integrations": 7300,
    "kernels": 17000,
    "language": 1950,
    "machine": 950,
    "models": 3720,
    "ops": 50,
    "packages": 700,
    "planning": 2350,
    "runtime": 5800,
    "selection": 2350,
    "tuning": 1150,
}
MOST_PARAMETERS = 12
# bytes of the tables of all engines: a release is written as its difference to a neighbour
TABLES = 660_000
# transformers calls it, by the names of its parameters
CALLED_BY_OTHERS = {"attnreg/integrations/transformers/engine.py: attend"}


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


def test_the_tables_of_engines_stay_small() -> None:
    files = [path for path in (ROOT / "registry/engines").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= TABLES


def test_no_function_takes_too_many_parameters() -> None:
    # those of kernels, and of what they call, are the compiler's
    found = {
        f"{file.relative_to(ROOT)}: {node.name}"
        for file in (ROOT / "attnreg").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and _parameters(node) > MOST_PARAMETERS
        and not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    assert found == CALLED_BY_OTHERS


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)


def test_a_class_name_of_kernels_and_the_runtime_stands_once() -> None:
    # a module that is loaded by its name has the names that its contract asks for
    names = Counter(
        node.name.lstrip("_")
        for package in ("kernels", "runtime")
        for file in (ROOT / "attnreg" / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name: n for name, n in names.items() if n > 1} == {}


def test_packages_keep_their_budget_of_lines() -> None:
    lines = dict.fromkeys(BUDGET, 0)
    for file in (ROOT / "attnreg").rglob("*.py"):
        inside = file.relative_to(ROOT / "attnreg").parts
        lines[inside[0] if len(inside) > 1 else "."] += len(file.read_text().splitlines())
    for package, count in sorted(lines.items()):
        sys.stdout.write(f"{package:<14} {count:>6} of {BUDGET[package]}\n")
    sys.stdout.write(f"{'together':<14} {sum(lines.values()):>6}\n")
    assert {package: count for package, count in lines.items() if count > BUDGET[package]} == {}
