"""The version stands in three files, and the changelog has the form of Keep a Changelog."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support import ROOT

from attnreg.version import __version__

LINES = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
RELEASES = [line for line in LINES if line.startswith("## ")]


def test_the_files_of_a_release_agree() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == __version__
    assert RELEASES[0] == "## Unreleased"
    assert RELEASES[1] == f"## {__version__} - {cited['date-released']}"


def test_each_release_has_a_version_and_a_date() -> None:
    assert all(re.fullmatch(r"## \d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", release) for release in RELEASES[1:])


def test_an_entry_is_short_and_stands_in_a_section() -> None:
    section, entries = "", list[tuple[str, str]]()
    for line in LINES:
        if line.startswith("#"):
            section = line if line.startswith("### ") else ""
        elif line.startswith("- "):
            entries.append((section, line))
        elif line.startswith("  ") and entries:
            entries[-1] = section, f"{entries[-1][1]} {line.strip()}"
    assert len(entries) > 20
    kinds = ("### Added", "### Changed", "### Deprecated", "### Removed", "### Fixed", "### Security", "### Breaking")
    assert [entry for section, entry in entries if not section.startswith(kinds)] == []
    assert [entry for _, entry in entries if len(entry.split()) > 30] == []


@pytest.mark.parametrize(
    ("urls", "refusal"),
    [
        ("", "names no repository in [project.urls]: step 3 of RELEASING.md"),
        ('[project.urls]\nDocumentation = "https://example.org"\n', "names no repository"),
        ('[project.urls]\nRepository = "example.org"\n', "names no repository"),
        ('[project.urls]\nRepository = "https://example.org/attnreg"\n', ""),
    ],
)
def test_nothing_is_published_without_an_address(tmp_path: Path, urls: str, refusal: str) -> None:
    """The step of the release workflow, run as the workflow runs it."""
    steps = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))["jobs"]["build"][
        "steps"
    ]
    names = [step.get("name") or step.get("run") or step["uses"] for step in steps]
    assert names.index("The project has an address") < names.index("make dist")
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "attnreg"\n{urls}')
    # the shell finds this Python first
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    script = steps[names.index("The project has an address")]["run"]
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script],
        cwd=tmp_path,
        env={"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (1 if refusal else 0), done.stderr
    assert refusal in done.stderr
