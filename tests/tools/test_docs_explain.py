"""What docs/explain.md shows of the command is what the command prints."""

from __future__ import annotations

import re

import pytest
from support import ROOT

from attnreg.cli import main

_SHOWN = re.compile(r"^```console\n\$ attnreg (explain [^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHOWN = _SHOWN.findall((ROOT / "docs/explain.md").read_text(encoding="utf-8"))


def test_the_page_shows_a_model_platforms_and_a_backend_by_name() -> None:
    assert [re.findall("--(?:model|attention|backend)", words) for words, _ in SHOWN] == [
        ["--model"],
        ["--attention"],
        ["--backend"],
    ]


@pytest.mark.parametrize(("arguments", "printed"), SHOWN, ids=[arguments for arguments, _ in SHOWN])
def test_the_command_prints_what_the_page_shows(
    arguments: str, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "104")
    main(arguments.split())
    found = [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()]
    assert found == printed.splitlines()
