"""What an import brings along: nothing for the package, no framework for the core, no templates for the command."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys

import pytest
from support import ROOT

import attnreg

FRAMEWORKS = {"torch", "triton", "transformers", "vllm", "jax", "numpy"}
LIBRARIES = {"rich", "click", "pydantic", "yaml", "jinja2", "packaging"}
# what runs attention, or hands it to an engine
RUNNING = {"ops", "runtime", "kernels", "conformance", "tuning", "integrations"}
CORE = sorted(
    ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    for path in (file.relative_to(ROOT) for file in (ROOT / "attnreg").rglob("*.py"))
    if path.parts[1] not in RUNNING and path.stem != "__main__"
)


def loaded(code: str) -> set[str]:
    """The top-level modules of a fresh interpreter that ran some code."""
    command = [sys.executable, "-c", f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ATTNREG")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    return {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def test_the_package_alone_brings_nothing() -> None:
    assert loaded("import attnreg") & (FRAMEWORKS | LIBRARIES) == set()
    # nor the modules that its names come from
    code = "import attnreg; import sys; assert not [m for m in sys.modules if m.startswith('attnreg.')]"
    assert "attnreg" in loaded(code)


def test_describing_a_request_and_a_platform_brings_no_library() -> None:
    made = "AttentionRequest(head_size=8), Platform(platform='p', arch='a')"
    assert loaded(f"from attnreg import AttentionRequest, Platform; {made}") & (FRAMEWORKS | LIBRARIES) == set()


def test_no_module_of_the_core_brings_a_framework() -> None:
    assert {"attnreg.errors", "attnreg.cli.commands", "attnreg.selection.selector"} < set(CORE)
    assert loaded("\n".join(f"import {name}" for name in CORE)) & FRAMEWORKS == set()


def test_selecting_brings_no_framework_and_neither_does_looking_at_this_machine() -> None:
    code = """
from attnreg import AttentionRequest, Platform, detect_all, select
select(AttentionRequest(head_size=128), Platform(platform="cuda", arch="sm90"))
detect_all()
"""
    brought = loaded(code)
    assert brought & FRAMEWORKS == set()
    assert brought & {"rich", "click", "jinja2"} == set()


def test_selecting_compares_no_versions_where_all_packages_are_assumed() -> None:
    code = """
from attnreg import AttentionRequest, Platform, select
select(AttentionRequest(head_size=128), Platform(platform="cuda", arch="sm90"))
"""
    assert "packaging" not in loaded(code)


def test_a_command_imports_neither_the_other_commands_nor_the_completion_of_words() -> None:
    others = [f"attnreg.cli.{name}" for name in ("answers", "checks", "upgrades", "completion")]
    code = "import sys; from attnreg.cli import main; assert main(['list']) == 0"
    loaded(f"{code}; assert 'attnreg.cli.lookups.lists' in sys.modules and not set({others}).intersection(sys.modules)")


@pytest.mark.parametrize("command", ["explain --arch sm90", "list", "show FLASH_ATTN", "doctor"])
def test_a_command_brings_no_framework_and_no_templates(command: str) -> None:
    # the answer goes elsewhere: the last line is the list of modules
    code = f"from attnreg.cli import main; status = main({command.split()!r}); assert status == 0"
    assert loaded(code) & (FRAMEWORKS | {"jinja2"}) == set()


def test_type_checkers_see_the_names_that_are_public() -> None:
    tree = ast.parse((ROOT / "attnreg/__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {}
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom)
        # under its own name a second time: so checkers know that it is public
        assert all(alias.name == alias.asname for alias in statement.names)
        seen |= {alias.name: str(statement.module).removeprefix("attnreg.") for alias in statement.names}
    # one of them is a module itself
    assert seen == {**attnreg._HOME, "ops": "attnreg"}
    assert attnreg.__all__ == sorted(attnreg._HOME)


@pytest.mark.slow(reason="imports all that attnreg offers, and torch with it")
def test_every_public_name_is_where_the_package_says() -> None:
    for name, home in attnreg._HOME.items():
        value = getattr(attnreg, name)
        module = importlib.import_module(f"attnreg.{home}")
        assert value is (module if name == "ops" else getattr(module, name))
        if name == "__version__":
            continue
        assert getattr(value, "__module__", value.__name__).startswith("attnreg.")
        assert value.__doc__, name
    assert set(attnreg._HOME) <= set(dir(attnreg))
    assert dir(attnreg) == sorted(set(dir(attnreg)))
    with pytest.raises(AttributeError, match="module 'attnreg' has no attribute 'selct'"):
        attnreg.selct  # noqa: B018


def test_selection_reaches_no_file_no_clock_no_device_and_no_module_by_name() -> None:
    outside = {
        "ctypes",
        "datetime",
        "importlib",
        "io",
        "os",
        "pathlib",
        "platform",
        "random",
        "subprocess",
        "sys",
        "time",
    }
    found = {
        f"{file.name}: {name}"
        for file in (ROOT / "attnreg/selection").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if name.partition(".")[0] in outside
    }
    assert found == set()
