"""A lock holds the selections of a deployment against later data, and shows what changed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support import ROOT

from attnreg import RegistryError, load_registry
from attnreg.analysis.lock import drift, read_lock
from attnreg.cli import main

MODEL = str(ROOT / "examples/configs/gpt-oss-120b")


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    file = tmp_path / "attnreg.lock"
    assert main(["lock", "--platform", "rocm", "--arch", "gfx942", "--model", MODEL, "-o", str(file)]) == 0
    return file


def test_a_lock_says_what_every_group_gets(lock: Path) -> None:
    data = json.loads(lock.read_text())
    assert data["registry"] == "default"
    assert [(s["layers"], s["backend"]) for s in data["selections"]] == [
        ("18 layers (0, 2, … 34)", "TRITON_ATTN"),
        ("18 layers (1, 3, … 35)", "TRITON_ATTN"),
    ]


def test_the_same_data_holds_it(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--lock", str(lock)]) == 0
    assert "2 of 2 locked selections hold" in capsys.readouterr().out


def test_a_change_is_shown_with_its_reasons(lock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overlay = tmp_path / "o.yaml"
    overlay.write_text("choices:\n  - {deny: TRITON_ATTN, when: {features: [sliding_window]}, because: we measured}\n")
    assert main(["check", "--lock", str(lock), "--overlay", str(overlay)]) == 1
    out = capsys.readouterr().out
    first = "gpt-oss-120b · 64/8 heads of 64 · sliding window 128 · sinks · rocm gfx942: TRITON_ATTN → ROCM_ATTN"
    assert out.splitlines()[0] == first
    assert re.fullmatch(
        r"  ROCM_ATTN    3rd choice of 5 \(order rocm/mha, priorities\.yaml:\d+\)", out.splitlines()[1]
    ), out
    assert "  TRITON_ATTN  denied: we measured  [o.yaml:2]" in out
    assert "1 of 2 locked selections hold" in out
    assert main(["check", "--lock", str(lock), "--overlay", str(overlay), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["drift"][0]["after"]["backend"]["name"] == "ROCM_ATTN"


def test_a_word_that_the_data_lost_is_a_drift(lock: Path) -> None:
    data = read_lock(lock)
    data["selections"][0]["request"]["kv_dtype"] = "fp3"
    found = drift(data, load_registry("default"), lock)
    assert [d.problem.partition(",")[0] for d in found] == ["kv_dtype names 'fp3'"]
    assert found[0].lines()[0].endswith("TRITON_ATTN → no backend")


BAD = [
    ("no JSON", "{", "not JSON: Expecting property name"),
    ("another format", "{}", "no lock file of format 1"),
    ("no request", '{"format": 1, "registry": "default", "selections": [{}]}', "selection 1 cannot be read: "),
]


@pytest.mark.parametrize(("text", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_what_is_no_lock_is_said(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "x.lock"
    file.write_text(text)
    with pytest.raises(RegistryError) as e:
        drift(read_lock(file), load_registry("default"), file)
    assert e.value.problems[0].message.startswith(message)
    assert main(["check", "--lock", str(file)]) == 2
