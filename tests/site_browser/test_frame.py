"""The frame of the site in a browser: the search, filters, the theme, old links, and pages without scripts."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pages.browser import Browser

# what a reader types, and a page that must be among the first five
QUERIES = {
    "gfx942 sinks": "default/architectures/gfx942.html",
    "sinks gfx942": "default/features/sinks.html",
    "H100 gpt-oss": "models/gpt-oss-120b.html",
    "fp8_e5m2": "default/kv_dtypes/fp8_e5m2.html",
    "FLASH_ATTN": "default/backends/FLASH_ATTN.html",
    "flash_at": "default/backends/FLASH_ATTN.html",
    "MI300X": "default/architectures/gfx942.html",
    "gpt oss": "models/gpt-oss-120b.html",
    "gpt_oss": "families/gpt_oss.html",
    "deepseek v3": "models/DeepSeek-V3.html",
    "oss-120b": "models/gpt-oss-120b.html",
}


# and what is first: the answer to what a reader asks, in attnreg's own words
FIRST = {
    "H100 gpt-oss": ("models/gpt-oss-120b.html", "models/gpt-oss-20b.html"),
    "gfx942 sinks": ("default/architectures/gfx942.html", "default/features/sinks.html"),
    "fp8_e5m2": ("default/kv_dtypes/fp8_e5m2.html",),
    "MI300X DeepSeek-V3": ("models/DeepSeek-V3.html",),
    "gpt_oss": ("families/gpt_oss.html",),
    "llama 3.3": ("models/Llama-3.3-70B-Instruct.html",),
    "deepseek v3.2": ("models/DeepSeek-V3.2-Exp.html",),
    "turboquant": ("default/backends/TURBOQUANT.html",),
    "sglang sm90": ("sglang-0.5.23/architectures/sm90.html",),
    "vllm-0.33.0 sm90": ("vllm-0.33.0/architectures/sm90.html",),
}


def test_search_finds(browser: Browser, site_folder: Path) -> None:
    browser.open(site_folder / "index.html")
    for query, page in QUERIES.items():
        assert page in browser.run("return attnregSearch(arguments[0])", query)[:5], query
    for query, pages in FIRST.items():
        assert browser.run("return attnregSearch(arguments[0])", query)[0] in pages, query
    assert browser.run("return attnregSearch('quuxification')") == []


@pytest.mark.parametrize(
    ("query", "target"),
    [
        ("FLASH_ATTN", "default/backends/FLASH_ATTN.html"),
        ("FLASH_ATTN evidence", "default/backends/FLASH_ATTN.html#evidence"),
        ("gfx942 sinks", "default/architectures/gfx942.html#features"),
        # the first section that says it: the page begins with the answer
        ("H100 gpt-oss-120b", "models/gpt-oss-120b.html"),
    ],
)
def test_search_leads_to_the_section(browser: Browser, site_folder: Path, query: str, target: str) -> None:
    browser.open(site_folder / "index.html")
    browser.page.fill("#search", query)
    browser.wait('return document.querySelectorAll("#found a").length')
    assert browser.run('return document.querySelector("#found a").href') == f"{site_folder.as_uri()}/{target}"


def test_search_is_reached_and_left_by_keys(browser: Browser, site_folder: Path) -> None:
    browser.open(site_folder / "default/orders.html")
    browser.run("""const field = document.getElementById("search"); field.focus(); field.value = "FLASH_ATTN";
        field.dispatchEvent(new Event("input"));""")
    browser.wait('return document.querySelectorAll("#found a").length')
    browser.run('document.getElementById("search").dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowDown"}))')
    assert browser.run('return document.querySelector("#found [aria-selected=true]").textContent').startswith(
        "FLASH_ATTN"
    )
    browser.run('document.getElementById("search").dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"}))')
    browser.wait('return location.pathname.endsWith("/backends/FLASH_ATTN.html")')


def test_table_is_filtered(browser: Browser, site_folder: Path) -> None:
    browser.open(site_folder / "default/index.html")
    shown = 'return [...document.querySelectorAll("tbody tr")].filter((r) => !r.hidden).length'
    before = browser.run(shown)
    browser.run("""const field = document.querySelector(".filtering input"); field.value = "triton mla";
        field.dispatchEvent(new Event("input"));""")
    assert 0 < browser.run(shown) < before
    assert "of" in browser.run('return document.querySelector(".filtering output").textContent')


@pytest.mark.parametrize("dark", [False, True])
def test_theme_follows_the_system_until_it_is_chosen(browser: Browser, site_folder: Path, dark: bool) -> None:
    browser.dark(dark)
    browser.open(site_folder / "index.html")
    colour = "return getComputedStyle(document.body).backgroundColor"
    light, night = "rgb(253, 253, 252)", "rgb(16, 18, 20)"
    browser.run("localStorage.clear()")
    browser.open(site_folder / "index.html")
    assert browser.run(colour) == (night if dark else light)
    browser.run('document.getElementById("theme").click()')
    assert browser.run(colour) == (light if dark else night)
    browser.run("localStorage.clear()")


def test_old_link_says_both_fingerprints(browser: Browser, site_folder: Path) -> None:
    page = site_folder / "default/index.html"
    notice = 'return document.querySelector(".notice")?.textContent'
    browser.open(page)
    now = browser.run('return document.querySelector("meta[name=attnreg-fingerprint]").content')
    browser.open(page, f"?registry={now}")
    assert browser.run(notice) is None
    browser.open(page, "?registry=0123abc")
    assert "0123abc" in browser.run(notice)
    assert now in browser.run(notice)


def test_pages_answer_without_scripts(browser: Browser, site_folder: Path) -> None:
    browser.scripts(False)
    browser.open(site_folder / "default/index.html")
    page = browser.page
    assert page.locator("table").first.is_visible()
    assert not page.locator("form.search").is_visible()
    assert page.locator(".filtering").count() == 0
    assert not page.locator("button.copy-link").first.is_visible()
    browser.scripts(True)


def test_nothing_is_loaded_from_elsewhere(browser: Browser, site_folder: Path) -> None:
    browser.requests()
    for page in ("index.html", "default/index.html", "measured.html", "models/gpt-oss-120b.html"):
        browser.open(site_folder / page)
        browser.run("return attnregSearch('sinks')")
    assert {url.partition(":")[0] for url in browser.requests()} == {"file"}
