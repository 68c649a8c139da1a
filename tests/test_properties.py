"""What holds of selection for any request whatever: its errors are typed, its answers do not depend on accidents."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from random import Random
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from support import ROOT
from support.registries import asking, tiny
from support.suite.examples import examples

from attnreg import AttentionRequest, NoBackendError, Platform, Registry, RequestError, Selection, select
from attnreg.selection.selector import answers_of, evaluate

# errors --------------------------------------------------------------------------------------------------------------

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.builds(object),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2) | st.tuples(inner),
    max_leaves=4,
)


def fields_of(kind: type, known: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Fields of a class as they should be, but for a few that are anything."""
    names = [f.name for f in dataclasses.fields(kind) if f.init]
    spoilt = st.dictionaries(st.sampled_from(names), ANYTHING, max_size=2)
    return st.builds(lambda good, bad: good | bad, st.fixed_dictionaries(known), st.just({}) | spoilt)


def outcome(fields: dict[str, Any], where: dict[str, Any], registry: Registry, backend: str | None = None) -> str:
    """What is answered, or said by a typed error; anything else is raised."""
    try:
        return select(AttentionRequest(**fields), Platform(**where), registry, backend).backend.name
    except RequestError as e:
        return f"RequestError: {e}"
    except NoBackendError as e:
        return f"NoBackendError: {e.selection.backend}: {e}"


@given(data=st.data())
@examples(300)
def test_select_raises_nothing_but_its_typed_errors(default: Registry, data: st.DataObject) -> None:
    words = {
        name: st.sampled_from(sorted(f.words)) for name, f in default.vocabulary.facets.items() if f.kind == "word"
    }
    requests = fields_of(
        AttentionRequest,
        {
            **{name: words[name] for name in ("dtype", "kv_dtype", "attention", "attn_type", "role", "phase")},
            "head_size": st.integers(1, 1 << 70),
            "features": st.sets(st.sampled_from(sorted(default.vocabulary.features)), max_size=2),
            "extra": st.just({}) | st.dictionaries(st.sampled_from(sorted(default.vocabulary.facets)), ANYTHING),
        },
    )
    arch = data.draw(st.sampled_from(list(default.vocabulary.architectures.values())))
    platforms = fields_of(Platform, {"platform": st.just(arch.platform), "arch": st.just(arch.name)})
    backend = data.draw(st.none() | st.none() | st.sampled_from(sorted(default.backends)) | st.text())
    said = outcome(data.draw(requests), data.draw(platforms), default, backend)
    event(said.partition(":")[0])
    assert not said.endswith(": ")


@given(registry=tiny.registries(), data=st.data())
@examples(60)
def test_facets_that_a_registry_declares_take_anything_too(registry: Registry, data: st.DataObject) -> None:
    names = st.sampled_from(sorted(registry.vocabulary.facets))
    for extra in data.draw(st.lists(st.dictionaries(names, ANYTHING, max_size=2), min_size=5, max_size=5)):
        said = outcome({"head_size": 4, "extra": extra}, {"platform": "gpu", "arch": "g1"}, registry)
        event(said.partition(":")[0])
        assert not said.endswith(": ")


# accidents -----------------------------------------------------------------------------------------------------------


def verdicts(selection: Selection) -> list[Any]:
    """The verdicts, whatever their order: a backend and one of its variants may both be entries."""
    return sorted(((c.name, c.variant, c.reasons, c.emulates) for c in selection.candidates), key=repr)


def reordered(registry: Registry, selection: Selection, random: Random) -> Registry:
    """The registry with the entries that were not accepted in another order; the accepted keep their places."""
    order = selection.order
    refused = [i for i, c in enumerate(selection.candidates) if not c.accepted]
    places = dict(zip(refused, random.sample(refused, len(refused)), strict=True))
    entries = tuple(order.entries[places.get(i, i)] for i in range(len(order.entries)))
    orders = tuple(
        dataclasses.replace(o, entries=entries) if o is order else o for o in registry.orders[order.platform]
    )
    return dataclasses.replace(registry, orders={**registry.orders, order.platform: orders})


def check_reordering(registry: Registry, request: AttentionRequest, platform: Platform, random: Random) -> None:
    selection = evaluate(request, platform, registry)
    if selection.order is not None:
        other = evaluate(request, platform, reordered(registry, selection, random))
        assert (
            other.backend == dataclasses.replace(selection.backend, registry=other.registry)
            if selection.backend
            else (other.backend is None)
        )
        assert verdicts(other) == verdicts(selection)


@given(data=st.data(), random=st.randoms(use_true_random=True))
@examples(150)
def test_the_order_of_refused_candidates_does_not_matter(
    default: Registry, data: st.DataObject, random: Random
) -> None:
    request, platform = data.draw(asking.requests(default)), data.draw(asking.platforms(default))
    check_reordering(default, request, platform, random)


@given(tiny.registries(), st.randoms(use_true_random=True))
@examples(40)
def test_nor_in_registries_at_random(registry: Registry, random: Random) -> None:
    plain = dataclasses.replace(registry, choices=())
    for request, platform in tiny.questions(random, registry, 30):
        check_reordering(plain, request, platform, random)


@given(data=st.data())
@examples(100)
def test_what_was_asked_before_does_not_matter(default: Registry, data: st.DataObject) -> None:
    request, platform = data.draw(asking.requests(default)), data.draw(asking.platforms(default))
    fresh = dataclasses.replace(default)
    assert answers_of(fresh) == {}
    assert evaluate(request, platform, fresh).to_dict() == evaluate(request, platform, default).to_dict()


SEEDED = """
import json, random, sys
sys.path.insert(0, "tests")
from support.registries import tiny
from support.registries.asking import BASE, at
from attnreg import AttentionRequest, NoBackendError, load_registry
from attnreg.analysis.diff import diff
from attnreg.analysis.check.findings import check
from attnreg.selection.refusal import full_dict
from attnreg.selection.remedies import remedy
from attnreg.selection.selector import answers_of
from attnreg.selection.selector import evaluate

default = load_registry("default")
other = load_registry("default", [{"choices": [{"deny": ["FLASHINFER"]}]}])
words = sorted(default.vocabulary.features)
for where in ("gfx942", "sm75", "sm100 -flash-attn-4", "xe2"):
    for i in range(len(words)):
        request = AttentionRequest(**BASE, features=words[i:i + 3])
        selection = evaluate(request, at(where, default), default)
        print(NoBackendError(selection), json.dumps(full_dict(selection)))
        print([remedy(selection, c) for c in selection.candidates if c.reasons])
print(json.dumps(diff(default, other, within={"arch": "sm100"}, limit=3).to_dict()))
registry = tiny.load({"B": tiny.row(), "A": tiny.row(capabilities={"features": ["sinks"]})})
print(*check(registry), sep="\\n")
"""


@pytest.mark.slow(reason="two processes check, diff and explain")
def test_hash_seeds_do_not_matter() -> None:
    root = str(ROOT)

    def run(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", SEEDED]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=root)
        # the directory of the small registry is a new one each time
        return "\n".join(line.partition("/tiny/")[2] or line for line in done.stdout.splitlines())

    first = run("1")
    assert "sinks is not supported" in first
    assert first == run("2")


# what is not given ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", ["block_size", "num_heads", "index_topk", "dimensions"])
@given(data=st.data())
@examples(60)
def test_what_is_not_given_constrains_nothing(default: Registry, absent: str, data: st.DataObject) -> None:
    request, platform = data.draw(asking.requests(default)), data.draw(asking.platforms(default))
    dimensions = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    # without its model's facts, a request has no model either
    facts = {"dimensions": dimensions, "index_topk": ("index_topk", "model")}.get(absent, (absent,))
    less = dataclasses.replace(request, **dict.fromkeys(facts))
    for name in default.backends:
        if evaluate(request, platform, default, name).backend:
            assert evaluate(less, platform, default, name).backend, name
