"""Loading a registry: where it comes from, what names it, what it may import, and how its errors travel."""

from __future__ import annotations

import concurrent.futures
import copy
import json
import os
import pickle
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.registries import tiny
from support.registries.files import FILES, brief, refusal, row, write

import attnreg
from attnreg import loader
from attnreg.compile.inputs import bundled as bundled_data
from attnreg.errors import escaped

# where registries come from ------------------------------------------------------------------------------------------


def test_the_registry_of_this_checkout_is_found() -> None:
    assert bundled_data.registry_root() == ROOT / "registry"
    bundled = attnreg.bundled_registries()
    assert bundled["default"] == ROOT / "registry"
    tables = attnreg.bundled_registries(releases=False)
    assert all((path / "backends.yaml").is_file() for path in tables.values())
    assert all((bundled[name] / "release.yaml").is_file() for name in bundled.keys() - tables.keys())


@pytest.mark.parametrize("name", attnreg.bundled_registries())
def test_every_bundled_registry_loads(name: str) -> None:
    registry = attnreg.load_registry(name)
    assert registry.title == f"{name}@{registry.fingerprint}"
    assert registry.files[0].startswith("registry/")


def test_a_package_without_its_data_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled_data, "__file__", str(tmp_path / "attnreg/compile/inputs/bundled.py"))
    with pytest.raises(attnreg.RegistryError, match="attnreg was installed without its registry: install it again"):
        attnreg.load_registry("default")


def test_a_directory_by_any_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    spellings: list[Any] = [tmp_path / "mine", str(tmp_path / "mine"), "mine", "./mine/", b"mine", Path("mine/../mine")]
    loaded = [attnreg.load_registry(source) for source in spellings]
    assert {registry.title for registry in loaded} == {loaded[0].title}
    assert loaded[2].files == ("mine/vocabulary.yaml", "mine/backends.yaml", "mine/priorities.yaml")


def test_without_words_of_its_own_a_directory_uses_the_default_ones(tmp_path: Path) -> None:
    text = 'backends:\n  X: {summary: s, platforms: [cuda], attention: mha, capabilities: {}, source: "s:p#q"}\n'
    message = refusal(write(tmp_path, vocabulary="", backends=text, priorities="{}"))
    assert "backends.X.capabilities: `attn_types`, `dtypes`, `kv_dtypes`, `head_sizes`, `head_sizes_v`" in message
    # the default vocabulary cites sources that this registry does not have: that is not its fault
    assert "registry/vocabulary.yaml" not in message


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"backends": ""},
            "backends.yaml:1:1: the file is missing: a registry has a backends.yaml and a priorities.yaml",
        ),
        (
            {"priorities": ""},
            "priorities.yaml:1:1: the file is missing: a registry has a backends.yaml and a priorities.yaml",
        ),
        (
            {"backends": "# nothing\n"},
            "backends.yaml:1:1: `backends` is missing\n  help: `backends`: name -> entry",
        ),
        (
            {"vocabulary": "extends: defualt\n"},
            "vocabulary.yaml:1:10: no bundled registry `defualt` to extend\n  help: did you mean `default`?",
        ),
    ],
)
def test_missing_files(files: dict[str, str], message: str, tmp_path: Path) -> None:
    said = brief(refusal(write(tmp_path, **files)))
    assert said.startswith(message)


@pytest.mark.parametrize("name", ["vocabulary", "backends", "priorities", "invariants"])
def test_a_file_of_a_registry_that_cannot_be_read_is_not_left_out(name: str, tmp_path: Path) -> None:
    file = write(tmp_path, invariants="invariants: []\n") / f"{name}.yaml"
    file.unlink()
    file.symlink_to("gone")
    why = "cannot be read: it is a link to gone, where there is nothing"
    assert refusal(tmp_path).splitlines()[0] == f"{name}.yaml:1:1: {why}"
    file.unlink()
    file.mkdir()
    assert refusal(tmp_path).splitlines()[0] == f"{name}.yaml:1:1: cannot be read: Is a directory"


def test_a_source_that_is_no_regular_file_is_said(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to("circle")
    why = {"pipe": "it is a named pipe", "circle": "Too many levels of symbolic links"}
    for name, reason in why.items():
        for source, overlays in ((tmp_path / name, ()), ("default", (tmp_path / name,))):
            message = refusal(source, overlays)
            assert message.splitlines()[0] == f"{tmp_path / name}:1:1: cannot be read: {reason}"


def test_an_archive_is_no_installation(tmp_path: Path) -> None:
    archive = tmp_path / "attnreg.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for module in (ROOT / "attnreg").rglob("*.py"):
            file.write(module, module.relative_to(ROOT))
    code = "import attnreg; attnreg.load_registry('default')"
    environment = {"PYTHONPATH": str(archive)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    said = "attnreg is imported from this archive, and reads its registry from files: install or unpack it"
    assert f"{archive}:1:1: {said}" in done.stderr


def test_a_fork_during_loading_does_not_wait_for_a_thread_that_it_does_not_have(default: attnreg.Registry) -> None:
    code = """
import os, threading, attnreg.loader as loader
load, loading, forked = loader._load, threading.Event(), threading.Event()
def slow(*arguments):
    loading.set()
    forked.wait()
    return load(*arguments)
loader._load = slow
thread = threading.Thread(target=loader.default_registry)
thread.start()
loading.wait()
child = os.fork()
loader._load = load
if child == 0:
    print(loader.default_registry().title, flush=True)
    os._exit(0)
forked.set()
thread.join()
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ATTNREG")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == (default.title, 0)


@pytest.mark.parametrize("source", ["vlm-0.33.0", "", "no/such/place", "x" * 5000, "nul\0", "/dev/null/x"])
def test_a_source_that_is_nothing(source: str) -> None:
    message = refusal(source).splitlines()[0]
    assert message.endswith(f"`{escaped(source)}` is neither a bundled registry nor a directory nor a file")


def test_a_source_that_is_nothing_suggests_a_bundled_one() -> None:
    assert refusal("defalt").splitlines()[1].startswith("  help: did you mean `default`?")


def test_the_environment_names_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNREG_REGISTRY", str(write(tmp_path / "mine")))
    assert attnreg.load_registry().name == "mine"
    # what the caller names wins
    assert attnreg.load_registry("default").name == "default"
    monkeypatch.setenv("ATTNREG_REGISTRY", "")
    assert attnreg.load_registry().name == "default"
    monkeypatch.setenv("ATTNREG_REGISTRY", "missing")
    message = "`missing` is neither a bundled registry nor a directory nor a file; $ATTNREG_REGISTRY names it"
    assert refusal(None).splitlines()[0] == f"missing:1:1: {message}"


# fingerprints --------------------------------------------------------------------------------------------------------


def test_the_fingerprint_names_the_data(tmp_path: Path) -> None:
    def fingerprint(place: str, **files: str) -> str:
        return attnreg.load_registry(write(tmp_path / place, **files)).fingerprint

    base = fingerprint("base")
    assert len(base) == 7
    assert fingerprint("elsewhere") == base
    comments = {name: f"# {name}\n\n{text}\n# the end\n" for name, text in FILES.items()}
    assert fingerprint("comments", **comments) == base
    assert fingerprint("json", vocabulary=json.dumps(tiny.VOCABULARY)) == base
    # the order of architectures is their order of capability
    words = copy.deepcopy(tiny.VOCABULARY)
    words["architectures"]["gpu"] = dict(reversed(words["architectures"]["gpu"].items()))
    changes = {
        "claims": {"backends": row("capabilities: {dtypes: [bfloat16]}")},
        "ranks": {"priorities": FILES["priorities"].replace("[A, B]", "[B, A]")},
        "words": {"vocabulary": json.dumps(words)},
        "invariants": {"invariants": "invariants: [{name: i, says: s, never: [A]}]\n"},
    }
    assert len({base, *(fingerprint(place, **files) for place, files in changes.items())}) == 1 + len(changes)


def test_the_fingerprint_is_the_same_in_every_process(default: attnreg.Registry) -> None:
    code = "import attnreg; print(attnreg.load_registry('default').title)"
    for seed in ("1", "2"):
        result = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        assert result.stdout.strip() == default.title


# errors and threads --------------------------------------------------------------------------------------------------


def test_errors_travel_between_processes(tmp_path: Path) -> None:
    with pytest.raises(attnreg.RegistryError) as e:
        attnreg.load_registry(write(tmp_path, backends=row("capabilites: {}")))
    error = e.value
    for again in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(again) is attnreg.RegistryError
        assert again.problems == error.problems
        assert str(again) == str(error)
    assert isinstance(error, ValueError)
    assert str(error).startswith("the registry has 2 problems:\n")


def test_the_default_registry_is_loaded_once_by_however_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, threads = [], 16
    load, barrier = loader._load, threading.Barrier(threads)

    def slow(*arguments: Any) -> attnreg.Registry:
        calls.append(1)
        time.sleep(0.05)
        return load(*arguments)

    def ask() -> attnreg.Registry:
        barrier.wait()
        return loader.default_registry()

    monkeypatch.setattr(loader, "_default", None)
    monkeypatch.setattr(loader, "_load", slow)
    monkeypatch.setattr(loader, "environment_problems", lambda *_: [])
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        registries = list(pool.map(lambda _: ask(), range(threads)))
    assert len(calls) == 1
    assert all(registry is registries[0] for registry in registries)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": 3}, "source is 3; expected the name of a bundled registry, or a path"),
        ({"overlays": 3}, "overlays names 3; expected paths, or mappings of the form of such a file"),
        ({"overlays": ["a.yaml", 3]}, "overlays names 3; expected paths, or mappings of the form of such a file"),
        ({"trust": 3}, "trust is 3; expected names, for example ['acme']"),
        ({"plugins": 3}, "plugins is 3; expected names, for example ['acme']"),
    ],
)
def test_arguments_of_another_kind(arguments: Any, message: str) -> None:
    with pytest.raises(TypeError) as e:
        attnreg.load_registry(**arguments)
    assert str(e.value) == message
