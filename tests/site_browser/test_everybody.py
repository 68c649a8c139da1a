"""Pages for everybody, in a browser: axe-core's rules, telephones, print, and keys."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

import pytest
from support import ROOT
from support.pages.browser import Browser

_AXE = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
# one page of each kind
PAGES = [
    "index.html",
    "pick.html",
    "compare.html",
    "grid.html",
    "registries.html",
    "measured.html",
    "models/index.html",
    "models/gpt-oss-120b.html",
    "families/gpt_oss.html",
    "default/index.html",
    "default/orders.html",
    "default/backends/FLASH_ATTN.html",
    "default/backends/TRITON_ATTN.html",
    "sglang-0.5.23/backends/fa3.html",
    "default/architectures/gfx942.html",
    "default/features/sinks.html",
    "vllm-0.33.0/kv_dtypes/fp8_e5m2.html",
    "changes/vllm-0.20.0-to-vllm-0.33.0.html",
    "files/registry/priorities.yaml.html",
    "guides/index.html",
    "guides/writing_data.html",
    "guides/engines/vllm-0.33.0.html",
]


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe-core, as `make test-site` fetched it."""
    files = sorted((ROOT / ".cache").glob("axe-core-*.tgz"))
    if not files:
        pytest.skip("axe-core is not in .cache (make test-site fetches it)")
    with tarfile.open(files[-1]) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member
        script = member.read()
    assert hashlib.sha256(script).hexdigest() == _AXE
    return script.decode("utf-8")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_axe_finds_nothing(browser: Browser, site_folder: Path, axe: str, page: str, dark: bool) -> None:
    browser.dark(dark)
    browser.open(site_folder / page)
    browser.page.evaluate(axe)
    found = browser.run("return axe.run(document, {resultTypes: ['violations']}).then((r) => r.violations)")
    nodes = [(rule["id"], node) for rule in found for node in rule["nodes"][:3]]
    problems = [f"{rule}: {node['html'][:120]} {node['failureSummary']}" for rule, node in nodes]
    assert problems == []


@pytest.mark.parametrize("page", PAGES)
def test_page_fits_a_telephone(browser: Browser, site_folder: Path, page: str) -> None:
    """Tables and pictures scroll in their own boxes; the page itself does not scroll sideways."""
    browser.size(390, 844)
    browser.open(site_folder / page)
    assert browser.run("return document.documentElement.scrollWidth") <= 390


def test_table_scrolls_beside_its_first_column(browser: Browser, site_folder: Path) -> None:
    browser.size(390, 844)
    browser.open(site_folder / "models/DeepSeek-V3.html")
    left = "return document.querySelector('.scroll[aria-label^=attnreg] tbody th').getBoundingClientRect().left"
    before = browser.run(left)
    browser.run("for (const box of document.querySelectorAll('.scroll')) box.scrollLeft = 200")
    assert abs(browser.run(left) - before) < 2


def test_print_shows_everything_and_no_controls(browser: Browser, site_folder: Path) -> None:
    browser.open(site_folder / "default/index.html")
    browser.printed(True)
    page = browser.page
    assert not page.locator("header.top").is_visible()
    assert not page.locator(".filtering").first.is_visible()
    assert page.locator("table tbody tr").last.is_visible()
    assert browser.run("return getComputedStyle(document.querySelector('.scroll')).overflowX") == "visible"
    browser.printed(False)


def test_keys_reach_the_content_and_what_scrolls(browser: Browser, site_folder: Path) -> None:
    browser.open(site_folder / "default/orders.html")
    browser.page.keyboard.press("Tab")
    assert browser.run("return document.activeElement.textContent") == "Skip to the content"
    browser.page.keyboard.press("Enter")
    # what an address names is unfolded
    browser.open(site_folder / "default/backends/FLASH_ATTN.html", "#claims")
    browser.run("document.querySelector('details[open] .scroll').focus()")
    assert browser.run("return document.activeElement.className") == "scroll"
