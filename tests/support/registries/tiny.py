"""Registries so small that a test can try every configuration: written by hand, or random."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import yaml
from hypothesis import reject
from hypothesis import strategies as st

import attnreg
from attnreg import AttentionRequest, Platform

VOCABULARY: dict[str, Any] = {
    "facets": {
        "platform": {"of": "platform", "kind": "word", "words": "platforms", "legend": "l"},
        "arch": {"of": "platform", "kind": "arch", "legend": "l"},
        "flags": {"of": "platform", "kind": "words", "words": "flags", "legend": "l"},
        "packages": {"of": "platform", "kind": "packages", "legend": "l"},
        "attention": {"of": "request", "kind": "word", "words": "attention", "legend": "l"},
        "phase": {"of": "request", "kind": "word", "words": "phases", "legend": "l"},
        "role": {"of": "request", "kind": "word", "words": "roles", "legend": "l"},
        "attn_type": {"of": "request", "kind": "word", "words": "attn_types", "legend": "l"},
        "dtype": {"of": "request", "kind": "word", "words": "dtypes", "claim": "dtypes", "legend": "l"},
        "kv_dtype": {"of": "request", "kind": "word", "words": "kv_dtypes", "claim": "kv_dtypes", "legend": "l"},
        "head_size": {"of": "request", "kind": "integer", "claim": "head_sizes", "legend": "l"},
        "head_size_v": {"of": "request", "kind": "integer", "claim": "head_sizes_v", "legend": "l"},
        "block_size": {"of": "request", "kind": "integer", "claim": "block_sizes", "legend": "l"},
        "num_heads": {"of": "request", "kind": "integer", "claim": "num_heads", "legend": "l"},
        "num_kv_heads": {"of": "request", "kind": "integer", "claim": "num_kv_heads", "legend": "l"},
        **{
            name: {"of": "request", "kind": "integer", "legend": "l"}
            for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_topk")
        },
        "model": {"of": "request", "kind": "text", "legend": "l"},
        "features": {"of": "request", "kind": "words", "words": "features", "legend": "l"},
        # beyond the usual ones
        "eager": {"of": "request", "kind": "boolean", "legend": "l"},
        "ranks": {"of": "request", "kind": "integer", "legend": "l"},
        "sibling": {"of": "request", "kind": "arch", "legend": "l"},
    },
    "features": {"sinks": "l", "alibi": "l"},
    "words": {
        "platforms": {"gpu": "l", "npu": "l"},
        "attention": {"mha": "l"},
        "phases": {"any": "l"},
        "roles": {"target": "l", "draft": "l"},
        "attn_types": {"decoder": "l"},
        "dtypes": {"float16": "l", "bfloat16": "l"},
        "kv_dtypes": {"auto": "l", "fp8": "l"},
    },
    "flags": {"fast": {"legend": "l"}},
    "packages": {"lib": {"legend": "l"}},
    "architectures": {"gpu": {"g1": {"family": "f"}, "g2": {"family": "f"}}, "npu": {"n1": {"family": "f"}}},
    "derived": {
        "quantized": {"legend": "l", "cases": [{"when": {"kv_dtype": [None, "auto"]}, "value": False}, {"value": True}]}
    },
}

# the words of a registry that distinguishes a request by name from one by an order
ASKED: dict[str, Any] = {
    "facets": {
        **VOCABULARY["facets"],
        "asked": {"of": "selection", "kind": "word", "words": "asked", "legend": "l"},
    },
    "words": {**VOCABULARY["words"], "asked": {"automatic": "l", "by_name": "l"}},
    "derived": {
        **VOCABULARY["derived"],
        "strict": {"legend": "l", "cases": [{"when": {"asked": "by_name", "kv_dtype": "fp8"}, "value": True}]},
    },
}


# the claims that every row must state
CLAIMS = tuple(facet["claim"] for facet in VOCABULARY["facets"].values() if "claim" in facet)
# the same facets, as a file's `unchecked` names them
UNCHECKED = tuple(name for name, facet in VOCABULARY["facets"].items() if "claim" in facet)


def row(**changes: Any) -> dict[str, Any]:
    """A row for a gpu that accepts everything but features; a claim that is left out is `any`."""
    capabilities = {**dict.fromkeys(CLAIMS, "any"), **changes.pop("capabilities", {})}
    identity = {"summary": "s", "platforms": ["gpu"], "attention": "mha", "source": "s:p#q"}
    return {**identity, "capabilities": capabilities, **changes}


def load(
    backends: Mapping[str, Any],
    priorities: Mapping[str, Any] | None = None,
    *,
    invariants: Iterable[Mapping[str, Any]] = (),
    known: Iterable[Mapping[str, Any]] = (),
    overlays: Iterable[Mapping[str, Any]] = (),
    waivers: Iterable[Mapping[str, Any]] = (),
    fallbacks: Iterable[Mapping[str, Any]] = (),
    vocabulary: Mapping[str, Any] | None = None,
    trust: Iterable[str] = (),
) -> attnreg.Registry:
    """A registry of these rows. Without priorities, one order has all of them, sorted by name."""
    sources = {"s": {"url": "u", "version": "1"}}
    files = {
        "vocabulary": {**VOCABULARY, **(vocabulary or {})},
        "backends": {
            "sources": sources,
            "waivers": list(waivers),
            "fallbacks": list(fallbacks),
            "backends": dict(backends),
        },
        "priorities": priorities or {"gpu": [{"name": "all", "order": sorted(backends)}]},
        "invariants": {"invariants": list(invariants), "known": list(known)},
    }
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory, "tiny")
        place.mkdir()
        for name, data in files.items():
            (place / f"{name}.yaml").write_text(yaml.safe_dump(data, sort_keys=False, width=1000))
        return attnreg.load_registry(place, list(overlays), trust=trust)


integers = st.integers(1, 9)
stated = st.one_of(
    integers,
    st.lists(integers | st.none(), min_size=1, max_size=2),
    st.builds(lambda low, more: {"min": low, "max": low + more}, integers, st.integers(0, 3)),
    st.builds(lambda low: {"min": low}, integers),
    st.builds(lambda high: {"below": high + 1}, integers),
    st.builds(lambda n: {"multiple_of": n}, st.integers(2, 4)),
    st.builds(lambda n: {"not": n}, integers | st.none()),
)
integer_matchers = stated | st.none()
simple_conditions = st.one_of(
    st.builds(lambda m: {"head_size": m}, stated),
    st.builds(lambda m: {"head_size_v": m}, integer_matchers),
    st.builds(lambda m: {"block_size": m}, integer_matchers),
    st.builds(lambda m: {"num_heads": m}, integer_matchers),
    st.builds(lambda m: {"num_kv_heads": m}, integer_matchers),
    st.builds(lambda m: {"ranks": m}, integer_matchers),
    st.sampled_from([{"arch": "g1"}, {"arch": {"min": "g2"}}, {"arch": "g*"}, {"platform": "gpu"}, {"role": "draft"}]),
    st.sampled_from(
        [{"kv_dtype": "fp8"}, {"kv_dtype": None}, {"kv_dtype": [None, "auto"]}, {"dtype": {"not": "float16"}}]
    ),
    st.sampled_from([{"quantized": True}, {"quantized": False}, {"eager": True}, {"eager": None}]),
    st.sampled_from([{"features": ["sinks"]}, {"features": {"only": ["alibi"]}}, {"without": ["sinks", "fast"]}]),
    st.sampled_from([{"features": {"any": ["alibi", "sinks"]}}, {"flags": {"any": ["fast"]}}]),
    st.sampled_from(
        [
            {"sibling": {"min": "g2"}},
            {"flags": ["fast"]},
            {"packages": ["lib"]},
            {"packages": ["lib>=2"]},
            {"packages": ["lib<3"]},
        ]
    ),
    st.sampled_from([{"model": "gpt"}, {"model": ["got", "bart"]}, {"model": None}, {"model": {"not": [None, "gpt"]}}]),
)
pairs = st.lists(simple_conditions, min_size=1, max_size=2).map(lambda cs: {k: v for c in cs for k, v in c.items()})
conditions = st.one_of(
    pairs,
    st.builds(lambda a, b: {"any": [a, b]}, pairs, simple_conditions),
    st.builds(lambda a, b: {**a, "not": b}, simple_conditions, pairs),
)
claims = st.fixed_dictionaries(
    {},
    optional={
        "head_sizes": stated,
        "head_sizes_v": stated | st.just("same") | st.builds(lambda n: ["same", n], integers),
        "block_sizes": stated,
        "num_heads": stated,
        "num_kv_heads": stated,
        "dtypes": st.just("float16"),
        "kv_dtypes": st.sampled_from(["auto", "fp8", ["auto", "fp8"]]),
        "features": st.sampled_from([["sinks"], ["alibi"], ["alibi", "sinks"]]),
    },
)
rules = st.lists(conditions.map(lambda when: {"when": when, "reject": "r"}), max_size=2)
emulated = st.sampled_from([{}, {}, {"sinks": "slow"}, {"alibi": "slow"}])


def _consistent(data: dict[str, Any]) -> dict[str, Any]:
    """A row whose emulated features are not native as well."""
    native = [f for f in data["capabilities"].get("features", ()) if f not in data["emulated"]]
    return {**data, "capabilities": {**data["capabilities"], "features": native}}


variants = st.lists(
    st.fixed_dictionaries({"capabilities": claims, "emulated": emulated, "rules": rules, "when": conditions}).map(
        _consistent
    ),
    max_size=2,
).map(lambda vs: [{**v, "name": f"V{i}"} for i, v in enumerate(vs)])
rows = st.builds(
    lambda data, requires, vs, status: row(**_consistent(data), requires=requires, variants=vs, status=status),
    st.fixed_dictionaries({"capabilities": claims, "emulated": emulated, "rules": rules}),
    st.none() | conditions,
    variants,
    st.sampled_from(["stable", "stable", "stable", "experimental"]),
)
named = st.sampled_from(["A", "B", "C", "A/V0", "A/V1", "B/V0", "C/V1"])
entries = st.lists(named, min_size=1, max_size=3, unique=True).flatmap(
    lambda names: st.tuples(
        *(st.just(n) | st.builds(lambda c, n=n: {"backend": n, "if": c}, conditions) for n in names)
    )
)
orders = st.lists(st.tuples(conditions, entries), max_size=2).flatmap(
    lambda some: entries.map(
        lambda last: [
            *({"name": f"o{i}", "when": when, "order": list(order)} for i, (when, order) in enumerate(some)),
            {"name": "last", "order": list(last)},
        ]
    )
)
choices = st.lists(
    st.builds(
        lambda strength, name, when: {strength: name, "when": when},
        st.sampled_from(["require", "prefer", "deny"]),
        named,
        conditions | st.just({}),
    ),
    max_size=3,
)


asked = st.sampled_from([{"asked": "by_name"}, {"asked": "automatic"}, {"strict": True}, {"strict": None}])
waivers = st.lists(
    st.builds(
        lambda who, when, facet: {"when": {**when, **who}, "unchecked": [facet], "because": "b"},
        asked | st.just({}),
        simple_conditions,
        st.sampled_from(["platform", "head_size", "block_size", "kv_dtype", "num_heads"]),
    ),
    max_size=2,
)


@st.composite
def registries(draw: st.DrawFn, by_name: bool = False) -> attnreg.Registry:
    """Any registry of three rows, one platform's orders, and an overlay of choices.

    ``by_name`` adds rules, requirements and waivers for requests by name, or for all others.
    """
    backends = {name: draw(rows) for name in ("A", "B", "C")}
    more: dict[str, Any] = {}
    if by_name:
        more = {"vocabulary": ASKED, "waivers": draw(waivers)}
        for data in backends.values():
            data["requires"] = {**(data["requires"] or {}), **draw(asked | st.just({}))}
            data["rules"] = [
                *data["rules"],
                {"when": {**draw(simple_conditions), **draw(asked)}, "reject": "r"},
            ]
    try:
        decisions = [_existing(choice, backends) for choice in draw(choices)]
        ordered = [{**order, "order": _entries(order["order"], backends)} for order in draw(orders)]
        return load(backends, {"gpu": ordered}, overlays=[{"choices": decisions}], **more)
    except attnreg.RegistryError:
        # the same condition twice in a list is refused as unreachable
        reject()


def _existing(choice: dict[str, Any], backends: Mapping[str, Any]) -> dict[str, Any]:
    """A choice that names the whole backend where the backend lacks the variant that is named."""
    strength, name = next(iter(choice.items()))
    return {**choice, strength: _there(name, backends)}


def _entries(entries: Iterable[Any], backends: Mapping[str, Any]) -> list[Any]:
    """The entries of an order, those of variants that there are not as their backends; none twice."""
    there = [
        {**e, "backend": _there(e["backend"], backends)} if isinstance(e, dict) else _there(e, backends)
        for e in entries
    ]
    return list({e["backend"] if isinstance(e, dict) else e: e for e in there}.values())


def _there(name: str, backends: Mapping[str, Any]) -> str:
    backend, _, variant = name.partition("/")
    return name if variant in [v["name"] for v in backends[backend]["variants"]] else backend


def questions(random: Random, registry: attnreg.Registry, number: int) -> list[tuple[AttentionRequest, Platform]]:
    """Random configurations, with values near those of such registries."""
    words = registry.vocabulary.words

    def one() -> tuple[AttentionRequest, Platform]:
        heads = random.choice([None, 1, 2, 3, 4, 6, 7, 8, 9, 12, 20])
        kv_heads = random.choice([None, *(n for n in range(1, 13) if heads is None or heads % n == 0)])
        extra = {"eager": random.choice([None, True, False]), "ranks": random.choice([None, 0, *range(1, 14)])}
        extra["sibling"] = random.choice([None, *registry.vocabulary.architectures])
        request = AttentionRequest(
            head_size=random.randrange(1, 14),
            head_size_v=random.choice([None, *range(1, 14)]),
            block_size=random.choice([None, *range(1, 14)]),
            num_heads=heads,
            num_kv_heads=kv_heads,
            dtype=random.choice(list(words["dtypes"])),
            kv_dtype=random.choice([None, *words["kv_dtypes"]]),
            role=random.choice(list(words["roles"])),
            model=random.choice([None, "gpt", "got", "gemma", "bart", "x"]),
            features={f for f in registry.vocabulary.features if random.random() < 0.4},
            extra=extra,
        )
        arch = random.choice(list(registry.vocabulary.architectures.values()))
        flags = {f for f in registry.vocabulary.flags if random.random() < 0.5}
        packages = random.choice([None, {}, {"lib": ""}, {"lib": "1"}, {"lib": "2.5"}, {"lib": "3"}])
        return request, Platform(platform=arch.platform, arch=arch.name, flags=flags, packages=packages)

    return [one() for _ in range(number)]
