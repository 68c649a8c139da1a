"""What a name of a registry means: one that a bundled release has is that release, whatever lies in the directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.registries.files import refusal, write

import attnreg
from attnreg.analysis.revisions import family_texts, load_both, load_revision

RELEASE = "vllm-0.33.0"
NAMES = ["vllm-0.33", RELEASE, "default"]


def as_file(name: str) -> None:
    Path(name).write_text("choices: [{deny: FLASH_ATTN}]\n")


def as_empty_file(name: str) -> None:
    Path(name).touch()


def as_registry(name: str) -> None:
    write(Path(name))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATTNREG_REGISTRY", raising=False)


@pytest.mark.parametrize("make", [as_file, as_empty_file, as_registry])
@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_release_is_the_release(
    name: str, make: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = attnreg.load_registry(name)
    make(name)
    assert attnreg.load_registry(name).title == wanted.title
    assert attnreg.load_registry(name, {"choices": []}).title == wanted.title
    assert load_revision(name).title == load_revision(f"{name}:").title == wanted.title
    assert load_both(name, name)[0].title == wanted.title
    assert attnreg.load_registry(overlays={"extends": name}).title == wanted.title
    Path("mine.yaml").write_text(f"extends: {name}\n")
    assert attnreg.load_registry("mine.yaml").title == wanted.title
    assert attnreg.load_registry(name, "mine.yaml").title == wanted.title
    monkeypatch.setenv("ATTNREG_REGISTRY", name)
    assert attnreg.load_registry().title == wanted.title


@pytest.mark.parametrize("name", NAMES)
def test_a_path_with_a_separator_is_the_file(name: str) -> None:
    as_registry(name)
    for source in (f"./{name}", f"{Path.cwd()}/{name}", Path(name)):
        registry = attnreg.load_registry(source)
        assert list(registry.backends) == ["A", "B"]
        # what a lock writes down is no name of a release either
        assert attnreg.load_registry(registry.base).title == registry.title
    Path("mine.yaml").write_text(f"extends: ./{name}\nchoices: [{{prefer: B}}]\n")
    assert list(attnreg.load_registry("mine.yaml").backends) == ["A", "B"]


def test_an_overlay_for_any_registry_is_laid_over_the_release_that_a_file_is_called_like() -> None:
    as_file("vllm-0.33")
    Path("mine.yaml").write_text("choices: [{deny: FLASHINFER}]\n")
    _, after = load_both("vllm-0.33", "mine.yaml")
    assert after.name == f"{RELEASE}+mine"


def test_without_the_short_name_of_a_release_there_is_no_other_meaning() -> None:
    assert "`vllm-0.99` is neither a bundled registry nor a directory nor a file" in refusal("vllm-0.99")
    as_registry("vllm-0.99")
    assert list(attnreg.load_registry("vllm-0.99").backends) == ["A", "B"]


def test_families_are_those_of_the_default_registry() -> None:
    known = family_texts("default")
    Path("default/models").mkdir(parents=True)
    assert family_texts("default") == known
