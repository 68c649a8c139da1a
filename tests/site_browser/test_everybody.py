"""Pages for everybody, in a browser: axe-core's rules, telephones, print, and keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pages.browser import Browser
from support.pages.scores import axe_file, axe_script, violations

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
    "sglang-0.5.23/architectures/sm90.html",
    "default/features/sinks.html",
    "vllm-0.33.0/kv_dtypes/fp8_e5m2.html",
    "changes/vllm-0.20.0-to-vllm-0.33.0.html",
    "files/registry/priorities.yaml.html",
    "guides/index.html",
    "guides/writing_data.html",
    "guides/speed.html",
    "guides/engines/vllm-0.33.0.html",
]


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe-core, as `make test-site` fetched it."""
    archive = axe_file()
    if archive is None:
        pytest.skip("axe-core is not in .cache (make test-site fetches it)")
    return axe_script(archive)


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 390)], ids=["light desk", "dark telephone"])
@pytest.mark.parametrize("page", PAGES)
def test_axe_finds_nothing(browser: Browser, site_folder: Path, axe: str, page: str, dark: bool, width: int) -> None:
    browser.dark(dark)
    browser.size(width)
    browser.open(site_folder / page)
    found = violations(browser, axe)
    problems = [f"{rule}: {node['html'][:120]} {node['failureSummary']}" for rule, node in found]
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
