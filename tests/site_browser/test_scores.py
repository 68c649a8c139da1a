"""What pages cost their readers: bytes and layout shift in a browser, and the record of `make bench-site`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import ROOT
from support.pages.browser import Browser
from support.pages.scores import LATER, LOOKS, PROFILES, Look, figures, score, served

# the most bytes of a page, with all that it loads until its answer
MOST = {"landing": 150_000, "model": 200_000, "backend": 260_000, "architecture": 260_000, "speed guide": 320_000,
        "picker": 400_000, "grid": 400_000}  # fmt: skip
FAST = {"first paint ms": 0.0, "largest paint ms": 0.0, "blocked ms": 0.0, "layout shift": 0.0}


@pytest.mark.parametrize("look", LOOKS, ids=[look.name for look in LOOKS])
def test_page_is_light_and_nothing_in_it_jumps(browser: Browser, site_folder: Path, look: Look) -> None:
    with served(site_folder) as address:
        for profile in (PROFILES[0], PROFILES[2]):
            found = figures(browser, address, look, profile)
            assert 20_000 < found["bytes"] < MOST[look.name], profile.name
            assert found["layout shift"] < 0.05, profile.name
    # later tests need no server that is gone
    browser.scripts(True)
    assert all(LATER not in url or look.name == "picker" for url in browser.requests())


def test_scores_are_on_the_curves_of_lighthouse() -> None:
    phone = PROFILES[1]
    assert score(FAST, phone) == 100
    at = {place: {name: values[place] for name, values in phone.curves.items()} for place in (0, 1)}
    assert score(at[0], phone) == 90
    assert score(at[1], phone) == 50
    # blocked time weighs a third, and the first paint a ninth
    assert score({**FAST, "blocked ms": 1e9}, phone) == 67
    assert score({**FAST, "first paint ms": 1e9}, phone) == 89


def test_the_record_has_every_page_on_every_profile() -> None:
    record = json.loads((ROOT / "benchmarks/results/site_pages.json").read_text(encoding="utf-8"))
    assert {(f["page"], f["profile"]) for f in record["figures"]} == {(x.name, p.name) for x in LOOKS for p in PROFILES}
    assert {"chromium", "axe-core", "processor", "date"} <= record["machine"].keys()
    assert {f["page"]: f["axe"] for f in record["figures"] if f["axe"]} == {}
    profiles = {profile.name: profile for profile in PROFILES}
    assert [f for f in record["figures"] if f["score"] != score(f, profiles[f["profile"]])] == []
    # the mark of the start page: a slow processor, and no limit of the network
    [start] = [f for f in record["figures"] if (f["page"], f["profile"]) == ("landing", "phone, no limit")]
    assert start["largest paint ms"] < 1000
    assert start["bytes"] < MOST["landing"]
