"""Every combination of flags, architectures and requests on AMD GPUs against a table that a person can read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from attnreg import AttentionRequest, Platform, Registry, load_registry
from attnreg.compile.source.yaml_source import Document
from attnreg.selection.selector import evaluate

# read as the registry is: `on` is a word there
TABLE: dict[str, Any] = Document.load(Path(__file__).parent / "rocm_flags.yaml").data
MHA: dict[str, Any] = {"head_size": 128, "num_heads": 32, "num_kv_heads": 8, "block_size": 16}
MLA: dict[str, Any] = {
    "head_size": 576,
    "num_heads": 16,
    "num_kv_heads": 1,
    "block_size": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


@dataclass(frozen=True)
class Setting:
    """One GPU: its architecture, whether aiter is installed, and the flags that are on."""

    arch: str
    installed: bool
    flags: frozenset[str]

    def __str__(self) -> str:
        return " ".join([self.arch, *(f"+{f}" for f in sorted(self.flags)), *([] if self.installed else ["-aiter"])])


@cache
def registry() -> Registry:
    return load_registry("default")


def flags() -> list[str]:
    """What a user of an AMD GPU can switch on."""
    return sorted(n for n, f in registry().vocabulary.flags.items() if "rocm" in f.facts.get("platforms", ["rocm"]))


def architectures() -> list[str]:
    return [a.name for a in registry().vocabulary.architectures.values() if a.platform == "rocm"]


def settings() -> Iterator[Setting]:
    """All of them: 2^n sets of flags on every architecture, with and without the package."""
    for arch, installed, switches in product(
        architectures(), (True, False), product((True, False), repeat=len(flags()))
    ):
        yield Setting(arch, installed, frozenset(f for f, on in zip(flags(), switches, strict=True) if on))


def platform(setting: Setting) -> Platform:
    packages = [p for p in registry().vocabulary.packages if setting.installed or p != "aiter"]
    return Platform(platform="rocm", arch=setting.arch, flags=setting.flags, packages=packages)


def request(name: str) -> AttentionRequest:
    change = TABLE["requests"][name]
    usual = MLA if change.get("attention", "mha") != "mha" else MHA
    return AttentionRequest(**{**usual, **change, "features": frozenset(change.get("features", ()))})


def several(given: Any) -> list[str]:
    return given if isinstance(given, list) else [given]


def fits(rule: dict[str, Any], name: str, setting: Setting) -> bool:
    groups = TABLE["architectures"]
    archs = [a for word in several(rule.get("arch", [])) for a in groups.get(word, [word])]
    return (
        any(fnmatchcase(name, pattern) for pattern in several(rule.get("request", "*")))
        and (not archs or setting.arch in archs)
        and ("on" not in rule or (setting.installed and setting.flags >= set(rule["on"])))
    )


def test_every_combination_gets_what_the_table_says() -> None:
    wrong, used, tried = list[str](), Counter[int](), 0
    for name, setting in product(TABLE["requests"], settings()):
        tried += 1
        number = next((i for i, rule in enumerate(TABLE["rules"]) if fits(rule, name, setting)), None)
        assert number is not None, f"no rule for {name} on {setting}"
        used[number] += 1
        selected = evaluate(request(name), platform(setting), registry()).backend
        found = selected.name if selected else None
        rule = TABLE["rules"][number]
        if found != rule["backend"]:
            wrong.append(f"{name} on {setting}: {found}; the table says {rule['backend']}: {rule['because']}")
    assert wrong == []
    # every rule speaks, so that none is there for nothing
    assert [rule for i, rule in enumerate(TABLE["rules"]) if not used[i]] == []
    assert tried == len(TABLE["requests"]) * len(architectures()) * 2 * 2 ** len(flags())


def test_the_table_is_in_the_registrys_words() -> None:
    known = set(architectures())
    for rule in TABLE["rules"]:
        assert rule.keys() <= {"request", "arch", "on", "backend", "because"}
        assert rule["because"]
        assert set(rule.get("on", ())) <= set(flags())
        assert rule["backend"] is None or rule["backend"] in registry().backends
        for word in several(rule.get("arch", [])):
            assert word in TABLE["architectures"] or word in known
        for pattern in several(rule.get("request", "*")):
            assert any(fnmatchcase(name, pattern) for name in TABLE["requests"]), pattern
    assert {a for group in TABLE["architectures"].values() for a in group} <= known
    used = {word for rule in TABLE["rules"] for word in several(rule.get("arch", []))}
    assert TABLE["architectures"].keys() <= used


# row of aiter: a request that it serves, the architectures that it is built for, the flags that it needs
AITER = {
    "ROCM_AITER_FA": ("plain", "CDNA 3 to 5", {"aiter", "aiter_mha"}),
    "ROCM_AITER_FA_PREFILL": ("MLA prefill", "CDNA 3 and 4", {"aiter", "aiter_mla"}),
    "ROCM_AITER_MLA": ("MLA", "CDNA 3 to 5", {"aiter", "aiter_mla"}),
    "ROCM_AITER_MLA_SPARSE": ("sparse MLA", "CDNA 3 to 5", {"aiter", "aiter_mla"}),
    "ROCM_AITER_UNIFIED_ATTN": ("plain", ("CDNA 3 to 5", "RDNA 4"), {"aiter"}),
}


@pytest.mark.parametrize("row", AITER)
def test_installed_switched_on_and_supported_are_three_facts(row: str) -> None:
    """Asked for by name, a row is refused for each fact that is missing, and for nothing else."""
    name, groups, needed = AITER[row]
    supported = {a for g in ([groups] if isinstance(groups, str) else groups) for a in TABLE["architectures"][g]}
    for setting in settings():
        expected = Counter({f"flag {flag} is off": 1 for flag in needed - setting.flags})
        expected["package aiter is not installed"] = int(not setting.installed)
        expected["arch"] = int(setting.arch not in supported)
        reasons = evaluate(request(name), platform(setting), registry(), row).candidates[0].reasons
        found = Counter("arch" if r.text.startswith(f"arch is {setting.arch}; needs ") else r.text for r in reasons)
        assert found == +expected, setting


def test_every_row_of_aiter_is_among_them() -> None:
    wants = {
        row.name
        for row in registry().backends.values()
        for clause in row.variants[0].requires.clauses
        if clause.facet == "packages" and any(r.package == "aiter" for r in clause.matcher.mentions)
    }
    assert wants == AITER.keys()
