"""What Python in WebAssembly answers in a browser: dropped files, comparisons, and what the evaluator does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import picking
from support.browser import MODEL, PYTHON, Browser, opened

from attnreg import ConfigError, RegistryError, load_registry, requests_from_model
from attnreg.cli.commands import main
from attnreg.compile.inputs.bundled import bundled_configs

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


@needs_python
def test_a_config_is_dropped(browser: Browser, site_folder: Path) -> None:
    opened(browser, site_folder, MODEL)
    config = bundled_configs()["gemma-3-27b-it"]
    drop(browser, "mine.json", config.read_text(encoding="utf-8"))
    answer = json.loads(browser.run("return JSON.stringify(attnreg.lastAnswer.explanation)"))
    options = {"given": {}, "extra": {}, "features": [], "ranks": 1, "backend": None}
    platform = {"platform": "cuda", "arch": "sm90", "flags": [], "packages": None}
    asks = {"options": options, "platform": platform, "backend": None}
    expected = picking.explained("default", str(config), asks)
    assert answer.pop("title") == expected.pop("title").replace("gemma-3-27b-it", "mine")
    assert json.dumps(answer, sort_keys=True) == json.dumps(expected, sort_keys=True)
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
    browser: Browser, site_folder: Path, name: str, text: str, told: str, tmp_path: Path
) -> None:
    opened(browser, site_folder, MODEL)
    drop(browser, name, text)
    said = browser.run("return document.querySelector('#answer .error').textContent")
    path = tmp_path / name.removesuffix(".json") / "config.json"
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        requests_from_model(str(path))
    assert said == str(error.value).replace(str(tmp_path), "/configs")
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
    browser.run("location.hash = arguments[0]", "#registry=default&arch=sm90&model=Qwen3-8B&draft=mine")
    browser.wait("return attnreg.lastAnswer.python", seconds=240)
    assert "draft mine" in browser.run("return attnreg.lastAnswer.explanation.title")
    assert browser.run("return document.getElementById('command-line').textContent").endswith(
        "--model Qwen3-8B --draft mine.json"
    )


@needs_python
def test_the_page_answers_while_python_starts(browser: Browser, site_folder: Path) -> None:
    opened(browser, site_folder, MODEL)
    browser.run("attnreg.python.call('command', '--version').then(() => { window.started = true; })")
    browser.run("location.hash = arguments[0]", f"{MODEL}&layer=1")
    browser.wait("return document.getElementById('summary').textContent.startsWith('Python')")
    # meanwhile another question is asked, and its answer stays
    browser.run("location.hash = arguments[0]", "#registry=default&arch=sm75&model=gpt-oss-120b")
    browser.wait("return attnreg.lastAnswer.explanation.title.includes('sm75')")
    assert browser.run("return window.started ?? false") is False
    browser.wait("return window.started", seconds=240)
    assert len(browser.page.workers) == 1
    browser.run("return attnreg.python.call('command', '--version')")
    assert "sm75" in browser.run("return document.querySelector('#answer > .muted').textContent")


@needs_python
def test_an_overlay_is_dropped(browser: Browser, site_folder: Path, tmp_path: Path) -> None:
    opened(browser, site_folder, MODEL)
    drop(browser, "mine.yaml", OVERLAY)
    answer = json.loads(browser.run("return JSON.stringify(attnreg.lastAnswer.explanation)"))
    (tmp_path / "mine.yaml").write_text(OVERLAY, encoding="utf-8")
    assert answer["registry"] == load_registry("default", [tmp_path / "mine.yaml"]).title
    candidates = [c for a in answer["answers"] for s in a["selections"] for c in s["candidates"]]
    denied = [c["reasons"] for c in candidates if c["name"].startswith("FLASH_ATTN")]
    assert denied
    assert all("denied: a test" in [reason["text"] for reason in reasons] for reasons in denied)
    assert "--overlay mine.yaml" in browser.run("return document.getElementById('command-line').textContent")


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


@needs_python
def test_compare(
    browser: Browser,
    site_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    (tmp_path / "mine.yaml").write_text(OVERLAY, encoding="utf-8")
    # the address asks, and is answered
    browser.open(site_folder / "compare.html", "#before=vllm-0.32.0&after=vllm-0.33.0&where=sm90")
    browser.wait("return document.body.dataset.answered", seconds=240)
    main(["diff", "vllm-0.32.0", "vllm-0.33.0", "--arch", "sm90"])
    assert browser.run("return document.getElementById('difference').textContent") == capsys.readouterr().out
    browser.open(site_folder / "compare.html", "#before=default&where=sm90")
    browser.run("attnreg.compare.take([new File([arguments[0]], 'mine.yaml')])", OVERLAY)
    browser.wait("return document.body.dataset.answered", seconds=240)
    main(["diff", "default", "mine.yaml", "--arch", "sm90"])
    assert browser.run("return document.getElementById('difference').textContent") == capsys.readouterr().out
    assert browser.run("return document.getElementById('summary').textContent").startswith("Something changes: ")
    # one for any registry is laid over the first, and the address does not ask for what the list showed before
    browser.run(
        """document.getElementById("before").value = "vllm-0.33.0";
        document.getElementById("compare").requestSubmit();"""
    )
    browser.wait("return document.body.dataset.answered === '2'", seconds=240)
    main(["diff", "vllm-0.33.0", "mine.yaml", "--arch", "sm90"])
    shown = browser.run("return document.getElementById('difference').textContent")
    assert shown == capsys.readouterr().out
    assert " → vllm-0.33.0+mine@" in shown
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
    main(["diff", "one.yaml", "mine.yaml", "--arch", "sm90"])
    assert browser.run("return document.getElementById('difference').textContent") == capsys.readouterr().out
    browser.open(site_folder / "compare.html", "#before=default&after=mine.yaml&where=sm90")
    assert "compares mine.yaml, which this site does not have" in browser.run("return document.body.textContent")
    browser.open(site_folder / "compare.html", "#before=default&after=vllm-0.1.0")
    assert "vllm-0.1.0, which this site does not have" in browser.run("return document.body.textContent")
    assert browser.run("return document.body.dataset.answered") is None


def test_an_overlay_that_is_nested_too_deeply_is_not_compared(browser: Browser, site_folder: Path) -> None:
    browser.open(site_folder / "compare.html", "#before=default&where=sm90")
    browser.run("attnreg.compare.take([new File([arguments[0]], 'deep.yaml')])", f"{'[' * 3000}1{']' * 3000}")
    browser.wait("return document.body.dataset.answered")
    said = browser.run("return document.getElementById('summary').textContent")
    assert said == "deep.yaml is nested too deeply to be read"


def test_without_webassembly_the_picker_answers_and_says_what_it_cannot(browser: Browser, site_folder: Path) -> None:
    opened(browser, site_folder, MODEL)
    browser.run("delete globalThis.WebAssembly")
    drop(browser, "mine.json", "{}")
    assert "this browser has no WebAssembly" in browser.run(
        "return document.querySelector('#answer .error').textContent"
    )
    browser.run("location.hash = arguments[0]", MODEL)
    browser.wait("return document.querySelector('#answer .winner')")


@needs_python
def test_python_answers_where_the_evaluator_cannot(
    browser: Browser, site_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(browser, site_folder, MODEL)
    browser.run("attnreg.store.add('default', { ...attnregData.default, byPython: 'a test' })")
    browser.run("location.hash = arguments[0]", f"{MODEL}&facet.kv_dtype=fp8&flag=aiter")
    browser.wait("return attnreg.lastAnswer.python", seconds=240)
    answer = json.loads(browser.run("return JSON.stringify(attnreg.lastAnswer.explanation)"))
    words = ["--platform", "cuda", "--arch", "sm90", "--flag", "aiter", "--model", "gpt-oss-120b", "--kv-dtype", "fp8"]
    main(["explain", *words, "--json"])
    printed = json.loads(capsys.readouterr().out)
    del printed["command"]
    printed["notes"] = [note for note in printed["notes"] if "/examples/configs/" not in note]
    assert json.dumps(answer, sort_keys=True) == json.dumps(printed, sort_keys=True)


@needs_python
@pytest.mark.parametrize(
    ("ranks", "told"), [(3, "32 query heads, which do not divide over 3 ranks; these do"), (32, "FLASH_ATTN/FA3")]
)
def test_python_answers_about_other_ranks(browser: Browser, site_folder: Path, ranks: int, told: str) -> None:
    opened(browser, site_folder, f"#registry=default&arch=sm90&model=Qwen3-8B&tp={ranks}")
    assert told in browser.run("return document.getElementById('answer').textContent")
