"""The file of the architectures that a release serves: what is wrong in one is reported with its line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import attnreg
from attnreg.compile.inputs.bundled import registry_root
from attnreg.errors import RegistryError

SOURCE = 'source: "vllm:vllm/model_executor/models/registry.py#_ModelRegistry"\nasked: transformers 5.20.2\n'


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of a release's tables, without its list."""
    copy = tmp_path / "mine"
    shutil.copytree(registry_root() / "engines" / "vllm-0.33.0", copy)
    (copy / "architectures.yaml").unlink()
    return copy


def test_without_the_file_nothing_is_said_of_any_model(directory: Path) -> None:
    assert attnreg.load_registry(directory).architectures is None


def test_a_file_changes_the_names_of_the_one_that_it_extends(directory: Path) -> None:
    text = "served:\n  native: |\n    MPTForCausalLM\n  gone: |\n    DoryForCausalLM\n"
    (directory / "architectures.yaml").write_text(f"extends: vllm-0.33.0\n{SOURCE}{text}")
    found = attnreg.load_registry(directory).architectures
    assert found is not None
    assert found.names["MPTForCausalLM"] == ("native", "", str(directory / "architectures.yaml"), 6)
    assert "DoryForCausalLM" not in found.names
    assert found.names["LlamaForCausalLM"][0] == "native"
    assert "ForCausalLM" in found.suffixes


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (f"{SOURCE}served:\n  natively: |\n    A\n", 4, "unknown key `natively`"),
        (f"{SOURCE}served:\n  native: |\n    A\n  refused: |\n    A\n", 6, "A is native already"),
        (f"{SOURCE}served:\n  gone: |\n    A\n", 4, "there is no A to take away"),
        (f"extends: vllm-0.1.0\n{SOURCE}", 1, "no bundled registry `vllm-0.1.0` to extend"),
        ('source: "no:where"\nasked: transformers 5\n', 1, "unknown source"),
        ("served: {}\n", 1, "source"),
    ],
)
def test_what_is_wrong_has_its_line(directory: Path, text: str, line: int, says: str) -> None:
    (directory / "architectures.yaml").write_text(text)
    with pytest.raises(RegistryError) as caught:
        attnreg.load_registry(directory)
    found = [p for p in caught.value.problems if p.where.file.endswith("architectures.yaml")]
    assert [(p.where.line, says in p.message) for p in found] == [(line, True)], found
