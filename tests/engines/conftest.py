"""What the tests of recipes share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnreg.cli import main


@pytest.fixture
def check(tmp_path, capsys):
    def call(text, name="recipe.yaml", *more):
        file = tmp_path / name
        file.write_text(text)
        status = main(["check", str(file), "--json", *more])
        captured = capsys.readouterr()
        if status == 2:
            return status, captured.err.replace(f"{tmp_path}/", "")
        found = json.loads(captured.out)["findings"]
        return status, [(Path(f["where"]).name, f["message"]) for f in found]

    return call
