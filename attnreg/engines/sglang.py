"""SGLang's decisions for a server, from the data of its registry alone, under SGLang's own names.

>>> from attnreg.engines.sglang import decision
>>> decision({"platform": "cuda", "arch": "sm90", "model": "LlamaForCausalLM"})["prefill"]
'fa3'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from attnreg.compile.inputs.bundled import release_name
from attnreg.errors import RequestError, did_you_mean, shown, word_set
from attnreg.loader import load_registry
from attnreg.platforms import Platform
from attnreg.request import AttentionRequest
from attnreg.selection.selector import evaluate

if TYPE_CHECKING:
    from attnreg.registry import Registry
    from attnreg.selection.trace import Selection

# a version prefix that selects the newest release
_NEWEST = "0"
# SGLang's names of two facets that every registry has
_OWN = {"page_size": "block_size", "kv_cache_dtype": "kv_dtype"}
_PLACE = ("version", "platform", "arch", "flags", "model", "sampling", "tp_size")
_ANSWERED = ("speculative_draft_attention_backend", "page_size", "kv_cache_dtype")


def decision(given: Mapping[str, Any], release: str | None = None) -> dict[str, Any]:
    """SGLang's decisions for a server: the backend of each phase, and the resolved arguments.

    release: a bundled release, such as 0.5.14; by default the ``version`` of ``given``, else the newest.

    given:

    - ``platform``, ``arch`` and ``flags``: the machine. A flag is ``no-PACKAGE``, ``amx``, or a flag of the registry.
    - ``model``: one of `models`.
    - ``tp_size``, and SGLang's ``version``.
    - arguments of SGLang's `ServerArgs` under their names. None means that an argument is not given.

    Returns:

    - ``error``: the sentence of a refusal, or None. It begins with ``not known: `` where the registry does not know.
    - ``decided_by``: the step that last wrote the backend of both phases, or that refuses. None: the user's choice.
    - ``trace``: every step with the values that it wrote.
    - without an error: ``prefill``, ``decode``, ``speculative_draft_attention_backend``, ``page_size`` and
      ``kv_cache_dtype``.
    - without an error: ``refused_later``, with phase, backend and sentence. The server then stops when it builds the
      model.

    Raises `RequestError` for an argument, a word or a model that the registry does not know, and `RegistryError` for a
    release that is not bundled.
    """
    if not isinstance(given, Mapping):
        raise RequestError(f"what is given is {shown(given)}; expected a mapping of arguments")
    version = _word("version", given) if given.get("version") is not None else _NEWEST
    registry = _registry(release or version)
    platform = _platform(given, registry)
    asked = replace(_request(given, registry), phase="prefill")
    prefill = evaluate(asked, platform, registry)
    if prefill.silence:
        return {"error": f"not known: {prefill.silence}", "decided_by": None, "trace": []}
    start = prefill.start
    assert start is not None
    trace = [[t.name, {_named(f): _written(f, v, registry) for f, (_, v) in t.sets.items()}] for t in start.taken]
    if start.refusal is not None:
        said = "not known: " if prefill.unknown else ""
        return {"error": f"{said}{start.refusal.effect.refuses}", "decided_by": start.refusal.name, "trace": trace}
    decode = evaluate(replace(asked, phase="decode"), platform, registry)
    # the registry's last step only copies the answer for the phase; it is not a step of SGLang
    decided = start.decided_by("attention_backend")
    answer = {name: _written(_OWN.get(name, name), start.facts[_OWN.get(name, name)], registry) for name in _ANSWERED}
    return {
        "error": None,
        "prefill": prefill.backend and prefill.backend.name,
        "decode": decode.backend and decode.backend.name,
        **answer,
        "decided_by": decided and decided.name,
        "refused_later": _refused_later("prefill", prefill) + _refused_later("decode", decode),
        "trace": trace[:-1],
    }


def models(release: str | None = None) -> tuple[str, ...]:
    """The models that `decision` knows for a bundled release, by default the newest."""
    return tuple(_models(_registry(release or _NEWEST)))


@cache
def _registry(release: str) -> Registry:
    return load_registry(release_name(f"sglang-{release.removeprefix('sglang-')}"))


def _models(registry: Registry) -> Mapping[str, Any]:
    return registry.vocabulary.words["recorded_models"]


def _named(facet: str) -> str:
    return next((name for name, own in _OWN.items() if own == facet), facet)


def _written(facet: str, value: Any, registry: Registry) -> Any:
    """A value in SGLang's spelling, which some words have as the fact ``written``."""
    words = registry.vocabulary.words.get(registry.vocabulary.facets[facet].word_set or "", {})
    return words[value].facts.get("written", value) if value in words else value


def _read(facet: str, value: Any, registry: Registry) -> Any:
    words = registry.vocabulary.words.get(registry.vocabulary.facets[facet].word_set or "", {})
    return next((name for name, word in words.items() if word.facts.get("written") == value), value)


def _word(name: str, given: Mapping[str, Any]) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{name} is {shown(value)}; expected a word")
    return value


def _ranks(given: Mapping[str, Any]) -> int:
    ranks = given.get("tp_size")
    if ranks is not None and (type(ranks) is not int or ranks < 1):
        raise RequestError(f"tp_size is {shown(ranks)}; expected a number of ranks, at least 1")
    return ranks or 1


def _platform(given: Mapping[str, Any], registry: Registry) -> Platform:
    arch, flags, packages = _word("arch", given), set(), set(registry.vocabulary.packages)
    for flag in word_set("flags", given.get("flags") or ()):
        if flag.startswith("no-"):
            absent = {n for n, word in registry.vocabulary.packages.items() if word.facts.get("import") == flag[3:]}
            if not absent:
                raise RequestError(f"flags names {flag!r}, and {registry.title} knows no package {flag[3:]!r}")
            packages -= absent
        elif f"{arch}_{flag}" in registry.vocabulary.architectures:
            arch = f"{arch}_{flag}"
        else:
            flags.add(flag)
    present = tuple((name, "") for name in sorted(packages))
    return Platform(platform=_word("platform", given), arch=arch, flags=frozenset(flags), packages=present)


def _request(given: Mapping[str, Any], registry: Registry) -> AttentionRequest:
    model, known = _word("model", given), _models(registry)
    if model not in known:
        raise RequestError(f"{registry.title} has no facts of {model!r}", did_you_mean(model, known))
    facets = registry.vocabulary.facets
    facts = {name: value for name, value in known[model].facts.items() if name in facets and name != "num_kv_heads"}
    ranks = _ranks(given)
    if "num_heads" in facts:
        facts["num_heads"] = max(1, facts["num_heads"] // ranks)
    facts["architecture"] = model.partition("#")[0]
    for name, value in given.items():
        if name in _PLACE or value is None:
            continue
        facet = _OWN.get(name, name)
        if facet not in facets or name in _OWN.values():
            known_names = [_named(f) for f, about in facets.items() if about.of == "request"]
            raise RequestError(f"{registry.title} does not cover {name}", did_you_mean(name, known_names))
        facts[facet] = _read(facet, value, registry)
    fields = AttentionRequest.__dataclass_fields__
    extra = tuple((name, value) for name, value in facts.items() if name not in fields)
    return AttentionRequest(**{name: value for name, value in facts.items() if name in fields}, extra=extra)


def _refused_later(phase: str, selection: Selection) -> list[list[str]]:
    backend = selection.backend
    fails = [follows.text for follows in selection.consequences if follows.kind == "fails"]
    return [[phase, backend.name, text] for text in fails] if backend is not None else []
