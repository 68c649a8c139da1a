"""What docs/explain.md and docs/plan.md show of the command is what the command prints."""

from __future__ import annotations

import re

import pytest
from support import ROOT

from attnreg.cli import main

_SHOWN = re.compile(r"^```console\n\$ attnreg ((?:explain|plan) [^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHOWN = _SHOWN.findall((ROOT / "docs/explain.md").read_text(encoding="utf-8"))
PLANS = _SHOWN.findall((ROOT / "docs/plan.md").read_text(encoding="utf-8"))


def test_the_page_shows_a_model_platforms_and_a_backend_by_name() -> None:
    assert [re.findall("--(?:model|attention|backend)", words) for words, _ in SHOWN] == [
        ["--model"],
        ["--attention"],
        ["--backend"],
    ]


def test_the_page_of_plans_shows_a_start_a_conflict_and_stages() -> None:
    assert [re.findall("--(?:gpu-memory|backend|pp)", words) for words, _ in PLANS] == [
        ["--gpu-memory"],
        ["--backend"],
        ["--pp"],
    ]


@pytest.mark.parametrize(("arguments", "printed"), SHOWN + PLANS, ids=[arguments for arguments, _ in SHOWN + PLANS])
def test_the_command_prints_what_the_page_shows(
    arguments: str, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "104")
    main(arguments.split())
    found = [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()]
    assert found == printed.splitlines()
