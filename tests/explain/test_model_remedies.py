"""Remedies for the layers of a model: given as options, they do for these layers what they say."""

from __future__ import annotations

from typing import Any

import pytest
from support.registries.asking import at

from attnreg import load_registry
from attnreg.compile.inputs.bundled import bundled_configs
from attnreg.explain.answers import Explanation, explain
from attnreg.models.questions import ModelOptions, model_questions
from attnreg.registry import Registry
from attnreg.selection.remedies import Remedy

PACKED = "turboquant_k8v4"
CASES = [
    ("default", "gfx942", "gpt-oss-120b", {}),
    ("default", "sm90", "gemma-3-27b-it", {}),
    ("default", "gfx942", "gemma-3-27b-it", {"kv_dtype": PACKED}),
    ("default", "sm90", "DeepSeek-V3", {"kv_dtype": "fp8"}),
    ("vllm-0.33.0", "sm90", "Llama-3.1-8B", {"kv_dtype": PACKED}),
    ("vllm-0.33.0", "gfx950", "bert-base-uncased", {"kv_dtype": PACKED}),
    ("vllm-0.33.0", "gfx942", "Qwen2.5-VL-7B-Instruct", {}),
]


def explained(
    registry: Registry, arch: str, config: str, options: ModelOptions, backend: str | None = None
) -> Explanation:
    questions = model_questions(str(bundled_configs()[config]), options, registry).questions
    return explain(questions, [at(arch, registry)], registry, backend=backend)


def winners(explanation: Explanation) -> dict[Any, list[set[str]]]:
    """Layer -> the names of the backend of each of its questions."""
    out: dict[Any, list[set[str]]] = {}
    for answer in explanation.answers:
        for verdict in answer.verdicts:
            chosen = verdict.selection.chosen
            for member in answer.question.members:
                out.setdefault((member, answer.question.kind), []).append(
                    {chosen.name, chosen.title} if chosen else set()
                )
    return out


def options_of(remedy: Remedy, given: dict[str, Any]) -> tuple[str, ModelOptions] | None:
    """The architecture and flags, if any, and the options that a remedy names; None where it makes another model."""
    changes = [c for c in remedy.changes if c.facet not in ("arch", "flags")]
    if remedy.of_model or any(c.facet in ("packages", "device", "features") for c in changes):
        return None
    where = [str(c.value) for c in remedy.changes if c.facet == "arch"]
    where += [f"+{c.value}" for c in remedy.changes if c.facet == "flags" and not c.drop]
    return " ".join(where), ModelOptions(given=given).with_given({c.facet: c.value for c in changes})


@pytest.mark.parametrize(("name", "arch", "config", "given"), CASES)
def test_a_remedy_holds_for_the_layers_that_it_is_told_of(
    name: str, arch: str, config: str, given: dict[str, Any]
) -> None:
    registry = load_registry(name)
    tried = 0
    explanation = explained(registry, arch, config, ModelOptions(given=given))
    places: dict[Any, int] = {}
    for answer in explanation.answers:
        layers = [(member, answer.question.kind) for member in answer.question.members]
        for verdict in answer.verdicts:
            for rank, remedy in verdict.remedies.items():
                asked = options_of(remedy, given)
                if asked is None:
                    continue
                where, options = asked
                where = where if where and not where.startswith("+") else f"{arch} {where}".strip()
                after = winners(explained(registry, where, config, options, remedy.by_name))
                wanted = verdict.selection.candidates[rank - 1].name
                assert all(wanted in after[layer][places.get(layer, 0)] for layer in layers), remedy.text
                tried += 1
        for layer in layers:
            places[layer] = places.get(layer, 0) + 1
    assert tried


@pytest.mark.parametrize(("name", "arch", "config", "given"), CASES)
def test_a_remedy_is_no_option_given_already_and_none_that_follows_another(
    name: str, arch: str, config: str, given: dict[str, Any]
) -> None:
    explanation = explained(load_registry(name), arch, config, ModelOptions(given=given))
    remedies = [r for a in explanation.answers for v in a.verdicts for r in v.remedies.values()]
    assert remedies
    changed = [(c.facet, c.value) for r in remedies for c in r.changes]
    assert not {facet for facet, _ in changed} & {"run_kv_dtype", "asked_kv_dtype"}
    assert not any((facet, value) in given.items() for facet, value in changed)


def test_a_kv_dtype_that_skips_no_layer_is_a_remedy_still(default: Registry) -> None:
    # the window layers keep a plain cache; none of the others is at an end of the model
    explanation = explained(default, "sm90", "gemma-3-27b-it", ModelOptions())
    texts = {
        answer.question.kind: {r.text for v in answer.verdicts for r in v.remedies.values()}
        for answer in explanation.answers
    }
    word = f"with --kv-dtype {PACKED}"
    assert word in texts["full"]
    assert word not in texts["sliding"]


def test_a_model_is_asked_again_once_for_the_same_options(default: Registry) -> None:
    questions = model_questions(str(bundled_configs()["gpt-oss-120b"]), ModelOptions(), default).questions
    first, second = (q.anew for q in questions)
    assert first is not None
    assert second is not None
    kept = [{r.kv_dtype for r in anew({"kv_dtype": PACKED})} for anew in (first, second)]
    assert kept[0] == {"auto"}, "a short window"
    assert kept[1] == {"auto", PACKED}, "the last two layers, and the others"
    (plain,) = second({"kv_dtype": "fp8", "block_size": 32})
    assert (plain.kv_dtype, plain.block_size) == ("fp8", 32)
    assert first.func.__self__ is second.func.__self__  # type: ignore[attr-defined]
    assert second({"kv_dtype": "no such word", "head_size": 0}) == ()
