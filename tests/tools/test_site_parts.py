"""Parts of the site that need no built one: the grid's cells, timelines, what is vendored, and addresses to edit."""

from __future__ import annotations

import hashlib
from types import ModuleType
from typing import Any

import pytest
from support import ROOT

_FONTS = {
    "geist.woff2": "19f9c92546aa300c312235e3125af1b81394d8db9a4bc4a425cd5b641d2d54e1",
    "geist-mono.woff2": "684ad5b531f81d43c1e8c7038262d5db7cdc1f68006e04d6c7769efa8d33c8cc",
}


def test_fonts_and_icons_are_those_that_were_vendored_with_their_licences() -> None:
    assets = ROOT / "tools/docs_site/assets/fonts"
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in assets.glob("*.woff2")}
    assert found == _FONTS
    assert "SIL OPEN FONT LICENSE" in (assets / "LICENSE.txt").read_text(encoding="utf-8").upper()
    assert "ISC License" in (ROOT / "tools/docs_site/icons/LICENSE.txt").read_text(encoding="utf-8")


def test_a_guide_has_an_address_to_edit_it_where_a_workflow_builds_the_site(
    gen_docs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = gen_docs.docs_site.guides.edit_address
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    assert address() == ""
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.com")
    monkeypatch.setenv("GITHUB_REPOSITORY", "someone/attnreg")
    assert address() == "https://github.com/someone/attnreg/edit/HEAD/"


def test_timeline_says_what_each_release_takes_and_why(gen_docs: ModuleType) -> None:
    site = gen_docs.docs_site.Site(ROOT)
    of_model = gen_docs.docs_site.timelines.of_model
    lanes = {arch: lane for lane in of_model(site, "vllm", "gpt-oss-120b") for arch in lane.names}
    # another kernel, with its reason
    first, second = lanes["sm120"].spans
    assert [span.answers for span in (first, second)] == [(("TRITON_ATTN/paged", ""),), (("FLASHINFER/XQA", ""),)]
    assert (first.title, second.title, second.moved) == ("0.20 – 0.27", "0.28 – 0.33", True)
    assert "sinks is not supported" in dict(lanes["sm120"].whys)["0.28"]
    # and the same kernel under another name, which is no move
    assert dict(lanes["sm90"].whys) == {"0.27": "the same kernel under another name"}
    assert not lanes["sm90"].spans[1].moved


@pytest.mark.parametrize(
    ("registry", "arch", "backend", "column", "state", "line"),
    [
        ("default", "sm90", "TRITON_ATTN", ("features", "sinks"), "native", "lists it"),
        ("default", "sm90", "TORCH_SDPA", ("features", "alibi"), "emulated", "serves it slowly"),
        ("default", "sm90", "FLASHINFER", ("head_size", 72), "refused", "accepts 64, 128, 256"),
        ("vllm-0.33.0", "sm90", "TORCH_SDPA", ("features", "softcap"), "unknown", "without a check"),
        # an engine's start would replace this KV dtype: the backend still does not accept it
        ("vllm-0.33.0", "sm90", "FLEX_ATTENTION", ("kv_dtype", "nvfp4"), "refused", "accepts"),
    ],
)
def test_cell_of_the_grid(
    gen_docs: ModuleType, registry: str, arch: str, backend: str, column: tuple[str, Any], state: str, line: str
) -> None:
    grid, site = gen_docs.docs_site.grid, gen_docs.docs_site.Site(ROOT)
    data = site.registries[registry]
    rows = {row.name: cells for row, cells in grid.rows(site, registry, data.vocabulary.architectures[arch])}
    place = [(c.facet, c.value) for c in grid.columns(data)].index(column)
    cell = rows[backend][place]
    assert cell.state == state
    assert any(line in text for text, _ in cell.said), cell.said


def test_models_of_an_architecture_stand_by_their_answers_and_the_steps_that_set_them(gen_docs: ModuleType) -> None:
    gets, site = gen_docs.docs_site.gets, gen_docs.docs_site.Site(ROOT)
    groups = gets.on_architecture(site, "sglang-0.5.23", "sm90")
    by = {model.name: group for group in groups for model in group.models if group.answer.name}
    # one backend, by two steps
    assert {by[name].answer.title for name in ("gpt-oss-120b", "Qwen3-8B")} == {"fa3"}
    assert by["gpt-oss-120b"].answer.by.name == "_gpt_oss_overrides"
    assert by["Qwen3-8B"].answer.by.name == "_attention_backend_default"
    assert by["DeepSeek-V3.2-Exp"].answer.title == "dsa"
    # a model with several answers says for which layers each is; answers stand before reasons why there is none
    layers = [(m.layers, g.answer.title) for g in groups for m in g.models if m.name == "gemma-3-27b-it"]
    assert layers == [("52 layers, 10 layers", "fa3"), ("27 layers", "not known")]
    assert [bool(g.answer.name) for g in groups] == sorted((bool(g.answer.name) for g in groups), reverse=True)
    # orders choose without a step
    assert {g.answer.by for g in gets.on_architecture(site, "default", "sm90")} == {None}


def test_models_that_get_a_backend_are_those_of_the_architectures(gen_docs: ModuleType) -> None:
    gets, site = gen_docs.docs_site.gets, gen_docs.docs_site.Site(ROOT)
    for name, row, archs in (("sglang-0.5.23", "triton", 18), ("vllm-0.33.0", "TRITON_ATTN", 5)):
        found = gets.getting(site, name, row)
        assert sum(len(it.archs) for it in found) == archs
        for it in found:
            for arch in it.archs:
                groups = gets.on_architecture(site, name, arch.name)
                got = {m.name for g in groups if g.answer.name == row for m in g.models}
                assert {m.name for m in it.models} == got
    assert gets.getting(site, "sglang-0.5.23", "fa4") == []


def test_a_run_in_the_place_of_another_device_proves_nothing_there(gen_docs: ModuleType) -> None:
    site = gen_docs.docs_site.Site(ROOT)
    archs = site.registries["default"].vocabulary.architectures
    proofs = gen_docs.docs_site.measured.proofs()["ROCM_ATTN"]
    assert any(proof.record.arch == "gfx942" for proof in proofs)
    # the record of an earlier kernel counts nowhere
    today = any(not proof.earlier for proof in proofs)
    assert all(proof.record.stands_in for proof in proofs)
    proven = gen_docs.docs_site.architectures._proven
    assert proven(archs["gfx942"], stands_in=False) == {}
    assert set(proven(archs["gfx942"], stands_in=True)) == ({"ROCM_ATTN"} if today else set())
    assert "proof" not in gen_docs.docs_site.grid.table(site, "default", archs["gfx942"])
    assert "proof" in gen_docs.docs_site.grid.table(site, "default", archs["sm90"])
