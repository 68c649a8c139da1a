"""The picker: what the build answers is what the command answers, and its pages ask what the command asks."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.pages import picking
from support.pages.site import asked, shown
from support.suite.examples import FULL

from attnreg import Registry, load_registry
from attnreg.cli import main
from attnreg.compile.cache import unpickled
from attnreg.compile.inputs.bundled import bundled_configs, bundled_overlays, bundled_registries

NEWEST = ("default", "vllm-0.33.0", "sglang-0.5.23")
CONFIG = str(bundled_configs()["gpt-oss-120b"])
needs_node = pytest.mark.skipif(picking.NODE is None, reason="Node is not installed: it runs the page's scripts here")


def options(registry: str, arch: str, model: str) -> list[str]:
    """The command's options for a form in which nothing else is stated."""
    platform = load_registry(registry).vocabulary.architectures[arch].platform
    words = ["--platform", platform, "--arch", arch]
    words += ["--model", str(bundled_configs()[model])] if model else []
    return words + (["--engine", registry] if registry != "default" else [])


# answers of the build -------------------------------------------------------------------------------------------------


@pytest.mark.slow(reason="the built site")
def test_every_default_form_has_an_answer(built_site: Path) -> None:
    page = (built_site / "pick.html").read_text(encoding="utf-8")
    site = json.loads(page.partition('id="picker-site">')[2].partition("</script>")[0])
    assert site["registries"] == [*shown(), *bundled_overlays()]
    everything = ["", *asked()]
    assert site["answered"] == {n: everything if n in NEWEST else [""] for n in site["registries"]}
    for name, models in site["answered"].items():
        architectures = load_registry(name).vocabulary.architectures
        for model in models:
            answers = picking.built(built_site, f"answers/{name}/{model or 'request'}")
            assert set(answers) == set(architectures)
            assert [arch for arch, view in answers.items() if "error" in view] == []


@pytest.mark.slow(reason="the built site")
def test_answers_of_the_build_are_the_commands(built_site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from picker import asking

    rng = random.Random(23)
    forms = [(name, model) for name in NEWEST for model in ("", *asked())]
    forms += [(name, "") for name in (*shown(), *bundled_overlays()) if name not in NEWEST]
    kinds = set()
    for name, model in forms:
        answers = picking.built(built_site, f"answers/{name}/{model or 'request'}")
        kinds |= {v["kind"] for view in answers.values() for answer in view["answers"] for v in answer["verdicts"]}
        for arch in rng.sample(list(answers), 2 if FULL else 1):
            words = options(name, arch, model)
            picking.check_view(answers[arch], picking.printed(words, capsys))
            # the same code answers in the browser
            assert json.loads(json.dumps(asking.answer(words))) == answers[arch]
    assert kinds == {"chosen", "none", "unknown"}


@pytest.mark.slow(reason="the built site")
def test_the_comparison_of_the_build_is_the_commands(built_site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The moves that the build shows at once are those of `attnreg diff` on its architectures."""
    for before, after in (("vllm-0.32.0", "vllm-0.33.0"), ("sglang-0.5.14", "sglang-0.5.23")):
        built = picking.built(built_site, f"compare/{before}-to-{after}")
        models = [word for name in bundled_configs() for word in ("--model", name)]
        archs = [word for name in built["archs"] for word in ("--arch", name)]
        main(["diff", before, after, *archs, *models, "--json"])
        moves = json.loads(capsys.readouterr().out)["moves"]
        titles = [[_title(move[side]) for side in ("before", "after")] for move in moves]
        wanted = {(*pair, m["model"], m["platform"]["arch"]) for pair, m in zip(titles, moves, strict=True)}
        found = {
            (old, new, model.partition(" (")[0], arch)
            for old, new, rows, _ in built["rows"]
            for names, named in rows
            for arch in names
            for model in named
        }
        assert found == wanted


def _title(outcome: dict[str, Any]) -> str:
    names = filter(None, (outcome["backend"], outcome["variant"]))
    return "/".join(names) or ("not known" if outcome["problem"] else "none")


# questions in words ---------------------------------------------------------------------------------------------------

WORDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gpt-oss on 2 x H100 vllm fp8": (
        {"model": "gpt-oss-120b", "arch": "sm90", "gpu": "H100", "registry": "vllm-0.33.0", "kv_dtype": "fp8", "tp": 2},
        [],
    ),
    "DeepSeek V3.2, 8xB200, vllm 0.30": (
        {"model": "DeepSeek-V3.2-Exp", "arch": "sm100", "gpu": "B200", "registry": "vllm-0.30.0", "tp": 8},
        [],
    ),
    "llama 3.3 70b tp4 mi300x": (
        {"model": "Llama-3.3-70B-Instruct", "arch": "gfx942", "gpu": "MI300X", "tp": 4},
        [],
    ),
    "what does Qwen3-8B get on 4 L40S in sglang": (
        {"model": "Qwen3-8B", "arch": "sm89", "gpu": "L40S", "registry": "sglang-0.5.23", "tp": 4},
        ["does", "get"],
    ),
    "quux constructor __proto__ 7": ({}, ["quux", "constructor", "__proto__", "7"]),
    "": ({}, []),
}


@needs_node
def test_words_are_read_and_what_is_none_is_named() -> None:
    vocabulary = load_registry("default").vocabulary
    archs = vocabulary.architectures.values()
    products = {name: arch.name for arch in archs for name in (*arch.aliases, *arch.products, arch.name)}
    releases = [name for name in bundled_registries() if name != "default"]
    known = {
        "models": list(bundled_configs()),
        "registries": list(bundled_registries()),
        "newest": {name.partition("-")[0]: name for name in sorted(releases)},
        "products": products,
        "kv_dtypes": list(vocabulary.words_of("kv_dtype")),
    }
    read = picking.by_node({"known": known, "texts": list(WORDS)}, "words")
    assert {text: tuple(said) for text, said in zip(WORDS, read, strict=True)} == WORDS


# one code path --------------------------------------------------------------------------------------------------------

QUESTIONS: dict[str, list[str]] = {
    "a model": ["--arch", "sm90", "--model", CONFIG, "--tp", "2", "--kv-dtype", "fp8", "--length", "1000"],
    "one request": ["--arch", "sm75", "--head-size", "96", "--feature", "sinks", "--package", "none"],
    "a backend": ["--registry", "vllm-0.33.0", "--arch", "gfx942", "--model", CONFIG, "--backend", "TRITON_ATTN"],
    "choices": ["--arch", "sm90", "--model", CONFIG, "--prefer", "FLASH_ATTN", "--deny", "HOPPER_ATTN"],
    "a selector": ["--registry", "vllm-0.33.0", "--selector", "--arch", "sm75", "--model", CONFIG],
    "a release": ["--registry", "sglang-0.5.14", "--arch", "sm90", "--model", CONFIG, "--flag", "deterministic"],
    "a draft": [
        "--arch",
        "sm90",
        "--model",
        str(bundled_configs()["Qwen3-8B"]),
        "--draft",
        str(bundled_configs()["Qwen3-8B-DFlash-b16"]),
        "--draft-backend",
        "TRITON_ATTN",
    ],
    "no attention": [
        "--arch",
        "sm90",
        "--model",
        str(bundled_configs()["Qwen3-Next-80B-A3B-Instruct"]),
        "--layer",
        "0",
    ],
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_page_shows_what_the_command_prints(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from picker import asking

    words = QUESTIONS[name]
    if name == "a release":
        words = [*words[:-1], next(iter(load_registry("sglang-0.5.14").vocabulary.flags))]
    view = asking.answer(words)
    explained = picking.printed(words, capsys)
    picking.check_view(view, explained)
    exec(compile(view["program"], "program", "exec"), {})
    said = capsys.readouterr().out
    for backend in (s["backend"] for a in explained["answers"] for s in a["selections"] if s["backend"]):
        assert f"{'/'.join(filter(None, backend.values()))} for" in said


def test_an_overlay_is_read_for_every_question_that_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from picker import browser

    monkeypatch.chdir(tmp_path)
    words = ["--arch", "sm90", "--model", CONFIG, "--overlay", "mine.yaml"]
    for denied in ("HOPPER_ATTN", "TRITON_ATTN"):
        text = f"choices: [{{deny: {denied}, because: a test}}]\n"
        assert json.loads(browser.overlay("mine.yaml", text, "default"))["lists"]["name"] == "default+mine"
        picking.check_view(json.loads(browser.answer(*words)), picking.printed(words, capsys))
    browser.write("mine.yaml", "choices: [{deny: NOPE}]\n")
    for answer in (browser.answer(*words), browser.overlay("mine.yaml", "choices: [{deny: NOPE}]\n", "default")):
        assert "mine.yaml:1:18: choices.deny: unknown backend `NOPE`" in json.loads(answer)["error"]


@pytest.mark.parametrize(
    "words",
    [
        ["--arch", "sm999"],
        ["--arch", "sm90", "--model", "no-model"],
        ["--arch", "sm90", "--kv-dtype", "fp3"],
        ["--arch", "sm90", "--head-size", "many"],
        ["--arch", "sm90", "--set", "nothing=1"],
        ["--arch", "sm90", "--model", CONFIG, "--tp", "48"],
        ["--arch", "sm90", "--backend", "NO_BACKEND"],
    ],
)
def test_what_the_command_refuses_a_page_refuses_in_the_same_words(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from picker import asking

    assert main(["explain", *words]) == 2
    assert f"attnreg: {asking.answer(words)['error']}\n" == capsys.readouterr().err


# the form -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["default", "vllm-0.33.0", "sglang-0.5.14"])
def test_every_facet_of_a_request_is_in_the_form(name: str) -> None:
    from picker.lists import lists

    registry = load_registry(name)
    offered = lists(registry)
    asked = {f.name for f in registry.vocabulary.facets.values() if f.of == "request"}
    assert {f["name"] for f in offered["facets"]} == asked - {"kv_dtype", "features", "model"}
    assert [names[0] for names in offered["backends"]] == list(registry.backends)
    assert offered["options"]["kv_dtype"] == "--kv-dtype"
    assert offered["devices"] == []


def test_devices_are_told_apart_where_a_condition_asks_for_one(default: Registry) -> None:
    from picker.lists import lists

    laid = load_registry("default", [{"choices": [{"deny": "FLASH_ATTN", "when": {"device": "H20"}}]}])
    assert lists(laid)["devices"] == list(default.vocabulary.words_of("device"))


HASHES: dict[str, tuple[bool, str]] = {
    # hash -> whether the build answers it, and the command that it asks
    "#registry=default&arch=sm90&model=gpt-oss-120b": (True, "--platform cuda --arch sm90 --model gpt-oss-120b"),
    "#registry=default&arch=sm90&gpu=H200": (True, "--platform cuda --arch sm90"),
    "#registry=vllm-0.33.0&arch=gfx942&model=gpt-oss-20b&tp=2&backend=TRITON_ATTN&facet.kv_dtype=fp8&facet.run_kv_dtype=fp8"
    "&length=100&draft=mtp&deny=A,B&selector=1&feature=lse&flag=aiter&package=triton==3.6&package=aiter": (
        False,
        (
            "--platform rocm --arch gfx942 --flag aiter --package triton==3.6 --package aiter --model gpt-oss-20b "
            "--tp 2 --length 100 --draft mtp --deny A --deny B --selector --kv-dtype fp8 --set run_kv_dtype=fp8 "
            "--feature lse --backend TRITON_ATTN --engine vllm-0.33.0"
        ),
    ),
    "#registry=default&arch=sm75&facet.head_size=96&package=none": (
        False,
        "--platform cuda --arch sm75 --package none --head-size 96",
    ),
    "#registry=default&arch=constructor&facet.constructor=1": (False, "--arch constructor --set constructor=1"),
}


@needs_node
def test_an_address_is_a_command(default: Registry) -> None:
    from picker.lists import lists

    # a config that is dropped is no bundled model, whatever its file is called: a link would ask for that elsewhere
    files = {
        "config.json": "config",
        "Mine.JSON": "Mine",
        "gpt-oss-120b.json": "gpt-oss-120b of gpt-oss-120b.json",
        "gpt-oss-120b": "gpt-oss-120b of gpt-oss-120b",
    }
    elsewhere = "#registry=default&arch=sm90&facet.features=sinks&facet.model=llama&facet.arch=sm80&facet.__proto__=1"
    given = {
        "lists": lists(default),
        "hashes": [*HASHES, elsewhere],
        "files": list(files),
        "bundled": list(bundled_configs()),
    }
    answer = picking.by_node(given)
    assert answer["models"] == list(files.values())
    *read, last = answer["read"]
    assert [(one["plain"], " ".join(one["words"])) for one in read] == list(HASHES.values())
    assert [one["hash"] for one in read] == [*HASHES]
    assert [shlex.split(one["line"])[2:] for one in read] == [one["words"] for one in read]
    assert last["unread"] == ["facet.features=sinks", "facet.model=llama", "facet.arch=sm80", "facet.__proto__=1"]
    assert " ".join(last["words"]) == "--platform cuda --arch sm90"


@needs_node
def test_the_build_answers_no_question_about_a_device_that_a_condition_names() -> None:
    from picker.lists import lists

    laid = load_registry("default", [{"choices": [{"deny": "FLASH_ATTN", "when": {"device": "H20"}}]}])
    hashes = ["#registry=default&arch=sm90&gpu=H20&model=Qwen3-8B", "#registry=default&arch=sm90&model=Qwen3-8B"]
    read = picking.by_node({"lists": lists(laid), "hashes": hashes, "files": [], "bundled": []})["read"]
    assert [one["plain"] for one in read] == [False, True]
    assert "--device-name H20" in read[0]["line"]


# Python for the browser -----------------------------------------------------------------------------------------------


def test_a_page_has_every_bundled_registry_compiled() -> None:
    from picker import runtime

    folder = ROOT / runtime_folder()
    if not (folder / "runtime.js").is_file():
        pytest.skip(f"no {folder}: make .cache/python-in-browsers/ready")
    files: dict[str, bytes] = dict(runtime._files(folder))
    for name in (*bundled_registries(), *bundled_overlays()):
        assert unpickled(files[f"picker/compiled/{name}"]).title == load_registry(name).title
    archive: dict[str, Any] = runtime._archive({"a.py": b"one", "b/c.py": b"", "d": b"two"})
    assert json.loads(archive["packages.json"]) == [["a.py", 0, 3], ["b/c.py", 3, 3], ["d", 3, 6]]
    assert archive["packages"] == b"onetwo"


def runtime_folder() -> str:
    """Where a checkout keeps Python for browsers."""
    from docs_site.picker import RUNTIME

    return RUNTIME
