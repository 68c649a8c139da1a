"""Which model families change between two registries, in what, and through which file."""

from __future__ import annotations

from support.registries.small_families import GENERAL, SOURCES, UNKNOWN

from attnreg.analysis.model_changes import FamilyChange, ModelChanges, model_changes


def family(name: str, said: str) -> str:
    return f"model_type: {name}\n{said}\nsource: here:f.py#N\n"


BEFORE = {
    "_general": GENERAL,
    "_unknown": UNKNOWN,
    "_sources": SOURCES,
    "a": family("a", "window: span"),
    "b": family("b", "like: a\nsinks: true"),
    "c": family("c", "like: b\nwindow: own"),
    "whole": family("whole", "parts: [{at: inner, like: b}]"),
}


def test_nothing_changes_but_the_style() -> None:
    assert model_changes(BEFORE, dict(BEFORE)) == ModelChanges()
    styled = BEFORE | {"a": '# what it is\n{"model_type": "a", "window": "span", "source": "here:f.py#N"}'}
    assert model_changes(BEFORE, styled) == ModelChanges()


def test_an_edit_is_told_with_the_families_that_inherit_it() -> None:
    changes = model_changes(BEFORE, BEFORE | {"a": family("a", "window: width\nsoftcap: 30")})
    assert changes.changes == (
        FamilyChange("a", ("softcap",), ("c",), ()),
        FamilyChange("a", ("softcap", "window"), ("a", "b"), ("whole",)),
    )
    assert changes.lines() == [
        "a: softcap; 1 like it: c",
        "a: softcap, window; and 1 like it: b; a part of whole",
    ]


def test_another_parent_is_told_by_the_file_that_speaks_now() -> None:
    changes = model_changes(BEFORE, BEFORE | {"b": family("b", "sinks: true")})
    assert changes.changes == (FamilyChange("_general", ("window",), ("b",), ("whole",)),)


def test_families_that_only_one_has() -> None:
    after = {name: text for name, text in BEFORE.items() if name != "c"} | {"d": family("d", "like: a")}
    changes = model_changes(BEFORE, after)
    assert changes.to_dict() == {"only_before": ["c"], "only_after": ["d"], "changes": []}
    assert changes.lines() == ["only before: c", "only after: d"]
