"""The config that ``--model`` names: a path, a model in the hub's cache, an example, or none of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from attnreg import RequestError
from attnreg.compile.inputs.configs import find_config, hub_cache, model_names

CONFIG = ROOT / "examples/configs/gpt-oss-120b/config.json"
FIRST, SECOND = "b5c939de8f754692c1647ca79fbf85e8c1e70f8a", "0f2a5f0d6e0e4f5c8a2b9c1d3e4f5a6b7c8d9e0f"
FETCHING = "`hf download {}` puts it into the hub's cache"
SOURCES = "give a config.json, the directory of one, or a model in the hub's cache by its id (nothing is downloaded)"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub with some models; the working directory is empty."""
    root = tmp_path / "hub"
    for folder, commits, references in (
        ("models--openai--gpt-oss-120b", [FIRST, SECOND], {"main": FIRST, "refs/pr/1": SECOND}),
        ("models--gpt2", [FIRST], {}),
        ("models--one--twin", [FIRST], {"main": FIRST}),
        ("models--two--twin", [FIRST], {"main": FIRST}),
        ("models--three--gpt2", [FIRST], {"main": FIRST}),
        ("models--stale--one", [FIRST], {"main": SECOND}),
        ("models--none--empty", [], {}),
        ("datasets--openai--gsm8k", [FIRST], {"main": FIRST}),
    ):
        for commit in commits:
            place = root / folder / "snapshots" / commit
            place.mkdir(parents=True)
            (place / "config.json").write_bytes(CONFIG.read_bytes())
        for name, commit in references.items():
            reference = root / folder / "refs" / name
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(f"{commit}\n")
        (root / folder).mkdir(exist_ok=True)
    bare = root / "models--none--tokenizer/snapshots" / FIRST
    bare.mkdir(parents=True)
    (root / ".locks").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(root))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return root


FOUND = [
    ("openai/gpt-oss-120b", f"models--openai--gpt-oss-120b/snapshots/{FIRST}"),
    ("OpenAI/GPT-OSS-120B", f"models--openai--gpt-oss-120b/snapshots/{FIRST}"),
    # the cache comes before the examples
    ("gpt-oss-120b", f"models--openai--gpt-oss-120b/snapshots/{FIRST}"),
    ("openai/gpt-oss-120b@main", f"models--openai--gpt-oss-120b/snapshots/{FIRST}"),
    ("openai/gpt-oss-120b@refs/pr/1", f"models--openai--gpt-oss-120b/snapshots/{SECOND}"),
    (f"openai/gpt-oss-120b@{SECOND[:7]}", f"models--openai--gpt-oss-120b/snapshots/{SECOND}"),
    # an id without an owner comes before other owners' models of this name
    ("gpt2", f"models--gpt2/snapshots/{FIRST}"),
    ("two/twin", f"models--two--twin/snapshots/{FIRST}"),
]


@pytest.mark.parametrize(("text", "place"), FOUND, ids=[text for text, _ in FOUND])
def test_a_model_of_the_hubs_cache_is_found_by_its_id(hub: Path, text: str, place: str) -> None:
    assert find_config(text) == str(hub / place / "config.json")


def test_an_example_is_found_by_its_name_and_a_path_is_what_it_is(hub: Path) -> None:
    assert find_config("Llama-3.1-8B") == str(ROOT / "examples/configs/Llama-3.1-8B/config.json")
    assert find_config(str(CONFIG)) == str(CONFIG)
    Path("gpt2").mkdir()
    Path("gpt2/config.json").write_text("{}")
    assert find_config("gpt2") == "gpt2"
    names = model_names()
    assert {"openai/gpt-oss-120b", "gpt2", "one/twin", "Llama-3.1-8B"} <= set(names)
    assert not {"none/empty", "none/tokenizer", "openai/gsm8k"} & set(names)


def test_explain_and_check_read_the_same_config_of_an_id(hub: Path, run: Callable[..., Any]) -> None:
    Path("serve.sh").write_text("vllm serve meta-llama/Llama-3.1-8B --attention-backend FLASH_ATTN\n")
    checked = json.loads(run("check", "serve.sh", "--arch", "h100", "--json").out)
    [launch] = checked["launches"]
    assert launch["model"] == find_config("meta-llama/Llama-3.1-8B")
    note = "the config of meta-llama/Llama-3.1-8B is taken to be the example Llama-3.1-8B that comes with attnreg"
    assert f"serve.sh: {note}" in checked["notes"]
    explained = json.loads(run("explain", "--arch", "h100", "--model", "meta-llama/Llama-3.1-8B", "--json").out)
    assert note in explained["notes"]


REFUSED = [
    (
        "meta-llama/Llama-3.1-8b",
        "meta-llama/Llama-3.1-8b: no such file, and no such model in the hub's cache, {hub}",
        f"did you mean `Llama-3.1-8B`? Or: {FETCHING.format('meta-llama/Llama-3.1-8b config.json')}",
    ),
    (
        "who/knows@v1",
        "who/knows@v1: no such file, and no such model in the hub's cache, {hub}",
        "`hf download who/knows config.json --revision v1` puts it into the hub's cache",
    ),
    ("zzz", "zzz: no such file, and no such model in the hub's cache, {hub}", SOURCES),
    ("twin", "twin is several models of the hub's cache", "give one: one/twin, two/twin"),
    (
        "openai/gpt-oss-120b@v9",
        "the hub's cache has no files of revision v9 of openai/gpt-oss-120b",
        f"give openai/gpt-oss-120b@REVISION; there are {SECOND}, {FIRST}",
    ),
    (
        "stale/one",
        f"the hub's cache has no files of revision main ({SECOND}) of stale/one",
        f"give stale/one@REVISION; there are {FIRST}",
    ),
    (
        "none/empty",
        "the hub's cache has no files of revision main of none/empty",
        "`hf download none/empty config.json` puts it into the hub's cache",
    ),
    (
        "none/tokenizer",
        f"{{hub}}/models--none--tokenizer/snapshots/{FIRST} has no config.json",
        "`hf download none/tokenizer config.json` puts it into the hub's cache",
    ),
    (
        "https://huggingface.co/openai/gpt-oss-120b/blob/main/config.json",
        "https://huggingface.co/openai/gpt-oss-120b/blob/main/config.json is an address, and nothing is downloaded",
        f"{FETCHING.format('openai/gpt-oss-120b config.json')}; then give openai/gpt-oss-120b",
    ),
    (
        "http://example.org/c.json",
        "http://example.org/c.json is an address, and nothing is downloaded",
        "download it, and give the file",
    ),
    ("nowhere.json", "nowhere.json: no such file", SOURCES),
    ("./a/b/c", "./a/b/c: no such file", SOURCES),
    ("../hub", "../hub is a directory without a config.json", SOURCES),
    ("", "'': no such file", SOURCES),
]


@pytest.mark.parametrize(("text", "message", "hint"), REFUSED, ids=[case[0] for case in REFUSED])
def test_where_configs_come_from_is_said(hub: Path, text: str, message: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        find_config(text)
    assert (caught.value.message, caught.value.help) == (message.format(hub=hub), hint)


def test_the_cache_is_where_huggingface_hub_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub_cache() == tmp_path / ".cache/huggingface/hub"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert hub_cache() == Path("/x/huggingface/hub")
    monkeypatch.setenv("HF_HOME", "~/hf")
    assert hub_cache() == tmp_path / "hf/hub"
    monkeypatch.setenv("HF_HUB_CACHE", "/cache")
    assert hub_cache() == Path("/cache")
    # a cache that is not there holds nothing
    assert find_config("gpt-oss-20b").endswith("examples/configs/gpt-oss-20b/config.json")


def test_the_commands_take_ids_and_say_which_file_answers(hub: Path, run: Callable[..., Any]) -> None:
    asked = "explain", "--arch", "h100", "--model", "openai/gpt-oss-120b", "--draft", "Llama-3.1-8B"
    status, out, err = run(*asked)
    assert (status, err) == (0, "")
    assert out.startswith("gpt-oss-120b · 36 layers · draft Llama-3.1-8B · ")
    assert f"note:openai/gpt-oss-120bis{hub}/" in "".join(out.split())
    assert run("lock", "--arch", "h100", "--model", "gpt2").status == 0
    assert run("lock", "--arch", "h100", "--model", "zzz").err.startswith(
        "attnreg: zzz: no such file, and no such model"
    )


@pytest.mark.parametrize("commit", [b"", b"\xff\xfe", b"b5", b"../.."])
def test_a_reference_that_names_no_commit_of_the_cache_is_refused(hub: Path, commit: bytes) -> None:
    (hub / "models--gpt2/refs").mkdir()
    (hub / "models--gpt2/refs/main").write_bytes(commit)
    with pytest.raises(RequestError, match=r"^the hub's cache has no files of revision main"):
        find_config("gpt2")
