"""What Python in WebAssembly answers in a browser: questions at random, dropped files, comparisons."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from support.pages import picking
from support.pages.browser import MODEL, PYTHON, Browser, opened

from attnreg import RegistryError, load_registry
from attnreg.cli.commands import main
from attnreg.compile.inputs.bundled import bundled_configs, bundled_registries

OVERLAY = """choices:
  - deny: [FLASH_ATTN]
    when: {arch: sm90}
    because: a test
"""
FAULTY = """choices:
  - deny: [NOPE]
    wen: {}
"""
needs_python = pytest.mark.skipif(not PYTHON.is_file(), reason=f"no {PYTHON}: make .cache/python-in-browsers/ready")


def drop(browser: Browser, name: str, text: str) -> None:
    before = browser.run("return document.body.dataset.taken ?? '0'")
    browser.run("attnreg.picker.takeAll([new File([arguments[1]], arguments[0])])", name, text)
    browser.wait("return (document.body.dataset.taken ?? '0') !== arguments[0]", before, seconds=240)


def ask(browser: Browser, anchor: str) -> None:
    """Ask what an address says, and wait for the answer."""
    before = browser.run("return document.body.dataset.answered")
    browser.run("location.hash = arguments[0]", anchor)
    browser.wait("return document.body.dataset.answered !== arguments[0]", before, seconds=240)


@needs_python
def test_answers_are_the_commands(browser: Browser, site_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    registries = [load_registry(name) for name in bundled_registries()]
    opened(browser, site_folder, MODEL)
    refused = 0
    for anchor in picking.hashes(registries, 150, seed=2026):
        ask(browser, anchor)
        command = browser.run("return document.getElementById('command-line').textContent")
        words = shlex.split(command)[2:]
        view = browser.run("return attnreg.lastAnswer")
        if view is None:
            refused += 1
            assert main(["explain", *words]) == 2
            told = capsys.readouterr().err.removeprefix("attnreg: ").rstrip("\n")
            assert browser.run("return document.querySelector('#answer .error').textContent") == told, anchor
        else:
            picking.check_view(view, picking.printed(words, capsys))
    assert refused < 50


@needs_python
def test_a_config_is_dropped(browser: Browser, site_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened(browser, site_folder, MODEL)
    config = bundled_configs()["gemma-3-27b-it"]
    drop(browser, "mine.json", config.read_text(encoding="utf-8"))
    view = browser.run("return attnreg.lastAnswer")
    printed = picking.printed(["--platform", "cuda", "--arch", "sm90", "--model", str(config)], capsys)
    assert view["title"] == printed["title"].replace("gemma-3-27b-it", "mine")
    picking.check_view(view, printed | {"title": view["title"]})
    assert "--model mine.json" in browser.run("return document.getElementById('command-line').textContent")


@needs_python
@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("empty.json", "{}", "config"),
        ("list.json", "[1, 2]", "expected"),
        ("broken.json", '{"model_type": ', "JSON"),
        ("image.json", '{"model_type": "stable_diffusion", "channels": 3}', "stable_diffusion"),
    ],
)
def test_a_config_that_is_no_model(
    browser: Browser,
    site_folder: Path,
    name: str,
    text: str,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    opened(browser, site_folder, MODEL)
    drop(browser, name, text)
    said = browser.run("return document.querySelector('#answer .error').textContent")
    path = tmp_path / name.removesuffix(".json") / "config.json"
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    assert main(["explain", "--arch", "sm90", "--model", str(path.parent)]) == 2
    assert f"attnreg: {said}\n" == capsys.readouterr().err.replace(str(tmp_path), "/configs")
    assert told in said


@needs_python
@pytest.mark.parametrize(("start", "end"), [('{"a":', "}"), ("[", "]")])
def test_a_file_that_is_nested_too_deeply(browser: Browser, site_folder: Path, start: str, end: str) -> None:
    opened(browser, site_folder, MODEL)
    for name in ("deep.json", "deep.yaml"):
        drop(browser, name, f"{start * 3000}1{end * 3000}")
        told = browser.run("return document.querySelector('#answer .error').textContent")
        assert told == f"{name} is nested too deeply to be read"


@needs_python
def test_a_dropped_config_drafts(browser: Browser, site_folder: Path) -> None:
    opened(browser, site_folder, "#registry=default&arch=sm90&model=Qwen3-8B")
    drop(browser, "mine.json", bundled_configs()["Qwen3-8B-DFlash-b16"].read_text(encoding="utf-8"))
    ask(browser, "#registry=default&arch=sm90&model=Qwen3-8B&draft=mine")
    assert "draft mine" in browser.run("return attnreg.lastAnswer.title")
    assert browser.run("return document.getElementById('command-line').textContent").endswith(
        "--model Qwen3-8B --draft mine.json"
    )


@needs_python
def test_an_overlay_is_dropped(
    browser: Browser,
    site_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    opened(browser, site_folder, MODEL)
    drop(browser, "mine.yaml", OVERLAY)
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(OVERLAY, encoding="utf-8")
    command = browser.run("return document.getElementById('command-line').textContent")
    assert command.endswith("--overlay mine.yaml")
    view = browser.run("return attnreg.lastAnswer")
    picking.check_view(view, picking.printed(shlex.split(command)[2:], capsys))
    assert view["registry"] == load_registry("default", ["mine.yaml"]).title
    others = [other for a in view["answers"] for v in a["verdicts"] for other in v["others"]]
    denied = [other["reasons"] for other in others if other["name"].startswith("FLASH_ATTN")]
    assert denied
    assert all("denied: a test" in [text for text, _ in reasons] for reasons in denied)


@needs_python
def test_an_overlay_with_errors(
    browser: Browser, site_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(browser, site_folder, MODEL)
    drop(browser, "faulty.yaml", FAULTY)
    said = browser.run("return document.querySelector('#answer .error').textContent")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "faulty.yaml").write_text(FAULTY, encoding="utf-8")
    with pytest.raises(RegistryError) as error:
        load_registry("default", ["faulty.yaml"])
    assert said == str(error.value)
    assert "faulty.yaml:2:12: choices.deny: unknown backend `NOPE`" in said


ROWS = """return [...document.querySelectorAll("#difference [aria-label=Moves] tbody tr")].map((row) => {
  const [before, after, models, archs] = [...row.cells].map((cell) => cell.textContent);
  return [before, after, models.split(", ").sort(), archs.split(", ").sort()];
});"""


def moved(capsys: pytest.CaptureFixture[str], before: str, after: str, arch: str) -> list[list[Any]]:
    """The rows of the page for what `attnreg diff` finds of the well-known models on one architecture."""
    models = [word for name in bundled_configs() for word in ("--model", name)]
    main(["diff", before, after, "--arch", arch, *models, "--json"])
    rows: dict[str, list[Any]] = {}
    for move in json.loads(capsys.readouterr().out)["moves"]:
        titles = []
        for side in (move["before"], move["after"]):
            names = "/".join(filter(None, (side["backend"], side["variant"])))
            titles.append(names or ("not known" if side["problem"] else "none"))
        key = json.dumps([titles, move["changes"], move["why"]])
        rows.setdefault(key, [*titles, set()])[2].add(move["model"])
    return sorted([old, new, sorted(named), [arch]] for old, new, named in rows.values())


def test_releases_are_compared_at_once(browser: Browser, site_folder: Path) -> None:
    """The page begins with what the build knows; nothing is loaded for it but that."""
    browser.page.add_init_script("window.requestIdleCallback = () => 0")
    browser.open(site_folder / "compare.html")
    browser.wait("return document.body.dataset.answered")
    assert len(browser.run(ROWS)) > 5
    assert browser.run("return document.getElementById('summary').textContent").startswith("Something changes on sm80")
    assert browser.run("return document.querySelectorAll('main pre').length") == 0
    link = browser.run("return document.querySelector('#difference a.button').getAttribute('href')")
    assert (site_folder / link).is_file()
    assert browser.run("return document.body.dataset.python") is None


@needs_python
def test_compare(
    browser: Browser,
    site_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(OVERLAY, encoding="utf-8")
    # the address asks, and is answered
    browser.open(site_folder / "compare.html", "#before=vllm-0.24.0&after=vllm-0.26.0&where=sm90")
    browser.wait("return document.getElementById('progress').querySelector('progress').max === 2", seconds=240)
    browser.wait("return document.body.dataset.answered", seconds=240)
    assert sorted(browser.run(ROWS)) == moved(capsys, "vllm-0.24.0", "vllm-0.26.0", "sm90")
    assert browser.page.locator("#progress").is_hidden()
    assert browser.page.locator("[aria-label='All configurations'] tbody tr").count() > 0
    browser.open(site_folder / "compare.html", "#before=default&where=sm90")
    browser.run("attnreg.compare.take([new File([arguments[0]], 'mine.yaml')])", OVERLAY)
    browser.wait("return document.body.dataset.answered", seconds=240)
    assert sorted(browser.run(ROWS)) == moved(capsys, "default", "mine.yaml", "sm90")
    assert browser.run("return document.getElementById('summary').textContent").startswith("Something changes: ")
    # one for any registry is laid over the first, and the address does not ask for what the list showed before
    browser.run(
        """document.getElementById("before").value = "vllm-0.33.0";
        document.getElementById("compare").requestSubmit();"""
    )
    browser.wait("return document.body.dataset.answered === '2'", seconds=240)
    assert sorted(browser.run(ROWS)) == moved(capsys, "vllm-0.33.0", "mine.yaml", "sm90")
    assert browser.run("return location.hash") == "#before=vllm-0.33.0&after=mine.yaml&where=sm90"
    # two of them
    browser.run(
        """const [one, other] = arguments;
        attnreg.compare.take([new File([one], "one.yaml"), new File([other], "mine.yaml")]);""",
        "extends: vllm-0.33.0\n",
        OVERLAY,
    )
    browser.wait("return document.body.dataset.answered === '3'", seconds=240)
    (tmp_path / "one.yaml").write_text("extends: vllm-0.33.0\n", encoding="utf-8")
    assert sorted(browser.run(ROWS)) == moved(capsys, "one.yaml", "mine.yaml", "sm90")
    browser.open(site_folder / "compare.html", "#before=default&after=mine.yaml&where=sm90")
    assert "compares mine.yaml, which this site does not have" in browser.run("return document.body.textContent")
    browser.open(site_folder / "compare.html", "#before=default&after=vllm-0.1.0")
    assert "vllm-0.1.0, which this site does not have" in browser.run("return document.body.textContent")
    assert browser.run("return document.body.dataset.answered") is None


@needs_python
def test_an_overlay_with_mistakes_is_not_compared(browser: Browser, site_folder: Path) -> None:
    browser.open(site_folder / "compare.html", "#before=default&where=sm90")
    browser.run("attnreg.compare.take([new File([arguments[0]], 'faulty.yaml')])", FAULTY)
    browser.wait("return document.body.dataset.answered", seconds=240)
    assert "unknown backend `NOPE`" in browser.run("return document.querySelector('#difference .error').textContent")


@needs_python
def test_a_run_is_planned(browser: Browser, site_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened(browser, site_folder, "#registry=vllm-0.33.0&arch=sm90&model=gpt-oss-120b&tp=2")
    browser.page.fill("#plan-memory", "80")
    browser.page.fill("#plan-weights", "35")
    browser.page.click("#plan-form button")
    browser.wait("return document.querySelector('#plan-answer .fits')", seconds=240)
    words = ["--registry", "vllm-0.33.0", "--arch", "sm90", "--model", "gpt-oss-120b", "--tp", "2"]
    main(["plan", *words, "--gpu-memory", "80GiB", "--weights", "35GiB", "--json"])
    plan = json.loads(capsys.readouterr().out)
    text = browser.run("return document.getElementById('plan-answer').textContent")
    assert "The run starts" in text
    assert all(group["backend"]["title"] in text for group in plan["groups"])
    own = browser.run("return document.querySelector('.fits .own b').textContent")
    assert own == f"{plan['fit']['requests_at_most']:,}"
    csv = unquote(browser.page.get_attribute("#plan-answer a[download]", "href") or "").splitlines()
    assert csv[0] == "data:text/csv,GPU,GiB,requests"
    assert f"H100,80,{plan['fit']['requests_at_most']}" in csv
    # one that does not start says what is in its way, and a wrong figure is refused as by the command
    for weights, told in (("73.55", "The run does not start"), ("79", "the weights take 79.0 GiB")):
        browser.page.fill("#plan-weights", weights)
        browser.page.fill("#plan-length", "131072")
        browser.page.click("#plan-form button")
        script = "return document.getElementById('plan-answer').textContent.includes(arguments[0])"
        browser.wait(script.replace("arguments[0]", repr(told)), seconds=60)
        assert browser.page.locator("#plan-answer .notice.error").count() == 1


def test_an_overlay_that_is_nested_too_deeply_is_not_compared(browser: Browser, site_folder: Path) -> None:
    browser.open(site_folder / "compare.html", "#before=default&where=sm90")
    browser.run("attnreg.compare.take([new File([arguments[0]], 'deep.yaml')])", f"{'[' * 3000}1{']' * 3000}")
    browser.wait("return document.body.dataset.answered")
    said = browser.run("return document.getElementById('summary').textContent")
    assert said == "deep.yaml is nested too deeply to be read"
