"""Facets that a registry reads from a config: absent fields, null fields, and the defaults of a class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import attnreg
from attnreg import Platform
from attnreg.language.vocabulary import Facet, Location
from attnreg.models.fields import facets_of
from attnreg.models.questions import ModelOptions
from attnreg.planning.ask import planned, run_of

WHERE = Location("vocabulary.yaml", 1, 1)
MPT = {"model_type": "mpt", "architectures": ["MPTForCausalLM"], "d_model": 512, "n_heads": 8, "n_layers": 2}
GEMMA = {"model_type": "gemma", "hidden_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 2}
GPTJ = {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 2}
DTYPE = {"torch_dtype": "bfloat16"}


def read(config: dict[str, Any], *config_fields: str, defaults: dict[str, Any] | None = None, **like: Any) -> Any:
    facet = Facet(
        "tied", "request", "boolean", "Tied.", WHERE, (True, False), config=config_fields, like=(*like.items(),)
    )
    return facets_of(config, [facet], (), {}, defaults=defaults).get("tied")


@pytest.mark.parametrize(
    ("config", "like", "expected"),
    [
        ({}, {}, None),
        ({"tied": None}, {}, None),
        ({"tied": None}, {"null": False}, False),
        # other values are read as without the pattern
        ({"tied": True}, {"null": False}, True),
        ({"tied": 0}, {"null": True}, False),
        ({}, {"null": False}, None),
        ({}, {"null": False, "": True}, True),
        ({"tied": None}, {"null": False, "*": True}, False),
        # the word null is no null
        ({"tied": "null"}, {"null": False, "*": True}, True),
        # the first field counts if null has a meaning, else the first with a value
        ({"tied": None, "other": True}, {"null": False}, False),
        ({"tied": None, "other": True}, {}, True),
    ],
)
def test_null_is_what_the_facet_says(config: dict[str, Any], like: dict[str, Any], expected: Any) -> None:
    assert read(config, "tied", "other", **like) is expected


def test_a_null_section_has_no_fields() -> None:
    assert read({"part": None}, "part.tied", null=False) is None
    assert read({"part": {"tied": None}}, "part.tied", null=False) is False


@pytest.mark.parametrize("prefix", ["", "run."])
def test_an_absent_field_has_the_default_of_the_class(prefix: str) -> None:
    assert read({}, f"{prefix}tied", defaults={"tied": True}) is True
    assert read({"tied": False}, f"{prefix}tied", defaults={"tied": True}) is False
    # null is a value of its own
    assert read({"tied": None}, f"{prefix}tied", null=False, defaults={"tied": True}) is False


def plan_of(config: dict[str, Any], directory: Path, release: str, arch: str, **named: str) -> Any:
    (directory / "config.json").write_text(json.dumps(config | DTYPE))
    registry = attnreg.load_registry(release, plugins=())
    run = run_of(str(directory), ModelOptions(), registry, Platform(platform="cuda", arch=arch), **named)
    return planned(run)


@pytest.mark.parametrize("release", ["vllm-0.20.0", "vllm-0.25.0", "vllm-0.28.0"])
@pytest.mark.parametrize(
    ("changes", "starts"),
    [
        ({}, True),
        ({"attn_config": None}, True),
        ({"attn_config": {"prefix_lm": None}}, True),
        ({"attn_config": {"alibi": None}}, False),
        ({"norm_type": None}, False),
        ({"embedding_fraction": None}, False),
        ({"tie_word_embeddings": None}, False),
    ],
)
def test_what_mpt_asserts_of_null(changes: dict[str, Any], starts: bool, release: str, tmp_path: Path) -> None:
    assert plan_of(MPT | changes, tmp_path, release, "sm90").starts is starts


@pytest.mark.parametrize("config", [GEMMA | {"head_dim": 256}, GEMMA, GPTJ], ids=["stated", "default", "quotient"])
def test_the_page_for_heads_of_256_follows_a_width_that_the_file_leaves_out(
    config: dict[str, Any], tmp_path: Path
) -> None:
    plan = plan_of(config, tmp_path, "vllm-0.33.0", "sm100", backend="FLASH_ATTN")
    assert plan.page.tokens == 128


def test_diffusion_gemma_decodes_by_diffusion_unless_its_canvas_is_null() -> None:
    [facet] = [f for f in attnreg.load_registry("vllm-0.33.0").vocabulary.facets.values() if f.name == "is_diffusion"]
    for config, expected in (({}, True), ({"canvas_length": 64}, True), ({"canvas_length": None}, False)):
        assert facets_of({"model_type": "diffusion_gemma"} | config, [facet], (), {})["is_diffusion"] is expected
    assert facets_of({"model_type": "gemma2"}, [facet], (), {}) == {}
