"""What the tests of the command share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from attnreg import Registry, loader
from attnreg.cli import main


class Run(NamedTuple):
    """What a run of the command came to."""

    status: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Runs the command with some arguments."""
    # whoever runs the tests may have a narrow terminal
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*arguments: str) -> Run:
        status = main(arguments)
        printed = capsys.readouterr()
        return Run(status, printed.out, printed.err)

    return call


@pytest.fixture(autouse=True)
def default_loaded_once(default: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command finds the default registry loaded, unless something changes it: a load takes a tenth of a second."""
    load = loader.load_registry

    def load_registry(source: Any = None, overlays: Any = (), **options: Any) -> Registry:
        plain = source in (None, "default") and not overlays and not any(options.values())
        return default if plain and "ATTNREG_REGISTRY" not in os.environ else load(source, overlays, **options)

    monkeypatch.setattr(loader, "load_registry", load_registry)


@pytest.fixture(autouse=True)
def nothing_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`doctor` imports no kernel modules, and torch with them, in another process: tests/machine has that."""
    monkeypatch.setattr("attnreg.machine.doctor.remembered", lambda modules, machine: None)
    monkeypatch.setattr("attnreg.machine.doctor.probe_and_remember", lambda modules, machine: {})
