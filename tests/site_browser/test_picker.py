"""The picker in a browser: the build's answers, the states of Python, addresses, bad input, and keys."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from urllib.parse import unquote

import pytest
from support.pages import picking
from support.pages.browser import MODEL, PYTHON, Browser, opened

from attnreg import load_registry
from attnreg.cli.commands import main

ASKED = "#registry=default&arch=sm75&model=gpt-oss-120b&facet.kv_dtype=fp8"
needs_python = pytest.mark.skipif(not PYTHON.is_file(), reason=f"no {PYTHON}: make .cache/python-in-browsers/ready")
# no time for anything but the page itself: Python does not start
NEVER_IDLE = "window.requestIdleCallback = () => 0"


def shown(browser: Browser, part: str) -> str:
    text: str = browser.run("return document.querySelector(arguments[0])?.textContent ?? ''", part)
    return text


# answers of the build -------------------------------------------------------------------------------------------------


def test_the_first_answer_needs_no_python_and_is_light(browser: Browser, site_folder: Path) -> None:
    browser.page.add_init_script(NEVER_IDLE)
    browser.requests()
    opened(browser, site_folder, MODEL)
    files = [Path(unquote(url.removeprefix("file://"))) for url in browser.requests() if url.startswith("file:")]
    assert not [file for file in files if "python" in file.parts]
    assert len(files) > 8
    assert sum(file.stat().st_size for file in files) < 1_500_000
    assert shown(browser, "#python-state").startswith("Python is not loaded yet")
    view = browser.run("return attnreg.lastAnswer")
    assert view == picking.built(site_folder, "answers/default/gpt-oss-120b")["sm90"]
    assert shown(browser, "#summary") == view["summary"]
    # another architecture of the model is in the same file
    browser.run("location.hash = arguments[0]", MODEL.replace("sm90", "gfx942"))
    browser.wait("return attnreg.lastAnswer?.title.includes('gfx942')")
    assert not [url for url in browser.requests() if "/data/" in url]


@pytest.mark.parametrize(
    "anchor",
    [
        MODEL,
        "#registry=vllm-0.33.0&arch=gfx1201&model=gemma-3-27b-it",
        "#registry=sglang-0.5.23&arch=sm90&model=DeepSeek-V3",
        "#registry=vllm-0.24.0&arch=sm75",
    ],
)
def test_an_answer_is_drawn_whole(browser: Browser, site_folder: Path, anchor: str) -> None:
    opened(browser, site_folder, anchor)
    view = browser.run("return attnreg.lastAnswer")
    text = " ".join(shown(browser, "#answer").split())
    verdicts = [verdict for answer in view["answers"] for verdict in answer["verdicts"]]
    others = [other for verdict in verdicts for other in verdict["others"]]
    sentences = [view["title"], *(f"note: {note}" for note in view["notes"])]
    sentences += [f"{v['name']} {v['how']}" for v in verdicts] + [
        line["line"][0] for v in verdicts for line in v["lines"]
    ]
    sentences += [reason for other in others for reason, _ in other["reasons"]]
    sentences += [f"↳ {other['remedy']}" for other in others if other["remedy"]]
    sentences += [cell for table in view["tables"] for row in table["rows"] for cell in row]
    assert [sentence for sentence in sentences if " ".join(sentence.split()) not in text] == []
    links = browser.run("return [...document.querySelectorAll('#answer a.where')].map((a) => a.getAttribute('href'))")
    assert links
    assert all((site_folder / link.partition("#")[0]).is_file() for link in links)


# states of Python -----------------------------------------------------------------------------------------------------


@needs_python
def test_python_starts_when_the_page_is_idle_and_says_so(browser: Browser, site_folder: Path) -> None:
    browser.page.add_init_script(
        """window.states = [];
        new MutationObserver(() => {
          const { python, answered } = document.body?.dataset ?? {};
          if (python) window.states.push([python, answered, document.getElementById("python-state").textContent]);
        }).observe(document, { subtree: true, attributeFilter: ["data-python"] });"""
    )
    opened(browser, site_folder, MODEL)
    browser.wait("return document.body.dataset.python === 'ready'", seconds=120)
    states = browser.run("return states")
    # the first answer was there before
    assert [(state, answered) for state, answered, _ in states] == [("loading", "1"), ("ready", "1")]
    assert states[0][2].startswith("Python is loading …")
    assert shown(browser, "#python-state").startswith("Python is ready")
    assert browser.run("return document.getElementById('python-state').getAttribute('role')") == "status"
    assert len(browser.page.workers) == 1


@needs_python
def test_a_question_for_python_waits_and_is_answered_by_itself(browser: Browser, site_folder: Path) -> None:
    opened(browser, site_folder, MODEL)
    assert browser.run("return document.body.dataset.python") != "ready"
    # what stands on the page at each change, until the answer is there
    seen = browser.run(
        """const seen = [];
        const look = () => seen.push([
          document.getElementById("answer").textContent, document.getElementById("answer").ariaBusy,
          document.getElementById("summary").textContent, document.getElementById("python").textContent]);
        new MutationObserver(look).observe(document.body, { subtree: true, childList: true, attributes: true });
        const before = document.body.dataset.answered;
        document.getElementById("kv_dtype").value = "fp8";
        document.getElementById("kv_dtype").dispatchEvent(new Event("change"));
        look();
        return new Promise((done) => {
          new MutationObserver(() => document.body.dataset.answered !== before && done(seen))
            .observe(document.body, { attributeFilter: ["data-answered"] });
        });"""
    )
    # at once the old answer is gone, and the page says that it waits
    assert seen[0] == ["", "true", "Python answers this question as soon as it is loaded …", ""]
    assert all(text == "" or "KV cache fp8" in text for text, *_ in seen)
    assert "KV cache fp8" in seen[-1][0]
    assert shown(browser, "#summary") == browser.run("return attnreg.lastAnswer.summary")
    assert browser.run("return document.getElementById('answer').ariaBusy") == "false"


@needs_python
def test_an_answer_to_an_earlier_question_is_never_shown(browser: Browser, site_folder: Path) -> None:
    opened(browser, site_folder, ASKED)
    titles = browser.run(
        """const titles = new Set();
        new MutationObserver(() => {
          const title = document.querySelector("#answer > .muted")?.textContent;
          const [arch, kvDtype] = ["arch", "kv_dtype"].map((id) => document.getElementById(id).value);
          if (title) titles.add([arch.split("/")[0], kvDtype, title]);
        }).observe(document.getElementById("answer"), { childList: true });
        const ask = (hash) => { location.hash = hash; };
        const [asked, plain] = arguments;
        ask(asked.replace("fp8", "bfloat16"));
        setTimeout(() => ask(asked.replace("sm75", "sm90")), 20);
        setTimeout(() => ask(plain), 40);
        setTimeout(() => ask(asked.replace("sm75", "gfx942")), 60);
        return new Promise((done) => setTimeout(() => done([...titles]), 3000));""",
        ASKED,
        MODEL,
    )
    for arch, kv_dtype, title in titles:
        assert arch in title
        assert ("KV cache" in title) == bool(kv_dtype)
        assert kv_dtype in title
    assert "gfx942" in shown(browser, "#answer > .muted")


@pytest.mark.parametrize("without", ["WebAssembly", "Python"])
def test_without_python_the_answers_of_the_build_stay(
    browser: Browser, site_folder: Path, tmp_path: Path, without: str
) -> None:
    folder, told = site_folder, "this browser has no WebAssembly"
    if without == "WebAssembly":
        browser.page.add_init_script("delete globalThis.WebAssembly")
    else:
        folder, told = tmp_path, "this site was built without it"
        shutil.copy(site_folder / "pick.html", folder)
        shutil.copytree(site_folder / "assets", folder / "assets")
        shutil.copytree(site_folder / "data", folder / "data", ignore=shutil.ignore_patterns("python"))
    opened(browser, folder, MODEL)
    browser.wait("return document.body.dataset.python === 'unavailable'")
    state = shown(browser, "#python-state")
    assert told in state
    assert state.endswith("The answers here are those that the build computed.")
    assert browser.run("return document.querySelectorAll('#answer .winner').length") > 0
    browser.run("location.hash = arguments[0]", ASKED)
    browser.wait("return document.querySelector('#answer .error')")
    said = shown(browser, "#answer .error")
    assert said.startswith("The build of this site did not answer this question. Python is not available")
    assert said.endswith(
        "The command answers it: attnreg explain --platform cuda --arch sm75 --model gpt-oss-120b --kv-dtype fp8"
    )
    assert browser.run("return document.querySelectorAll('#answer .winner').length") == 0
    browser.run("location.hash = arguments[0]", MODEL)
    browser.wait("return document.querySelector('#answer .winner')")
    # a script that is not there is told by the browser too
    browser.errors()


# addresses ------------------------------------------------------------------------------------------------------------


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
    shown_values = browser.run("return arguments[0].map((id) => document.getElementById(id).value)", names)
    assert shown_values == ["vllm-0.33.0", "gfx942/MI325X", "gpt-oss-20b", "2", "TRITON_ATTN", "fp8", "64", "fp8"]
    assert browser.run("return [...document.querySelectorAll('#flags input:checked')].map((b) => b.value)") == ["aiter"]


@needs_python
@pytest.mark.parametrize(
    "anchor",
    [
        MODEL,
        "#registry=vllm-0.33.0&arch=gfx942&model=DeepSeek-V3&tp=8&facet.kv_dtype=fp8&flag=aiter&package=aiter==0.1",
        "#registry=default&arch=sm75&facet.head_size=96&facet.num_heads=32&facet.num_kv_heads=8&feature=sinks&package=none",
        "#registry=vllm-0.20.0&arch=sm120&facet.head_size=128&facet.kv_dtype=none&backend=FLASH_ATTN/FA3",
        "#registry=sglang-0.5.23&arch=sm90&model=gemma-3-27b-it&tp=2&length=5000&length=100",
        "#registry=default&arch=sm90&model=Qwen3-8B&draft=Qwen3-8B-DFlash-b16&draft_kv_dtype=fp8&draft_backend=TRITON_ATTN",
        "#registry=vllm-0.33.0&arch=sm100&model=DeepSeek-V3&draft=mtp&layer=3&deny=FLASHMLA,TRITON_MLA&prefer=FLASHINFER_MLA",
        "#registry=vllm-0.33.0&arch=sm75&model=gpt-oss-20b&facet.dtype=float16&selector=1",
        "#registry=default&arch=gfx942&model=Llama-3.1-8B&facet.head_size=64&length=4096",
        "#registry=default&arch=sm90&facet.num_heads=9007199254740994",
    ],
)
def test_command_line_and_program_ask_the_same(
    browser: Browser, site_folder: Path, anchor: str, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(browser, site_folder, anchor)
    address = browser.run("return location.hash.slice(1).replace(/@[0-9a-f]+/, '')")
    assert sorted(address.split("&")) == sorted(anchor[1:].split("&"))
    command, program, view = browser.run(
        """document.getElementById("show-command").click();
        const text = (id) => document.getElementById(id).textContent;
        return [text("command-line"), text("python"), attnreg.lastAnswer]"""
    )
    printed = picking.printed(shlex.split(command)[2:], capsys)
    assert sorted(shlex.split(printed["command"])) == sorted(shlex.split(command))
    picking.check_view(view, printed)
    exec(compile(program, "program", "exec"), {})
    said = capsys.readouterr().out
    for selections in (a["selections"] for a in printed["answers"]):
        for backend in (s["backend"] for s in selections if s["backend"]):
            assert f"{'/'.join(filter(None, backend.values()))} for" in said


def test_an_old_link_shows_both_fingerprints(browser: Browser, site_folder: Path) -> None:
    opened(browser, site_folder, "#registry=default@0000000&arch=sm90&model=gpt-oss-120b")
    now = load_registry("default").fingerprint
    assert shown(browser, "main > .notice") == (
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
    assert told in shown(browser, "main > .notice")


@needs_python
@pytest.mark.parametrize(
    "asked",
    [
        "arch=sm999",
        "arch=sm90&model=no-model",
        "arch=sm90&facet.kv_dtype=fp3",
        "arch=sm90&facet.num_heads=7&facet.num_kv_heads=2",
        "arch=sm90&facet.head_size=many",
        "arch=sm90&model=whisper-large-v3&tp=16",
        "arch=sm90&flag=no_flag",
        "arch=sm90&feature=no_feature",
        "arch=sm90&package=no-package",
        "arch=sm90&backend=NO_BACKEND",
        "arch=sm90&facet.nothing=1",
        "arch=sm90&tp=2",
        "arch=constructor",
        "arch=sm90&package=constructor",
        "arch=sm90&facet.constructor=1",
    ],
)
def test_a_question_that_is_not_valid_is_refused_as_by_the_command(
    browser: Browser, site_folder: Path, asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(browser, site_folder, f"#registry=default&{asked}")
    words = shlex.split(shown(browser, "#command-line"))
    assert main(words[1:]) == 2
    told = capsys.readouterr().err.removeprefix("attnreg: ").rstrip("\n")
    # where the models of the hub lie is this machine's
    assert shown(browser, "#answer .error").partition("hub's cache")[0] == told.partition("hub's cache")[0]
    assert shown(browser, "#summary") == "This question has no answer."


def test_without_scripts_the_page_says_where_answers_are(browser: Browser, site_folder: Path) -> None:
    browser.scripts(False)
    browser.open(site_folder / "pick.html")
    links = browser.run("return [...document.querySelectorAll('noscript a')].map((a) => a.getAttribute('href'))")
    browser.scripts(True)
    assert all((site_folder / link).is_file() for link in links)
    assert len(links) > 1


# use -----------------------------------------------------------------------------------------------------------------


@needs_python
def test_keys_keep_their_place(browser: Browser, site_folder: Path) -> None:
    opened(browser, site_folder, MODEL)
    assert browser.run(
        """document.querySelectorAll("details").forEach((d) => { d.open = true; });
        const before = document.body.dataset.answered;
        const box = document.querySelector("#flags input");
        box.focus(); box.click();
        return new Promise((done) => {
          new MutationObserver(() => done(
            [document.activeElement === box, document.body.dataset.answered > before, location.hash.includes("flag=")]
          )).observe(document.body, { attributeFilter: ["data-answered"] });
        });"""
    ) == [True, True, True]
    names = browser.run("""return [...document.querySelectorAll("#question input, #question select")]
        .filter((e) => !e.labels.length && !e.ariaLabel).map((e) => e.outerHTML)""")
    assert names == []
    assert browser.run("return document.getElementById('summary').getAttribute('aria-live')") == "polite"


def test_print_shows_the_answer_and_no_form(browser: Browser, site_folder: Path) -> None:
    opened(browser, site_folder, MODEL)
    browser.printed(True)
    parts = ("#summary", "#answer .winner", "#question", "button")
    visible = [browser.page.locator(part).first.is_visible() for part in parts]
    browser.printed(False)
    assert visible == [True, True, False, False]


def test_telephone(browser: Browser, site_folder: Path) -> None:
    browser.size(390, 844)
    opened(browser, site_folder, "#registry=vllm-0.33.0&arch=gfx942&model=gemma-3-27b-it")
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
