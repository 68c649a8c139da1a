"""A registry that is the difference to another release: what it changes, what it takes away, and where it is cited."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attnreg import Registry, RegistryError, load_registry
from attnreg.compile.bundled import release_name

Write = Callable[[str], Path]


@pytest.fixture
def release(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        folder = tmp_path / "engine-1.0"
        folder.mkdir(exist_ok=True)
        (folder / "release.yaml").write_text(text)
        return folder

    return write


def refused(folder: Path) -> str:
    with pytest.raises(RegistryError) as caught:
        load_registry(folder)
    return str(caught.value)


def test_what_it_does_not_name_is_the_other_releases(release: Write) -> None:
    below, changed = load_registry("vllm-0.33.0"), load_registry(release("extends: vllm-0.33.0\nsteps: null\n"))
    assert changed.name == "engine-1.0"
    assert changed.backends.keys() == below.backends.keys()
    assert (bool(below.steps), changed.steps) == (True, ())


def test_rows_claims_and_orders_are_changed_by_name(release: Write) -> None:
    text = """
extends: vllm-0.33.0
steps: null
backends:
  backends:
    TRITON_ATTN: {capabilities: {dtypes: [float32]}}
    FLASHINFER: {variants: [{name: XQA, capabilities: {add: {kv_dtypes: null}}}]}
priorities:
  cuda:
    - {name: blackwell-mla-few-heads, gone: true}
    - {name: mha, order: [TRITON_ATTN, FLASHINFER]}
  xpu: null
"""
    below, changed = load_registry("vllm-0.33.0"), load_registry(release(text))
    names = [order.name for order in below.orders["cuda"]]
    names.remove("blackwell-mla-few-heads")
    assert [order.name for order in changed.orders["cuda"]] == names
    mha = changed.orders["cuda"][-1]
    assert [entry.backend for entry in mha.entries] == ["TRITON_ATTN", "FLASHINFER"]
    assert "xpu" not in changed.orders
    claims = {claim.facet: claim for claim in changed.backends["TRITON_ATTN"].variants[-1].claims}
    # what is changed is cited where it was changed, all else where it stands
    assert str(claims["dtype"].where).endswith("engine-1.0/release.yaml:6:34")
    assert claims["head_size"].where.file == "registry/engines/vllm-0.33.0/backends.yaml"
    assert changed.orders["cuda"][0].where == below.orders["cuda"][0].where
    assert mha.entries[0].where.file.endswith("release.yaml")
    xqa = [next(v for v in r.backends["FLASHINFER"].variants if v.name == "XQA") for r in (below, changed)]
    kv = [next(claim for claim in variant.claims if claim.facet == "kv_dtype").matcher.text for variant in xqa]
    assert ("nvfp4" in kv[0], "nvfp4" in kv[1]) == (True, False)


PROBLEMS = [
    ("no base", "steps: null\n", "release.yaml:1:1: `extends` is missing"),
    ("unknown base", "extends: vllm-9.9.9\n", "release.yaml:1:10: no bundled registry `vllm-9.9.9` to extend"),
    ("unknown part", "extends: vllm-0.33.0\nbackend: {}\n", "release.yaml:2:1: unknown key `backend`"),
    (
        "a row that is not there",
        "extends: vllm-0.33.0\nbackends: {backends: {FLASH_ATN: null}}\n",
        (
            "release.yaml:2:23: there is no FLASH_ATN to take away\n"
            "    2 | backends: {backends: {FLASH_ATN: null}}\n"
            "      |                       ^^^^^^^^^\n"
            "  help: did you mean `FLASH_ATTN`?"
        ),
    ),
    (
        "an order that is not there",
        "extends: vllm-0.33.0\npriorities: {cuda: [{name: mhaa, gone: true}]}\n",
        "release.yaml:2:21: there is no mhaa to take away",
    ),
    (
        "a word that is used",
        "extends: vllm-0.33.0\nsteps: null\nvocabulary: {words: {kv_dtypes: {ultraquant_4bit: null}}}\n",
        "registry/engines/vllm-0.33.0/backends.yaml:",
    ),
]


@pytest.mark.parametrize(("text", "message"), [p[1:] for p in PROBLEMS], ids=[p[0] for p in PROBLEMS])
def test_what_is_wrong_is_said_with_its_place(release: Write, text: str, message: str) -> None:
    assert message in refused(release(text))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("vllm-0.33", "vllm-0.33.0"),
        ("sglang-0.5", "sglang-0.5.23"),
        ("vllm-0", "vllm-0.33.0"),
        ("vllm-0.3", "vllm-0.3"),
        ("vllm", "vllm"),
        ("default", "default"),
    ],
)
def test_a_release_is_named_by_the_beginning_of_its_version(name: str, meant: str) -> None:
    assert release_name(name) == meant


def test_a_short_name_loads_the_release() -> None:
    registry: Registry = load_registry("vllm-0.32")
    assert (registry.name, registry.base) == ("vllm-0.32.0", "vllm-0.32.0")
    assert "registry/engines/vllm-0.32.0/release.yaml" in registry.files
    assert registry.sources["vllm"].version == "0.32.0"
