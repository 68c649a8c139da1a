"""The page and the states of hybrid models, held against what vLLM's own code recorded (tests/data/vllm)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.models.recorded_starts import NEWEST, Row, recorded, registry

import attnreg
from attnreg.explain import explain
from attnreg.explain.block_size import BlockSize
from attnreg.language.engine.pages import StateRules
from attnreg.models.questions import MTP, ModelOptions, model_questions

PART = "hybrids-"
RELEASES = (NEWEST, "0.30.0", "0.26.0")
# vLLM reads a field that the class of transformers overwrites, so its answer depends on whose class reads the config
NOT_KNOWN = {NEWEST: {"ring-2.5", "ling-3"}, "0.30.0": set(), "0.26.0": {"granite-4.0-micro"}}
# attnreg describes no MTP layers of these
WITHOUT_MTP = {"nemotron-3-super-mtp"}
GIVEN = {"dtype": "dtype", "kv_cache_dtype": "kv_dtype", "block_size": "block_size"}
FACETS = {"enable_prefix_caching": "prefix_caching", "cuda_major": "cuda_major"}


def rows(release: str = NEWEST) -> list[Row]:
    """The rows for which vLLM settled a size."""
    return [row for row in recorded(release, PART)[1] if "block_size" in row["out"]]


def said(asked: Row, directory: Path, of: attnreg.Registry, release: str = NEWEST) -> tuple[BlockSize, Any]:
    """What `explain` says of a row: the page, and the KV memory."""
    folder = directory / asked["model"]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(recorded(release, PART)[0][asked["model"]]))
    arch = of.vocabulary.architectures[asked["arch"]]
    extra = {ours: asked[theirs] for theirs, ours in FACETS.items() if theirs in asked}
    # the recorder's PyTorch is built for no CUDA
    extra |= {"cuda_major": 0} if arch.platform == "cuda" and "cuda_major" not in asked else {}
    drafting = asked.get("speculative_config")
    extra |= {"speculative_tokens": drafting["num_speculative_tokens"]} if drafting else {}
    options = ModelOptions(
        given={ours: asked[theirs] for theirs, ours in GIVEN.items() if theirs in asked},
        extra=tuple(extra.items()),
        ranks=asked.get("tensor_parallel_size", 1),
        draft=MTP if drafting and asked["model"] not in WITHOUT_MTP else None,
    )
    model = model_questions(str(folder), options, of)
    flags = {"aiter", "aiter_mha", "aiter_mla"} if asked.get("aiter") == "on" else set()
    platform = attnreg.Platform(platform=arch.platform, arch=asked["arch"], flags=flags)
    answer = explain(model.questions, [platform], of, backend=asked.get("attention_backend"), memory=model.memory)
    (page,) = answer.pages
    return page, answer.memory[0]


def states_of(page: BlockSize) -> list[dict[str, Any]]:
    """The states that a page holds, in the form of a recorded row."""
    return [
        {
            "shapes": [list(part.shape) for part in each.parts],
            "dtypes": [part.dtype for part in each.parts],
            "page_bytes": page.states.page_bytes,
            "pages": each.held,
            "layers": each.layers,
        }
        for each in (page.states.layers if page.states else ())
    ]


@pytest.mark.slow(reason="the recorded starts of a release")
@pytest.mark.parametrize("release", RELEASES)
def test_the_page_and_the_states_are_vllms_or_are_said_not_to_be_known(release: str, tmp_path: Path) -> None:
    exact, unknown = 0, set()
    for row in rows(release):
        page, memory = said(row["in"], tmp_path, registry(release), release)
        if page.tokens is None:
            unknown.add(row["in"]["model"])
            continue
        assert page.tokens == row["out"]["block_size"], row["in"]
        theirs = [{k: v for k, v in kind.items() if k != "kind"} for kind in row["out"]["states"]["kinds"]]
        ours = states_of(page)
        # with prefix caching 0.26 keeps a state of Mamba's layers for each chunk of a request
        for mine, other in zip(ours, theirs, strict=True):
            assert mine | ({"pages": other["pages"]} if mine["pages"] is None else {}) == other, row["in"]
        if all(mine["pages"] is not None for mine in ours):
            total = sum(kind["page_bytes"] * kind["pages"] * kind["layers"] for kind in theirs)
            assert sum(g.state_bytes or 0 for g in memory.models[0].groups) == total, row["in"]
        exact += 1
    assert unknown == NOT_KNOWN[release]
    assert exact > (300 if release == NEWEST else 15)


def test_the_rows_show_what_there_is_to_show() -> None:
    asked = [row["in"] for row in rows()]
    assert {row["arch"] for row in asked} == {"sm90", "sm100", "sm120", "gfx942"}
    assert {row.get("tensor_parallel_size", 1) for row in asked} == {1, 2, 4, 8}
    assert {row.get("kv_cache_dtype") for row in asked} > {None, "fp8"}
    kinds = {kind["kind"] for row in rows() for kind in row["out"]["states"]["kinds"]}
    assert len(kinds) >= 7
    assert {row["out"]["states"]["mode"] for row in rows()} == {"align", "none"}
    assert len({row["model"] for row in asked}) > 15
    drafting = [row["speculative_config"] for row in asked if "speculative_config" in row]
    assert {config["num_speculative_tokens"] for config in drafting} == {1, 3}


def other(**changes: Any) -> Callable[[StateRules], StateRules]:
    return lambda rules: dataclasses.replace(rules, **changes)


def without(number: int) -> Callable[[StateRules], StateRules]:
    return lambda rules: dataclasses.replace(
        rules, multiples=tuple(m for i, m in enumerate(rules.multiples) if i != number)
    )


ALTERED: dict[str, tuple[str, Callable[[StateRules], StateRules]]] = {
    "no convolution keeps a draft's tokens": (NEWEST, other(widened=frozenset())),
    "every model's dtype is the config's": (NEWEST, lambda rules: dataclasses.replace(rules, config_dtype=never())),
    "blocks of MLA are like others": (NEWEST, without(0)),
    "Hopper's kernel keeps no states inside prompts": (NEWEST, without(1)),
    "nor does Blackwell's": (NEWEST, without(2)),
    "0.26 has no chunks": ("0.26.0", other(multiples=())),
}


def never() -> Any:
    """The condition under which Hopper's kernel counts, which holds for no model on other GPUs."""
    states = registry(NEWEST).page
    assert states is not None
    assert states.states is not None
    return states.states.unknown[-1].of.when


@pytest.mark.slow(reason="the recorded starts again for each rule")
@pytest.mark.parametrize(("release", "change"), ALTERED.values(), ids=ALTERED)
def test_each_rule_decides_some_row(release: str, change: Callable[[StateRules], StateRules], tmp_path: Path) -> None:
    whole = registry(release)
    assert whole.page is not None
    assert whole.page.states is not None
    altered = dataclasses.replace(whole, page=dataclasses.replace(whole.page, states=change(whole.page.states)))
    assert any(
        said(row["in"], tmp_path, altered, release)[0].tokens not in (None, row["out"]["block_size"])
        for row in rows(release)
    )


def test_the_published_checkpoint_of_qwen_with_an_fp8_cache() -> None:
    """Of this model on SM 12.0 vLLM settles 800 tokens, 816 with its MTP draft; for CUDA 13 both are 832."""
    plain = [(row["in"], row["out"]) for row in rows() if "kv_cache_dtype" not in row["in"]]
    found = {
        (asked["cuda_major"], "speculative_config" in asked): out["block_size"]
        for asked, out in plain
        if (asked["model"], asked["arch"]) == ("qwen3.6-27b-nvfp4", "sm120")
    }
    assert found == {(12, False): 800, (12, True): 816, (13, False): 832, (13, True): 832}
