"""The command `new`: it writes the package of a vendor's backend, which `attnreg verify` accepts as it is."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from string import Template

import click

from attnreg.cli.command import command, option
from attnreg.cli.refusals import BadInput
from attnreg.contract import CONTRACT
from attnreg.errors import shown

_TEMPLATES = Path(__file__).with_name("template")
# the name of a backend: what people type and grep
_NAME = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*")
_LONGEST = 60


@command(short_help="Write a package with a backend of your own.")
@click.argument("kind", metavar="backend", type=click.Choice(["backend"]))
@click.argument("name", metavar="NAME")
@option("--output", "-o", metavar="DIR", help="The directory to make; by default the name: acme-attn for ACME_ATTN.")
def new(kind: str, name: str, output: str | None) -> None:
    """Write a Python package with the backend NAME: its row, a kernel module in plain PyTorch, and a test.

    The package works as it is. Replace the kernel by your own, and state in attnreg.yaml what it accepts. No file is
    overwritten.

    \b
    attnreg new backend ACME_ATTN
    pip install -e acme-attn
    attnreg verify ACME_ATTN --device cpu
    """
    package = _package(name)
    folder = Path(output if output is not None else package.replace("_", "-"))
    words = {"backend": name, "package": package, "project": package.replace("_", "-"), "contract": str(CONTRACT)}
    files = {
        folder / "pyproject.toml": "pyproject.toml.in",
        folder / package / "__init__.py": None,
        folder / package / "attnreg.yaml": "attnreg.yaml.in",
        folder / package / "kernels.py": "kernels.py.in",
        folder / "tests" / f"test_{package}.py": "test_backend.py.in",
    }
    taken = next((path for path in files if path.exists() or path.is_symlink()), None)
    if taken is not None:
        raise BadInput(f"{taken} is there already, and is not overwritten", "name another directory with --output")
    for path, template in files.items():
        text = f'"""The backend {name} for attnreg."""\n'
        if template is not None:
            text = Template((_TEMPLATES / template).read_text(encoding="utf-8")).substitute(words)
        path.parent.mkdir(parents=True, exist_ok=True)
        # "x": a file that appeared meanwhile is not overwritten either
        with path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
        click.echo(f"wrote {path}")
    click.echo(f"next: pip install -e {shlex.quote(str(folder))}, then attnreg verify {name} --device cpu")


def _package(name: str) -> str:
    """The Python package for a backend. Raises `BadInput` for a name that a backend or a package cannot have."""
    from attnreg.loader import default_registry

    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        raise BadInput(
            f"{shown(name)} is no name for a backend",
            "use capital letters, digits and single underscores: ACME_ATTN",
        )
    if name in default_registry().backends:
        raise BadInput(f"{name} is a backend of {default_registry().name} already", "name another")
    package = name.lower()
    if package in sys.stdlib_module_names or importlib.util.find_spec(package) is not None:
        raise BadInput(
            f"the package of {name} would be {package}, and Python has a module of this name", "name another"
        )
    return package
