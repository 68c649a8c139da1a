"""The picker's evaluator, under Node, answers as attnreg does: selections with every reason, remedies, models whole."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ROOT, picking, tiny
from support.examples import examples

from attnreg import AttentionRequest, ConfigError, Platform, Registry, load_registry
from attnreg.cli import main
from attnreg.compile.inputs.bundled import bundled_configs, bundled_overlays, bundled_registries
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import verdict_words
from attnreg.selection.wording import unsaid

WHOLE = [*bundled_registries(releases=False), *bundled_overlays()]
BUNDLED = [*bundled_registries(), *bundled_overlays()]
pytestmark = pytest.mark.skipif(picking.NODE is None, reason="Node is not installed: the evaluator needs it here")


def same(asked: list[Any], answered: list[Any], questions: list[Any]) -> None:
    """Compare as text, in which true is not 1, and show the first question with another answer."""
    assert len(asked) == len(answered)
    for question, expected, answer in zip(questions, asked, answered, strict=True):
        assert json.dumps(answer, sort_keys=True) == json.dumps(expected, sort_keys=True), question


@pytest.mark.parametrize("name", BUNDLED)
def test_questions_at_random(name: str) -> None:
    registry = picking.bundled(name)
    # a release that is a difference asks for what the table that it changes does
    count = 300 if name in WHOLE else 100
    questions = picking.questions(registry, count, seed=17)
    expected = [picking.asked(q, registry, remedies=False) for q in questions]
    assert sum(bool(e.get("backend")) for e in expected) > count / 10
    assert 0 < sum("error" in e for e in expected) < count / 2
    same(expected, picking.answers(registry, questions), questions)


@pytest.mark.parametrize("name", WHOLE)
def test_remedies(name: str) -> None:
    registry = picking.bundled(name)
    questions = picking.questions(registry, 25, seed=18)
    expected = [picking.asked(q, registry, remedies=True) for q in questions]
    # what an engine's steps name has no other candidate
    assert any(c["would_win"] for e in expected for c in e.get("candidates", ())) == bool(registry.orders)
    same(expected, picking.answers(registry, questions, remedies=True), questions)


LATE: list[tuple[str, str, dict[str, Any]]] = [
    ("vllm-0.30.0", "sm86", {"kv_dtype": "fp8_ds_mla"}),
    ("vllm-0.28.0", "gfx1201", {"kv_dtype": "fp8_e5m2", "dtype": "float32", "block_size": 32}),
    ("vllm-0.33.0", "sm86", {"kv_dtype": "fp8"}),
    ("vllm-0.33.0", "sm86", {"kv_dtype": "fp8", "features": ["softcap"]}),
    ("vllm-0.33.0", "sm75", {"kv_dtype": "fp8", "features": ["alibi"], "head_size": 100}),
]


@pytest.mark.parametrize("name", sorted({case[0] for case in LATE}))
def test_what_fails_once_it_is_chosen(name: str) -> None:
    """It is said of the losers in the same words, it is no alternative, and no remedy leads into it."""
    registry = picking.bundled(name)
    questions = [
        {
            "request": {"head_size": 128, "num_heads": 32, "num_kv_heads": 8, **fields},
            "platform": {"platform": registry.vocabulary.architectures[arch].platform, "arch": arch, "flags": []},
            "backend": backend,
        }
        for release, arch, fields in LATE
        for backend in ([None, "FLASH_ATTN", "TURBOQUANT"] if release == name else [])
    ]
    expected = [picking.asked(q, registry, remedies=True) for q in questions]
    candidates = [c for e in expected for c in e["candidates"]]
    assert any(c["fails"] for c in candidates) or name == "vllm-0.30.0"
    same(expected, picking.answers(registry, questions, remedies=True), questions)
    words = []
    for question in questions:
        request, platform = AttentionRequest(**question["request"]), Platform(**question["platform"])
        selection = evaluate(request, platform, registry, question["backend"])
        said = [verdict_words(selection, candidate) for candidate in selection.candidates]
        words += [[{"text": text, "where": str(where)} for text, where in verdict] for verdict in said]
    assert picking.by_node(ROOT / "tests/tools/picker/words.js", candidates, str(picking.STATIC)) == words


def test_a_remedy_without_its_idle_part() -> None:
    registry = picking.bundled("default")
    prompts = {"attention": "mla", "head_size": 32, "role": "draft", "phase": "prefill", "qk_nope_head_dim": 0}
    platform = {"platform": "cuda", "arch": "sm100", "flags": [], "packages": {"flash-attn-4": ""}}
    questions = [{"request": prompts | {"dtype": "bfloat16"}, "platform": platform, "backend": None}]
    expected = [picking.asked(q, registry, remedies=True) for q in questions]
    texts = [c["would_win"]["text"] for c in expected[0]["candidates"] if c["would_win"]]
    assert "with --qk-nope-head-dim 64" in texts
    same(expected, picking.answers(registry, questions, remedies=True), questions)


@pytest.mark.parametrize("name", ["default", "sglang-0.5.23", "vllm-0.33.0"])
def test_choices_of_an_overlay(name: str) -> None:
    # beside an engine's steps, and fallbacks to its order
    rows = list(picking.bundled(name).backends.values())
    variant = (
        next(f"{row.name}/{v}" for row in rows for v in row.variant_names) if name != "sglang-0.5.23" else rows[6].name
    )
    choices = [
        {"require": rows[5].name, "when": {"arch": ["sm90", "gfx942"]}, "because": "a test"},
        {"prefer": rows[3].name, "when": {"platform": ["cuda", "rocm"], "head_size": {"min": 64}}},
        {"deny": [variant, rows[1].name], "when": {"head_size": {"max": 256}}},
        {"deny": [rows[2].name]},
    ]
    registry = load_registry(name, [{"choices": choices}])
    questions = picking.questions(registry, 300, seed=19)
    expected = [picking.asked(q, registry, remedies=False) for q in questions]
    assert {"require", "prefer"} <= {(e.get("choice") or {}).get("strength") for e in expected}
    assert any(r["kind"] == "denied" for e in expected for c in e.get("candidates", ()) for r in c["reasons"])
    same(expected, picking.answers(registry, questions), questions)


OPTIONS: list[tuple[dict[str, Any], tuple[str, ...], int, tuple[str, ...], str | None, tuple[int, ...]]] = [
    ({}, (), 1, (), None, ()),
    ({"kv_dtype": "fp8"}, ("batch_invariant",), 2, (), None, (1000, 200_000)),
    ({"kv_dtype": None, "block_size": 16}, ("sinks", "lse"), 1, (), "TRITON_ATTN", ()),
    # by its config alone an engine may store the cache otherwise than is asked, which a note says
    ({"kv_dtype": "fp8_e4m3", "phase": "decode"}, (), 4, ("aiter",), None, ()),
    # of MLA, its prompts alone
    ({"phase": "prefill"}, ("lse",), 1, (), None, (4096,)),
]


@pytest.mark.parametrize("number", range(len(OPTIONS)))
@pytest.mark.parametrize("name", bundled_registries(releases=False))
def test_models(name: str, number: int) -> None:
    given, features, ranks, flags, backend, lengths = OPTIONS[number]
    registry = picking.bundled(name)
    if backend not in registry.backends:
        backend = None
    if given.get("kv_dtype") == "fp8" and "fp8" not in registry.vocabulary.words["kv_dtypes"]:
        given = {**given, "kv_dtype": "fp8_e4m3"}
    options = {"given": given, "features": features, "ranks": ranks, "extra": {}, "backend": backend}
    options["lengths"] = lengths
    known = [flag for flag in flags if flag in registry.vocabulary.flags]
    features = [f for f in features if f in registry.vocabulary.features]
    archs = list(registry.vocabulary.architectures.values())
    names = list(bundled_configs())[number :: len(OPTIONS)]
    questions = [
        {
            "model": model,
            "options": {**options, "features": features},
            "backend": backend,
            "platform": {"platform": a.platform, "arch": a.name, "flags": known, "packages": None},
        }
        for i, model in enumerate(names)
        for a in archs[i % 6 :: 6 if name == "default" else 12]
    ]
    models = picking.documents(registry, names)
    expected = [_explained(name, q) for q in questions]
    same(expected, picking.answers(registry, questions, remedies=True, models=models), questions)


def test_a_table_without_an_engines_start_says_so() -> None:
    registry = dataclasses.replace(picking.bundled("vllm-0.33.0"), steps=())
    options = {"given": {}, "features": [], "ranks": 1, "extra": {}, "backend": None}
    platform = {"platform": "cuda", "arch": "sm90", "flags": [], "packages": None}
    question = {"model": "gpt-oss-120b", "options": options, "backend": None, "platform": platform}
    (answer,) = picking.answers(registry, [question], models=picking.documents(registry, ["gpt-oss-120b"]))
    assert "holds the selector alone" in unsaid(registry)
    assert answer["notes"][0] == unsaid(registry)


STORED: dict[str, dict[str, Any]] = {
    "minicpm3": {},
    "whisper": {"dtype": "float32"},
    "glm_moe_dsa": {"num_hidden_layers": 2},
    "gpt_oss": {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}},
}


def test_the_cache_is_counted_as_the_engine_stores_it(tmp_path: Path) -> None:
    from picker.models import Reading, model_document

    registry, questions = load_registry("vllm-0.33.0"), []
    options = {"features": [], "ranks": 1, "extra": {}, "backend": None, "lengths": (1000,)}
    for name, fields in STORED.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": name} | fields))
        for changes in ({}, {"kv_dtype": "fp8_per_token_head"}):
            platform = {"platform": "cuda", "arch": "sm100", "flags": [], "packages": None}
            asked = {"model": name, "options": {**options, "given": changes}, "backend": None, "platform": platform}
            questions.append(asked)
    models = {name: model_document(Reading(str(tmp_path / name)), registry) for name in STORED}
    expected = [picking.explained(registry.name, str(tmp_path / q["model"]), q) for q in questions]
    plain = [cases["memory"][0]["token_bytes"] for cases in (m["cases"][0] for m in models.values())]
    counted = [e["kv_cache"]["groups"][0]["bytes_per_token"] for e in expected[::2]]
    # an encoder's layers keep nothing; the cache of each of the others is another than it was asked for
    assert [a == b for a, b in zip(plain, counted, strict=True)] == [False, True, False, False]
    same(expected, picking.answers(registry, questions, remedies=True, models=models), questions)


def _explained(name: str, question: dict[str, Any]) -> dict[str, Any]:
    try:
        return picking.explained(name, str(bundled_configs()[question["model"]]), question)
    except ConfigError as e:
        return {"error": str(e)}


def test_a_field_that_changes_a_model_is_left_to_python(default: Registry) -> None:
    # its document has the layers and the bytes of the config alone
    options = {"given": {"head_size": 64}, "features": [], "ranks": 1, "extra": {}, "backend": None}
    platform = {"platform": "cuda", "arch": "sm90", "flags": [], "packages": None}
    question = {"model": "gpt-oss-120b", "options": options, "backend": None, "platform": platform}
    models = picking.documents(default, ["gpt-oss-120b"])
    with pytest.raises(AssertionError, match="head_size is a question for Python"):
        picking.answers(default, [question], models=models)


def test_words_that_cannot_be_seen_are_written_as_the_command_writes_them() -> None:
    # an address may hold any; one of these turns the text around it
    words = [
        "\u202e",
        "é",
        "💥",
        "a\x00b",
        "it's",
        "a\"b'c",
        "\xa0x",
        "\u2028",
        "日本",
        "x\x7f",
        "²",
        "\U000e0001",
        "a b",
    ]
    platform = {"platform": "cuda", "arch": "sm90", "flags": [], "packages": None}
    registry = picking.bundled("sglang-0.5.23")
    requests: list[tuple[dict[str, Any], str | None]] = []
    for word in words:
        requests += [({"kv_dtype": word}, None), ({"features": [word]}, None), ({}, word)]
    questions = [
        {"request": {"head_size": 128, **fields}, "platform": platform, "backend": backend}
        for fields, backend in requests
    ]
    expected = [picking.asked(q, registry, remedies=False) for q in questions]
    same(expected, picking.answers(registry, questions), questions)
    options = {"given": {}, "features": [], "ranks": 1, "backend": None}
    shown = [
        {"model": "gpt-oss-120b", "platform": platform, "backend": None, "options": {**options, "extra": extra}}
        for extra in ({"first_layer_type": word} for word in words)
    ]
    expected = [_explained(registry.name, q) for q in shown]
    models = picking.documents(registry, ["gpt-oss-120b"])
    same(expected, picking.answers(registry, shown, remedies=True, models=models), shown)


def test_addresses_and_names_of_files(default: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    from picker.registries import registry_document

    hashes = {
        "#registry=default&arch=sm90&facet.head_size=128": False,
        "#registry=default&arch=sm90&model=gpt-oss-120b&tp=2": False,
        "#registry=default&arch=sm90&model=gpt-oss-120b&tp=3": True,
        # ranks share out a model's heads: Python refuses, as the command does
        "#registry=default&arch=sm90&facet.head_size=128&tp=2": True,
        # another spelling of what has a place of its own, which the page answered without
        "#registry=default&arch=sm90&facet.head_size=128&facet.features=sinks&facet.model=llama&facet.arch=sm80": False,
    }
    # a config that is dropped is no bundled model, whatever its file is called: a link would ask for that elsewhere
    files = {
        "config.json": "config",
        "Mine.JSON": "Mine",
        "gpt-oss-120b.json": "gpt-oss-120b of gpt-oss-120b.json",
        "gpt-oss-120b": "gpt-oss-120b of gpt-oss-120b",
    }
    given = {
        "document": registry_document(default),
        "ranks": [1, 2, 4, 8, 16],
        "hashes": list(hashes),
        "files": list(files),
        "bundled": list(bundled_configs()),
    }
    scripts = [f"{name}.js" for name in (*picking.SCRIPTS, "address")]
    answer = picking.by_node(ROOT / "tests/tools/picker/address.js", given, str(picking.STATIC), *scripts)
    assert answer["models"] == list(files.values())
    read = answer["read"]
    assert [one["python"] for one in read] == list(hashes.values())
    assert read[-1]["unread"] == ["facet.features=sinks", "facet.model=llama", "facet.arch=sm80"]
    assert read[-1]["words"] == read[0]["words"]
    assert main(read[-2]["words"][1:]) == 2
    assert "--tp shares out a model's heads" in capsys.readouterr().err


@pytest.mark.parametrize("name", BUNDLED)
def test_the_evaluator_has_an_expression_for_all_bundled_data(name: str) -> None:
    from picker.registries import registry_document

    assert registry_document(picking.bundled(name))["backends"]


def test_a_matcher_without_an_expression_is_refused() -> None:
    from picker.expressions import ExpressionError, expression

    from attnreg.language.matchers import Matcher

    with pytest.raises(ExpressionError, match="no expression for 'odd'"):
        expression(Matcher("odd", lambda value: bool(value % 2)))


def test_data_that_the_evaluator_does_not_know_is_refused(default: Registry) -> None:
    from picker import registries
    from picker.expressions import ExpressionError

    # as if a field had come to the data since
    known = registries._READ[Registry].replace(" orders", "")
    with (
        mock.patch.dict(registries._READ, {Registry: known}),
        pytest.raises(ExpressionError, match=r"^default@.* has orders, of which the evaluator"),
    ):
        registries.registry_document(default)


@given(registry=tiny.registries(by_name=True), seed=st.integers(0, 1000))
@examples(5)
def test_registries_at_random(registry: Registry, seed: int) -> None:
    # with facets, words and conditions that no bundled registry has
    questions = picking.questions(registry, 60, seed)
    expected = [picking.asked(q, registry, remedies=True) for q in questions]
    same(expected, picking.answers(registry, questions, remedies=True), questions)


def test_versions_compare_as_packaging_compares_them() -> None:
    from packaging.specifiers import SpecifierSet

    bounds = ("2.7", "2.7.0rc1", "2.7.post1", "2.7.dev1", "1!1.0", "2.7.1+cu12", "2", "0")
    versions = [
        *picking.VERSIONS[1:-1],
        *bounds,
        "2.7.0",
        "2.7.1",
        "2.7a1.post2.dev3",
        "v2.7-1",
        "2.7+abc.10",
        "2.6.9999",
    ]
    cases = [
        (f"{operator}{bound}", version)
        for operator in (">=", "<=", "<", ">", "==", "!=", "~=")
        for bound in (*bounds, "2.7.*", "2.*")
        if not (bound.endswith("*") and operator not in ("==", "!="))
        if not ("+" in bound and operator not in ("==", "!="))
        if not (operator == "~=" and "." not in bound.rpartition("!")[2])
        for version in versions
    ]
    questions = [([[s.operator, s.version] for s in SpecifierSet(spec)], version) for spec, version in cases]
    expected = [SpecifierSet(spec).contains(version, prereleases=True) for spec, version in cases]
    same(expected, picking.by_node(ROOT / "tests/tools/picker/versions.js", questions, str(picking.STATIC)), cases)
