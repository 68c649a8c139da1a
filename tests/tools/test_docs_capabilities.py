"""The tables of capabilities: a cell that a rule narrows has the number of the rule's note."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from support import ROOT
from support.pages.markdown import tables
from support.registries import tiny
from support.registries.tiny import row

from attnreg import Registry, load_registry


@pytest.fixture
def capabilities(gen_docs: ModuleType) -> ModuleType:
    """tools/docs/capabilities.py, which the generator has imported."""
    assert gen_docs
    return sys.modules["docs.capabilities"]


def test_a_cell_that_a_rule_narrows_has_the_number_of_its_note(capabilities: ModuleType) -> None:
    rules = [
        {"when": {"head_size": 64, "kv_dtype": "fp8"}, "reject": "not both"},
        {"when": {"head_size": 32}, "reject": "not it"},
    ]
    registry = tiny.load({"A": row(rules=rules, notes=["as measured"]), "B": row(capabilities={"dtypes": ["float16"]})})
    (family,) = capabilities.families(registry)
    (header, (first, second)), *_ = tables(family.values())
    cells = dict(zip(header, first, strict=True))
    assert (cells["[head_sizes]"], cells["[kv_dtypes]"], cells["[dtypes]"]) == ("any (1, 2)", "any (1)", "any")
    assert set(dict(zip(header, second, strict=True)).values()) >= {"any", "float16"}
    # `any value` is said of no claim that a rule narrows
    assert {"head_sizes", "kv_dtypes"} & set(family.unconstrained) == set()
    assert [note.partition(" · ")[0] for note in family.notes] == ["not both", "not it", "as measured"]


@pytest.mark.parametrize("name", ["default", "vllm-0.20.0", "vllm-0.33.0"])
def test_every_narrowed_cell_is_marked(capabilities: ModuleType, default: Registry, name: str) -> None:
    registry = default if name == "default" else load_registry(name)
    for family in capabilities.families(registry):
        (header, rows), *_ = tables(family.values())
        for (_, variant), cells in zip(family.rows, rows, strict=True):
            narrowed = {facet for rule in variant.rules for facet in rule.when.facets}
            for key, facet in registry.vocabulary.claims.items():
                if key not in family.unconstrained:
                    assert cells[header.index(f"[{key}]")].endswith(")") >= (facet.name in narrowed), (variant, key)


def test_the_page_says_what_the_number_means() -> None:
    page = (ROOT / "docs/attention_backends.md").read_text(encoding="utf-8")
    assert "A number in brackets behind values is that of a note: a rule, which refuses some of them." in page
