"""What `attnreg show` says of orders, features, architectures and start-up steps."""

from __future__ import annotations

import json
import re

import pytest
from support.registries import tiny
from support.registries.tiny import row

import attnreg
from attnreg.explain.entries import entries_named, entry_names


def shown(registry: attnreg.Registry, name: str) -> dict[str, list[str]]:
    """Heading -> the texts of the only entry with a name."""
    (entry,) = entries_named(registry, name)
    texts: dict[str, list[str]] = {}
    for heading, text, _ in entry.details:
        texts.setdefault(heading, []).append(text)
    return texts


def test_an_order_has_its_condition_its_entries_and_its_reason() -> None:
    orders = [
        {"name": "few", "when": {"head_size": 64}, "order": ["B", "A"], "because": "B is made for it"},
        {"name": "all", "order": ["A"]},
    ]
    registry = tiny.load({"A": row(), "B": row()}, {"gpu": orders})
    assert shown(registry, "gpu/few") == {
        "applies when": ["head_size 64"],
        "because": ["B is made for it"],
        "1": ["B"],
        "2": ["A"],
    }
    assert entries_named(registry, "few") == entries_named(registry, "gpu/few")
    assert [entry.name for entry in entries_named(registry, "all")] == ["gpu/all"]


def test_a_feature_has_the_backends_that_support_emulate_and_refuse_it(default: attnreg.Registry) -> None:
    found = shown(default, "sinks")
    for row_ in default.backends.values():
        for variant in row_.variants:
            title = f"{row_.name}/{variant.name}" if variant.name else row_.name
            assert (title in found["supported by"]) is ("sinks" in variant.features)
            assert (title in found["emulated by"]) is ("sinks" in variant.emulated)
    refusing = set(found["refused by"][0].split(", "))
    assert refusing == {
        name for name, r in default.backends.items() if not any("sinks" in v.served for v in r.variants)
    }


def test_a_product_names_its_architecture_with_what_may_run_there(default: attnreg.Registry) -> None:
    (entry,) = entries_named(default, "L40S")
    assert (entry.kind, entry.name) == ("architecture", "sm89")
    assert entry.summary.startswith("L40S is sm89: ")
    data = entry.to_dict()
    assert "TRITON_ATTN" in data["backends"]
    assert not [name for name in data["backends"] if name.startswith(("HOPPER_", "CUTLASS_MLA", "ROCM_"))]
    assert "cuda/mha" in data["orders"]
    assert "cuda/hopper-sinks" not in data["orders"]


def test_a_step_is_found_by_its_title_and_by_the_engines_function() -> None:
    registry = attnreg.load_registry("vllm-0.33.0")
    step = registry.steps[0]
    title = step.title or step.name
    assert next(entry.name for entry in entries_named(registry, title)) == title
    of_function = [s.title or s.name for s in registry.steps if s.name == step.name]
    if not any(s.title == step.name for s in registry.steps):
        assert {e.name for e in entries_named(registry, step.name)} >= set(of_function)


@pytest.mark.parametrize("name", ["default", "vllm-0.33.0", "sglang-0.5.23"])
def test_every_name_that_is_completed_is_shown(name: str) -> None:
    registry = attnreg.load_registry(name)
    for known, description in entry_names(registry):
        assert entries_named(registry, known), known
        assert description
        assert all(json.dumps(entry.to_dict()) for entry in entries_named(registry, known))
        # no object of Python's is printed
        texts = [text for entry in entries_named(registry, known) for _, text, _ in entry.details]
        assert not [text for text in texts if re.search(r"frozenset|\w+\(\w+=", text)]
