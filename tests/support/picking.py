"""Questions at random for the picker's evaluator, what attnreg answers, and the evaluator under Node."""

from __future__ import annotations

import functools
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from attnreg import AttentionRequest, Platform, Registry, RequestError, load_registry
from attnreg.cli.inputs import BackendInputs, PlatformInputs, RegistryInputs, RequestInputs, read_inputs
from attnreg.explain import explain
from attnreg.language.facets import CORE
from attnreg.selection.refusal import full_dict
from attnreg.selection.remedies import remedy
from attnreg.selection.selector import evaluate
from support import ROOT

TOOLS = ROOT / "tools"
STATIC = TOOLS / "docs_site/assets/picker"
if str(TOOLS) not in sys.path:
    sys.path.append(str(TOOLS))

# in the order in which a page loads them
SCRIPTS = ("versions", "packages", "registry", "selector", "question", "likeness", "remedies", "explain")
NODE = shutil.which("node")
VERSIONS = (
    "",
    "0.1",
    "0.6.18",
    "2.6",
    "2.7",
    "2.7.0rc1",
    "2.8.1",
    "2.8.1.post1",
    "3.0.0b2",
    "1!0.1",
    "99",
    "no-version",
)
_SIZES: dict[str, tuple[int | None, ...]] = {
    "head_size": (32, 64, 80, 96, 128, 192, 256, 512, 576),
    "head_size_v": (None, None, 64, 128, 512),
    "block_size": (None, 1, 8, 16, 32, 64, 128, 256, 784),
    "num_heads": (None, 1, 8, 12, 16, 32, 64, 128),
    "num_kv_heads": (None, 1, 2, 4, 8, 12),
    "kv_lora_rank": (None, 0, 256, 512),
    "qk_nope_head_dim": (None, 0, 64, 96, 128, 192),
    "qk_rope_head_dim": (None, 0, 32, 64),
    "v_head_dim": (None, 0, 64, 128, 256),
    "index_topk": (None, 1, 2048),
}


def constants(registry: Registry) -> dict[str, list[int]]:
    """Integer facet -> the numbers of the data at which an answer can change."""
    out: dict[str, set[int]] = {}
    for row in registry.backends.values():
        for variant in row.variants:
            tests: list[Any] = [*variant.claims, *variant.when.walk(), *variant.requires.walk()]
            for rule in variant.rules:
                tests += rule.when.walk()
            for consequence in variant.consequences:
                tests += consequence.when.walk()
            for test in tests:
                out.setdefault(test.facet, set()).update(test.matcher.constants)
    return {facet: sorted(n for n in numbers if n > 0) for facet, numbers in out.items() if numbers}


def questions(registry: Registry, count: int, seed: int) -> list[dict[str, Any]]:
    """Questions about every facet: words and values that are not given among them, unknown ones, versions, models."""
    rng, edges = random.Random(seed), constants(registry)
    texts = sorted({str(w) for row in registry.backends.values() for v in row.variants for w in _models(v)})
    return [_question(registry, rng, edges, texts) for _ in range(count)]


def _models(variant: Any) -> set[str]:
    conditions = (variant.when, variant.requires, *(rule.when for rule in variant.rules))
    return {
        str(m) for c in conditions for clause in c.walk() if clause.facet == "model" for m in clause.matcher.mentions
    }


def _question(registry: Registry, rng: random.Random, edges: dict[str, list[int]], models: list[str]) -> dict[str, Any]:
    vocabulary = registry.vocabulary
    arch = rng.choice(list(vocabulary.architectures.values()))
    request: dict[str, Any] = {"head_size": 128}
    extra: dict[str, Any] = {}
    for facet in vocabulary.facets.values():
        # a question near a plain one gets further than one of noise alone
        if facet.of != "request" or (facet.name != "head_size" and rng.random() < 0.55):
            continue
        value = _value(facet, rng, edges, models)
        if facet.name in CORE:
            if value is not None or not CORE[facet.name].required:
                request[facet.name] = value
        else:
            extra[facet.name] = value
    if rng.random() < 0.02:
        extra[rng.choice(["nothing", *vocabulary.facets])] = rng.choice([1, "no such word", True, None])
    if extra:
        request["extra"] = extra
    packages = {
        name: rng.choice(VERSIONS) for name in vocabulary.packages if rng.random() < rng.choice([0.2, 0.6, 0.95])
    }
    platform = {
        "platform": arch.platform if rng.random() < 0.99 else rng.choice(["cuda", "rocm"]),
        "arch": arch.name,
        "flags": sorted(f for f in vocabulary.flags if rng.random() < 0.15),
        "packages": rng.choice([None, packages]),
    }
    names = [*registry.backends, *(f"{r.name}/{v}" for r in registry.backends.values() for v in r.variant_names)]
    backend = rng.choice(names) if rng.random() < 0.25 else None
    return {"request": request, "platform": platform, "backend": backend}


def _value(facet: Any, rng: random.Random, edges: dict[str, list[int]], models: list[str]) -> Any:
    if facet.kind == "words":
        return rng.sample(sorted(facet.words), min(len(facet.words), rng.choice([0, 1, 1, 2, 3])))
    if facet.kind == "text":
        return rng.choice([None, "llama", "no_such_model", *models])
    if facet.kind == "integer":
        near = [n + rng.choice([-1, 0, 0, 0, 1]) for n in edges.get(facet.name, [])]
        value = rng.choice([*_SIZES.get(facet.name, (None,)), *near, rng.randint(1, 1200)])
        return value if value is None or value >= facet.least else facet.least
    value = rng.choice([*facet.words, None])
    return value if rng.random() > 0.005 else "no such word"


def asked(question: dict[str, Any], registry: Registry, *, remedies: bool) -> dict[str, Any]:
    """What attnreg answers: a selection as JSON, or the message of its error."""
    try:
        request, platform = AttentionRequest(**question["request"]), Platform(**question["platform"])
        selection = evaluate(request, platform, registry, question["backend"])
    except RequestError as e:
        return {"error": e.message}
    answer = full_dict(selection)
    for candidate, verdict in zip(answer["candidates"], selection.candidates, strict=True):
        lost = verdict.reasons and not (selection.chosen and selection.chosen.name == verdict.name)
        found = remedy(selection, verdict) if remedies and lost else None
        candidate["would_win"] = found.to_dict() if found else None
    return json.loads(json.dumps(answer))  # type: ignore[no-any-return]


def by_node(script: Path, given: object, *arguments: str) -> Any:
    """What a script of Node prints for some JSON, as JSON."""
    assert NODE is not None
    command = [NODE, str(script), *arguments]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def answers(
    registry: Registry, given: list[Any], *, remedies: bool = False, models: dict[str, Any] | None = None
) -> list[Any]:
    """What the picker's evaluator answers under Node."""
    from picker.registries import registry_document

    asks = {"document": registry_document(registry), "questions": given, "remedies": remedies, "models": models or {}}
    scripts = [f"{name}.js" for name in SCRIPTS]
    answered: list[Any] = by_node(ROOT / "tests/tools/picker/evaluator.js", asks, str(STATIC), *scripts)
    return answered


def documents(registry: Registry, names: Iterable[str]) -> dict[str, Any]:
    """The documents of bundled models, by name."""
    from picker.models import asks

    return {name: _document(name, registry, asks(registry)) for name in names}


_documents: dict[tuple[str, str], Any] = {}


def _document(name: str, registry: Registry, asks: str) -> Any:
    """The document of a bundled model, which registries that ask alike share, as on the site."""
    from picker.models import model_document

    if (name, asks) not in _documents:
        _documents[name, asks] = model_document(_reading(name), registry)
    return _documents[name, asks]


@functools.cache
def _reading(name: str) -> Any:
    from picker.models import Reading

    from attnreg.compile.inputs.bundled import bundled_configs

    return Reading(str(bundled_configs()[name]))


@functools.cache
def bundled(name: str) -> Registry:
    """A bundled registry, loaded once: nothing changes one."""
    return load_registry(name)


def explained(registry: str, config: str, question: Mapping[str, Any]) -> dict[str, Any]:
    """What `attnreg explain --json` prints, without its command."""
    options, platform = question["options"], question["platform"]
    facets = {name: "none" if value is None else value for name, value in options["given"].items()}
    backends = BackendInputs(backend=question["backend"])
    # the command loads the registry for every question
    with mock.patch("attnreg.loader.load_registry", lambda name, *_, **__: bundled(name)):
        inputs = read_inputs(
            RegistryInputs(registry=registry),
            PlatformInputs(arch=(platform["arch"],), flags=tuple(platform["flags"])),
            RequestInputs(
                model=config,
                facets=facets,
                features=tuple(options["features"]),
                tp=options["ranks"],
                lengths=tuple(options.get("lengths", ())),
                extra=tuple(f"{name}={value}" for name, value in options["extra"].items()),
            ),
            backends,
        )
    explanation = explain(
        inputs.questions,
        inputs.platforms,
        inputs.registry,
        backend=backends.backend,
        title=inputs.title,
        notes=inputs.notes,
        memory=inputs.memory,
    )
    answer = json.loads(json.dumps(explanation.to_dict()))
    # the evaluator says nothing of it: it is settled after the selections, by rules that a page does not have
    answer.pop("block_sizes", None)
    return answer  # type: ignore[no-any-return]
