"""The answer as a value: remembered, shared between threads, written as JSON, sent to another process, run."""

from __future__ import annotations

import dataclasses
import gc
import json
import pickle
import sys
import threading
import types
import weakref
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
from support.registries import tiny
from support.registries.asking import BASE, at
from support.rows import ROWS
from support.rows.words import features

import attnreg
from attnreg import AttentionRequest, NoBackendError, Platform, Registry, load_registry, select
from attnreg.contract import FUNCTIONS
from attnreg.loader import load_kernel
from attnreg.selection import selector
from attnreg.selection.selector import answers_of, evaluate


@pytest.mark.slow(reason="imports a kernel module, and torch with it")
def test_to_run_asks_for_a_module_that_loads(monkeypatch: pytest.MonkeyPatch, default: Registry) -> None:
    package, good = types.ModuleType("kernels_of_a_test"), types.ModuleType("kernels_of_a_test.good")
    vars(good).update(dict.fromkeys(FUNCTIONS, print))
    monkeypatch.setitem(sys.modules, "kernels_of_a_test", package)
    monkeypatch.setitem(sys.modules, "kernels_of_a_test.good", good)
    overlay = {
        "backends": {
            "FLASHINFER": {"module": "kernels_of_a_test.missing", "contract": 1},
            "HOPPER_ATTN": {"module": "kernels_of_a_test.good", "contract": 1},
        }
    }
    registry = load_registry("default", [overlay], trust=["kernels_of_a_test"])
    # an order that does not name FLASH_ATTN/FA3 itself
    request, platform = AttentionRequest(**{**BASE, "dtype": "float16"}), at("sm90", default)
    answer = select(request, platform, registry, to_run=True)
    assert answer.backend.name == "HOPPER_ATTN"
    assert load_kernel(answer.registry, answer.backend.title) is good
    unloaded = "FLASH_ATTN/FA3 runs where it is named: "
    missing = "No module named 'kernels_of_a_test.missing'; 'kernels_of_a_test' is not a package"
    said = {c.name: [r.text for r in c.reasons] for c in answer.candidates}
    (reason,) = said["FLASH_ATTN"]
    assert reason.startswith(unloaded)
    assert said["FLASHINFER"] == [f"cannot be run: ModuleNotFoundError: {missing}"]
    # the question without it is another one, and is remembered apart
    assert select(request, platform, registry).backend.name == "FLASH_ATTN"
    with pytest.raises(ImportError, match="package vllm is not installed"):
        load_kernel(registry, select(request, platform, registry).backend.title)


# the answer as a value -----------------------------------------------------------------------------------------------


def test_answers_are_remembered_by_everything_that_was_asked() -> None:
    registry = load_registry("default")
    request, platform = AttentionRequest(**BASE), at("sm90", registry)
    first = select(request, platform, registry)
    assert select(AttentionRequest(**BASE), at("sm90", registry), registry) is first
    others = [
        select(dataclasses.replace(request, kv_dtype="fp8"), platform, registry),
        select(request, at("sm90 +aiter", registry), registry),
        select(request, at("sm90 -vllm", registry), registry),
        select(request, platform, registry, "TRITON_ATTN"),
    ]
    assert len({id(s) for s in [first, *others]}) == 5
    assert len(answers_of(registry)) == 5


def test_a_changed_copy_of_a_registry_does_not_share_its_answers() -> None:
    registry = load_registry("default")
    request, platform = AttentionRequest(**BASE), at("sm90", registry)
    select(request, platform, registry)
    copy = dataclasses.replace(registry, orders={})
    assert evaluate(request, platform, copy).backend is None


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selector, "LIMIT", 8)
    registry = tiny.load({"A": tiny.row()})
    platform = Platform(platform="gpu", arch="g1")
    for size in range(1, 13):
        select(AttentionRequest(head_size=size), platform, registry)
    assert [asked[0].head_size for asked in answers_of(registry)] == [9, 10, 11, 12]


@pytest.mark.slow(reason="loads registries anew")
def test_the_memory_goes_with_its_registry() -> None:
    registry = tiny.load({"A": tiny.row()})
    selection = select(AttentionRequest(head_size=8), Platform(platform="gpu", arch="g1"), registry)
    gone = weakref.ref(registry)
    del registry
    gc.collect()
    # an answer keeps what it is an answer of, and its own memory does not count
    assert gone() is selection.registry
    del selection
    gc.collect()
    assert gone() is None


def test_threads_agree() -> None:
    registry = load_registry("default")
    questions = [(AttentionRequest(**{**BASE, **r[2]}), at(r[1], registry)) for r in ROWS]
    alone = load_registry("default")
    expected = [evaluate(*q, alone).to_dict() for q in questions]
    start = threading.Barrier(8)

    def ask(_: int) -> list[dict[str, Any]]:
        start.wait()
        return [evaluate(*q, registry).to_dict() for q in questions]

    with ThreadPoolExecutor(8) as pool:
        assert all(answers == expected for answers in pool.map(ask, range(8)))


def test_it_is_json(default: Registry) -> None:
    for row in ROWS:
        data = evaluate(AttentionRequest(**{**BASE, **row[2]}), at(row[1], default), default).to_dict()
        assert json.loads(json.dumps(data)) == data
    data = evaluate(AttentionRequest(**BASE, **features("sinks")), at("gfx942", default), default).to_dict()
    assert data["backend"] == {"name": "TRITON_ATTN", "variant": None}
    assert data["order"]["name"] == "rocm/mha"
    assert data["derived"]["kv_quantized"]["value"] is False
    assert data["candidates"][2]["reasons"][0]["text"] == "emulates sinks (slow); TRITON_ATTN serves them natively"
    assert data["candidates"][2]["reasons"][0]["where"].startswith("registry/backends.yaml:")


def test_derived_facets_tell_the_case_that_spoke(default: Registry) -> None:
    selection = evaluate(AttentionRequest(**BASE, kv_dtype="fp8"), at("sm90", default), default)
    value, where = selection.derived["kv_quantized"]
    assert value is True
    assert where == default.derived["kv_quantized"].cases[-1][2]


def test_selections_travel_between_processes(default: Registry) -> None:
    request, platform = AttentionRequest(**BASE, **features("sinks")), at("gfx942", default)
    selection = select(request, platform, default)
    copy = pickle.loads(pickle.dumps(selection))
    assert copy == selection
    assert len(answers_of(default)) > len(answers_of(copy.registry)) == 0
    # the copy of the registry answers as the original does
    assert select(request, at("sm120", default), copy.registry).backend.name == "FLASHINFER"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.raises(NoBackendError, match="sinks is not supported") as caught:
            pool.submit(select, request, at("sm120", default), default, "FLASH_ATTN").result()
        assert caught.value.alternatives == ("FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")


def test_the_default_registry_is_used_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNREG_REGISTRY", raising=False)
    answer = attnreg.select(AttentionRequest(**BASE), Platform(platform="cuda", arch="sm90"))
    assert answer.registry.name == "default"
    assert answer.backend.name == "HOPPER_ATTN"
