"""Logs that are made of both engines' own format strings: each line about attention is explained by its own release."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from attnreg.cli import main
from attnreg.compile.inputs.bundled import bundled_registries

DATA = yaml.safe_load((Path(__file__).resolve().parents[1] / "data/logs/engines.yaml").read_text(encoding="utf-8"))
# lines that are about the choice of a backend for layers, so that the layers of a known model explain them
CHOICES = ("order", "rocm", "named", "vit", "tower", "prompts", "default", "default_old", "model_on", "deterministic")
FACTS = ("version", "api", "logo", "args", "server", "resolved", "engine", "engine_0", "moe", "env")


def lines_of(log: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The format and the text of each line of a log; a line of several ranks comes once for each."""
    for name, values, *ranks in log["lines"]:
        text = DATA["formats"][name].format(**values)
        for rank in range(ranks[0] if ranks else 1):
            yield name, text.replace("TP0", f"TP{rank}")


@pytest.mark.parametrize("log", DATA["logs"], ids=lambda log: log["name"])
def test_each_line_is_explained_by_its_own_release(log, capsys, tmp_path):
    lines = list(lines_of(log))
    file = tmp_path / "server.log"
    file.write_text("".join(f"{text}\n" for _, text in lines), encoding="utf-8")
    assert main(["why", str(file), "--json"]) == log.get("exit", 0)
    [found] = json.loads(capsys.readouterr().out)["logs"]
    engine = found["runs"][0]["engine"]
    told = {entry["line"]: entry for entry in found["lines"]}
    known = set()
    for number, (name, text) in enumerate(lines, 1):
        if name in FACTS or text.replace("TP1", "TP0") != text or any(f"TP{n}" in text for n in range(2, 9)):
            continue
        entry = told[number]
        known.add(number)
        assert entry["understood"], entry
        own = log.get("own", True)
        assert entry["own_release"] is own
        if own:
            release = log["release"].partition("+")[0]
            assert entry["registry"] == f"{engine}-{release}", entry["by"]
            assert "which line 1 names" in entry["by"]
        if name in CHOICES and own:
            assert entry["explanation"] is not None, (text, entry["notes"])
            assert "differs" not in " ".join(entry["explanation"]["notes"])
    assert set(told) == known
    assert main(["why", str(file)]) == log.get("exit", 0)
    out = " ".join(capsys.readouterr().out.split())
    assert [text for text in log["says"] if text not in out] == [], out


def test_there_are_thirty_of_all_releases():
    assert len(DATA["logs"]) >= 30
    releases = {log["release"] for log in DATA["logs"]}
    assert {name.partition("-")[2] for name in bundled_registries() if name != "default"} <= releases
