"""The picker in a browser answers what attnreg answers; its address, bad input, and keys."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from support import ROOT, picking
from support.browser import MODEL, PYTHON, Browser, opened

from attnreg import load_registry
from attnreg.cli.commands import main
from attnreg.compile.inputs.bundled import bundled_configs, bundled_overlays, bundled_registries

COUNT = 10_000
ANSWERS = (ROOT / "tests/tools/picker/answer.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*bundled_registries(), *bundled_overlays()])
def test_questions_at_random(browser: Browser, site_folder: Path, name: str) -> None:
    registry = load_registry(name)
    opened(browser, site_folder)
    browser.run(f"{ANSWERS}; return attnreg.store.registry(arguments[0]).then((r) => {{ window.asked = r; }})", name)
    questions = picking.questions(registry, COUNT, seed=2026)
    wrong = []
    for start in range(0, COUNT, 500):
        some = questions[start : start + 500]
        text = browser.run("return JSON.stringify(arguments[0].map((q) => answerQuestion(asked, q, false)))", some)
        for question, answer in zip(some, json.loads(text), strict=True):
            expected = picking.asked(question, registry, remedies=False)
            if json.dumps(answer, sort_keys=True) != json.dumps(expected, sort_keys=True):
                wrong.append(question)
    assert wrong == []


@pytest.mark.parametrize("name", bundled_registries())
def test_models_whole(browser: Browser, site_folder: Path, name: str) -> None:
    # 24 models on 12 architectures, with remedies, notes and bytes, as `attnreg explain --json` prints them
    opened(browser, site_folder)
    browser.run("return attnreg.store.registry(arguments[0]).then((r) => { window.asked = r; })", name)
    registry = load_registry(name)
    archs = list(registry.vocabulary.architectures.values())[::2][:12]
    assert (len(bundled_configs()), len(archs)) == (24, 12)
    for model, config in bundled_configs().items():
        for arch in archs:
            question = {
                "options": {"given": {}, "extra": {}, "features": [], "ranks": 1, "backend": None},
                "platform": {"platform": arch.platform, "arch": arch.name, "flags": [], "packages": None},
                "backend": None,
            }
            text = browser.run(
                """const [model, question, registry] = arguments;
                return attnreg.store.model(model, attnregPicker.modelsOf[registry]).then((document) => {
                  const { platform: p, options } = question;
                  const platform = attnreg.makePlatform(p.platform, p.arch, p.flags, p.packages);
                  return JSON.stringify(attnreg.explanationDict(attnreg.explain(asked, platform, options, document)));
                });""",
                model,
                question,
                name,
            )
            expected = picking.explained(name, str(config), question)
            assert json.dumps(json.loads(text), sort_keys=True) == json.dumps(expected, sort_keys=True), (model, arch)


def test_first_answer_is_light(browser: Browser, site_folder: Path) -> None:
    opened(browser, site_folder, MODEL)
    loaded = browser.run(
        "return [...document.querySelectorAll('script[src], link[rel=stylesheet]')].map((e) => e.src || e.href)"
    )
    files = [Path(url.removeprefix("file://")) for url in loaded]
    assert len(files) > 8
    assert sum(f.stat().st_size for f in files) + (site_folder / "pick.html").stat().st_size < 3_000_000


def test_the_page_prepares_for_what_is_asked_next(browser: Browser, site_folder: Path) -> None:
    opened(browser, site_folder, MODEL)
    browser.run(
        """const { explain } = attnreg;
        window.prepared = [];
        attnreg.explain = (registry, platform, options, model) => {
          if (registry.name === "vllm-0.33.0") window.prepared.push([model.name, platform.arch]);
          return explain(registry, platform, options, model);
        };
        location.hash = arguments[0];""",
        "#registry=vllm-0.33.0&arch=sm90&model=gpt-oss-120b",
    )
    models = browser.run("return attnregPicker.models")
    (first, arch), *others = browser.wait("return prepared.length > arguments[0] && prepared", len(models), seconds=120)
    assert (first, arch) == ("gpt-oss-120b", "sm90")
    assert [model for model, _ in others] == models
    architectures = load_registry("vllm-0.33.0").vocabulary.architectures
    assert {architectures[arch].platform for _, arch in others} == {"cuda", "rocm", "xpu", "cpu"}
    assert browser.run(
        "return attnregPicker.models.every((name) => `${arguments[0]}/models/${name}` in attnregData)",
        browser.run("return attnregPicker.modelsOf['vllm-0.33.0']"),
    )
    # nothing of it is drawn
    browser.wait("return document.querySelector('#answer > .muted').textContent.startsWith('gpt-oss-120b')")


def test_address_holds_the_question(browser: Browser, site_folder: Path) -> None:
    anchor = (
        "#registry=vllm-0.33.0&arch=gfx942&gpu=MI325X&model=gpt-oss-20b&tp=2&backend=TRITON_ATTN&facet.kv_dtype=fp8"
        "&facet.block_size=64&facet.run_kv_dtype=fp8&feature=lse&flag=aiter&package=triton==3.6&package=aiter"
    )
    opened(browser, site_folder, anchor)
    here = browser.run("return location.hash")
    # the fingerprint is written into it
    assert here.replace(f"@{load_registry('vllm-0.33.0').fingerprint}", "") == anchor
    names = ["registry", "arch", "model", "tp", "backend", "kv_dtype", "facet-block_size", "facet-run_kv_dtype"]
    shown = browser.run("return arguments[0].map((id) => document.getElementById(id).value)", names)
    assert shown == ["vllm-0.33.0", "gfx942/MI325X", "gpt-oss-20b", "2", "TRITON_ATTN", "fp8", "64", "fp8"]
    assert browser.run("return [...document.querySelectorAll('#flags input:checked')].map((b) => b.value)") == ["aiter"]


@pytest.mark.parametrize(
    "anchor",
    [
        MODEL,
        "#registry=vllm-0.33.0&arch=gfx942&model=DeepSeek-V3&tp=8&facet.kv_dtype=fp8&flag=aiter&package=aiter==0.1",
        "#registry=default&arch=sm75&facet.head_size=96&facet.num_heads=32&facet.num_kv_heads=8&feature=sinks&package=none",
        "#registry=vllm-0.20.0&arch=sm120&facet.head_size=128&facet.kv_dtype=none&backend=FLASH_ATTN/FA3",
        "#registry=sglang-0.5.23&arch=sm90&model=gemma-3-27b-it&tp=2&length=5000&length=100",
        # what Python answers
        "#registry=default&arch=sm90&model=Qwen3-8B&draft=Qwen3-8B-DFlash-b16&draft_kv_dtype=fp8&draft_backend=TRITON_ATTN",
        "#registry=vllm-0.33.0&arch=sm100&model=DeepSeek-V3&draft=mtp&layer=3&deny=FLASHMLA,TRITON_MLA&prefer=FLASHINFER_MLA",
        "#registry=vllm-0.33.0&arch=sm75&model=gpt-oss-20b&facet.dtype=float16&selector=1",
        "#registry=default&arch=gfx942&model=Llama-3.1-8B&facet.head_size=64&length=4096",
        "#registry=default&arch=sm90&facet.num_heads=9007199254740994",
    ],
)
def test_command_line_and_python_ask_the_same(
    browser: Browser, site_folder: Path, anchor: str, capsys: pytest.CaptureFixture[str]
) -> None:
    by_python = any(
        f"&{word}" in anchor for word in ("draft", "layer", "selector", "facet.head_size=64", "facet.num_heads=9")
    )
    if by_python and not PYTHON.is_file():
        pytest.skip(f"no {PYTHON}")
    opened(browser, site_folder, anchor)
    assert browser.run("return attnreg.lastAnswer.python") == by_python
    address = browser.run("return location.hash.slice(1).replace(/@[0-9a-f]+/, '')")
    assert sorted(address.split("&")) == sorted(anchor[1:].split("&"))
    command, program, answer = browser.run(
        """document.getElementById("show-command").click();
        const text = (id) => document.getElementById(id).textContent;
        return [text("command-line"), text("python"), JSON.stringify(attnreg.lastAnswer.explanation)]"""
    )
    main([*shlex.split(command)[1:], "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert sorted(shlex.split(printed.pop("command"))) == sorted(shlex.split(command))
    # the command also says which file it read
    printed["notes"] = [note for note in printed["notes"] if "/examples/configs/" not in note]
    if not by_python:
        # they are settled after the selections, by rules that the evaluator does not have
        printed.pop("block_sizes", None)
    assert json.dumps(json.loads(answer), sort_keys=True) == json.dumps(printed, sort_keys=True)
    exec(compile(program, "program", "exec"), {})
    said = capsys.readouterr().out
    for selections in (a["selections"] for a in printed["answers"]):
        for backend in (s["backend"] for s in selections if s["backend"]):
            assert f"{'/'.join(filter(None, backend.values()))} for" in said


# bad input -----------------------------------------------------------------------------------------------------------


def test_an_old_link_shows_both_fingerprints(browser: Browser, site_folder: Path) -> None:
    opened(browser, site_folder, "#registry=default@0000000&arch=sm90&model=gpt-oss-120b")
    now = load_registry("default").fingerprint
    told = browser.run("return document.querySelector('main > .notice').textContent")
    assert told == (
        "This link was made for another state of the registry default: fingerprint 0000000. "
        f"The answer below is of {now}, and may differ."
    )


@pytest.mark.parametrize(
    ("anchor", "told"),
    [
        (
            "#registry=vllm-0.1.0&arch=sm90",
            "asks the registry vllm-0.1.0, which this site does not have",
        ),
        ("#registry=default&arch=sm90&colour=red", "has what no question has: colour=red"),
        ("#registry=default&arch=sm90&facet.__proto__=1", "has what no question has: facet.__proto__=1"),
    ],
)
def test_a_link_with_what_there_is_not(browser: Browser, site_folder: Path, anchor: str, told: str) -> None:
    opened(browser, site_folder, anchor)
    assert told in browser.run("return document.querySelector('main > .notice').textContent")


@pytest.mark.parametrize(
    ("anchor", "told"),
    [
        ("&arch=sm999", "has no architecture sm999"),
        (
            "&arch=sm90&model=no-model",
            "the model no-model is not among the bundled ones: drop its config.json",
        ),
        ("&arch=sm90&facet.kv_dtype=fp3", "kv_dtype names 'fp3', which default@"),
        (
            "&arch=sm90&facet.num_heads=7&facet.num_kv_heads=2",
            "num_heads is 7 and num_kv_heads is 2; the second",
        ),
        ("&arch=sm90&facet.head_size=many", "head_size is 'many'; expected an integer of at least 1"),
        ("&arch=sm90&model=whisper-large-v3&tp=16", "which do not divide over 16 ranks"),
        ("&arch=sm90&flag=no_flag", "has no flag no_flag"),
        ("&arch=sm90&feature=no_feature", "features names 'no_feature', which default@"),
        ("&arch=sm90&package=no-package", "has no package no-package"),
        ("&arch=sm90&backend=NO_BACKEND", "unknown backend 'NO_BACKEND'"),
        ("&arch=sm90&facet.nothing=1", "nothing is no facet of default@"),
        ("&arch=constructor", "has no architecture constructor"),
        ("&arch=sm90&package=constructor", "has no package constructor"),
        ("&arch=sm90&facet.constructor=1", "constructor is no facet of default@"),
    ],
)
def test_a_question_that_is_not_valid(browser: Browser, site_folder: Path, anchor: str, told: str) -> None:
    opened(browser, site_folder, f"#registry=default{anchor}")
    assert told in browser.run("return document.querySelector('#answer .error').textContent")
    assert browser.run("return document.getElementById('summary').textContent") == "This question has no answer."


def test_without_scripts_the_page_says_where_answers_are(browser: Browser, site_folder: Path) -> None:
    browser.scripts(False)
    browser.open(site_folder / "pick.html")
    links = browser.run("return [...document.querySelectorAll('noscript a')].map((a) => a.getAttribute('href'))")
    browser.scripts(True)
    assert all((site_folder / link).is_file() for link in links)
    assert len(links) > 1


# use -----------------------------------------------------------------------------------------------------------------


def test_keys_keep_their_place(browser: Browser, site_folder: Path) -> None:
    opened(browser, site_folder, MODEL)
    assert browser.run(
        """document.querySelectorAll("details").forEach((d) => { d.open = true; });
        const before = document.body.dataset.answered;
        const box = document.querySelector("#flags input");
        box.focus(); box.click();
        return new Promise((done) => setTimeout(() => done(
          [document.activeElement === box, document.body.dataset.answered > before, location.hash.includes("flag=")]
        ), 300));"""
    ) == [True, True, True]
    names = browser.run("""return [...document.querySelectorAll("#question input, #question select")]
        .filter((e) => !e.labels.length && !e.ariaLabel).map((e) => e.outerHTML)""")
    assert names == []
    assert browser.run("return document.getElementById('summary').getAttribute('aria-live')") == "polite"


def test_a_verdict_is_drawn_before_its_remedies_and_says_so(browser: Browser, site_folder: Path) -> None:
    opened(browser, site_folder, MODEL)
    # a clock that runs out after each search, so that the remedies come one by one
    drawn = browser.run(
        """const answer = document.getElementById("answer");
        let clock = 0;
        performance.now = () => (clock += 1000);
        const drawn = [];
        const look = () => drawn.push([
          [...answer.querySelectorAll(".losers > li")].length, [...answer.querySelectorAll(".searched")].length,
          [...answer.querySelectorAll(".remedy")].length, answer.ariaBusy, answer.textContent]);
        new MutationObserver(look).observe(answer, {childList: true, subtree: true, attributes: true});
        location.hash = arguments[0];
        return new Promise((done) => {
          new MutationObserver(() => setTimeout(() => done(drawn))).observe(document.body, {attributes: true});
        });""",
        "#registry=vllm-0.33.0&arch=sm75&model=gemma-3-27b-it",
    )
    losers, searched, remedies, busy, _ = drawn[0]
    assert (losers > 6, searched > 3, busy) == (True, True, "true")
    assert len(drawn) > searched
    *_, (losers_after, searched_after, remedies_after, busy, text) = drawn
    assert (losers_after, searched_after, busy) == (losers, 0, "false")
    assert remedies_after > remedies
    # in parts as at once
    browser.run(
        "document.getElementById('answer').replaceChildren(...attnreg.answer.render(attnreg.lastAnswer.explanation))"
    )
    assert text == browser.run("return document.getElementById('answer').textContent")


def test_print_shows_the_answer_and_no_form(browser: Browser, site_folder: Path) -> None:
    opened(browser, site_folder, MODEL)
    browser.printed(True)
    shown = [browser.page.locator(s).first.is_visible() for s in ("#summary", "#answer .winner", "#question", "button")]
    browser.printed(False)
    assert shown == [True, True, False, False]


def test_telephone(browser: Browser, site_folder: Path) -> None:
    browser.size(390, 844)
    opened(browser, site_folder, "#registry=vllm-0.33.0&arch=gfx942&model=gemma-3-27b-it")
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
