"""A model as JSON: what its layers ask for, for every KV dtype of a registry and every usual number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnreg.language.vocabulary import Facet
from attnreg.models.facts import LayerFacts, of_layers
from attnreg.models.fields import ConfigError, facets_of
from attnreg.models.groups import ModelLayers, scores, words_after_sizes
from attnreg.models.kv_memory import KvMemory, Memory, kv_memory
from attnreg.models.questions import group_layers, headline, stack_of
from attnreg.models.ranks import per_rank
from attnreg.models.reader import requests_from_model
from attnreg.registry import Registry
from attnreg.selection.wording import feature_words
from picker.expressions import Tables

RANKS = (1, 2, 4, 8, 16)
# the option left out; the field None is `none`, as for the command
NOT_STATED = ""

Spares = Sequence[Mapping[str, Any]]


def asks(registry: Registry) -> str:
    """What a model's document depends on in a registry, as text: registries with the same share the documents."""
    return f"{registry.vocabulary.words['kv_dtypes']} {_read_from_configs(registry)}"


def _read_from_configs(registry: Registry) -> list[Facet]:
    return [facet for facet in registry.vocabulary.facets.values() if facet.config]


def _of_layers(facet: Facet) -> bool:
    """Whether a facet is read from what the model's layers say, which depends on what is asked."""
    return any(name.startswith("layers.") for name in facet.config)


class Reading:
    """A config, read once for each KV dtype and shared out over ranks once, however many registries ask."""

    def __init__(self, config: str) -> None:
        self.config = config
        self._kept: dict[str, ModelLayers | ConfigError] = {}

    def layers(self, kv_dtype: str | None, spares: Spares, ranks: int) -> ModelLayers:
        """The layers on one rank. Raises `ConfigError` for heads that do not divide, or what is wrong with the config.

        spares: the rules of the KV dtype's word for layers that keep another cache.
        """
        key = f"{kv_dtype} {spares} {ranks}"
        if key not in self._kept:
            try:
                self._kept[key] = self._read(kv_dtype, spares, ranks)
            except ConfigError as e:
                self._kept[key] = e
        kept = self._kept[key]
        if isinstance(kept, ConfigError):
            raise kept
        return kept

    def _read(self, kv_dtype: str | None, spares: Spares, ranks: int) -> ModelLayers:
        if ranks == 1:
            return requests_from_model(self.config, kv_dtype=kv_dtype, spares=spares)
        return per_rank(self.layers(kv_dtype, spares, 1), ranks)


def model_document(reading: Reading, registry: Registry) -> dict[str, Any]:
    """The model of a config as JSON-ready values. Raises `ConfigError` for what is wrong with the config.

    The answer to a KV dtype and a number of ranks is a case: an error, or the groups of layers with their requests,
    the notes, and the bytes of the KV cache. ``stated`` are the registry's facets that the config states, those of a
    case the ones that its layers do.
    """
    words = registry.vocabulary.words["kv_dtypes"]
    tables, answers = Tables(), {}
    # a config that cannot be read is an error of the whole document
    main = reading.layers("auto", _spares("auto", words), 1)
    for option in (NOT_STATED, "none", *words):
        kv_dtype = {NOT_STATED: "auto", "none": None}.get(option, option)
        for ranks in RANKS:
            try:
                model = reading.layers(kv_dtype, _spares(kv_dtype or "auto", words), ranks)
            except ConfigError as e:
                case: dict[str, Any] = {"error": str(e)}
            else:
                case = _case(model, kv_dtype or "auto", registry, tables)
                said = of_layers(model.layers) | {"kv_dtype": kv_dtype if option else None}
                case["stated"] = facets_of({}, [f for f in _read_from_configs(registry) if _of_layers(f)], (), said)
            answers[f"{option}|{ranks}"] = tables.add("cases", case)
    stated = facets_of(reading.config, [f for f in _read_from_configs(registry) if not _of_layers(f)], (), {})
    lengths = sorted({8192, main.max_length} if main.max_length else {8192})
    empty: dict[str, list[Any]] = {"cases": [], "groups": [], "labels": [], "requests": []}
    return {
        "name": main.name,
        "head": headline(main),
        "lengths": lengths,
        "stated": stated,
        "answers": answers,
        **empty,
        **tables.to_dict(),
    }


def _spares(kv_dtype: str, words: Mapping[str, Any]) -> Spares:
    spares: Spares = words[kv_dtype].facts.get("spares", ()) if kv_dtype in words else ()
    return spares


def _case(model: ModelLayers, kv_dtype: str, registry: Registry, tables: Tables) -> dict[str, Any]:
    memory = kv_memory(model, kv_dtype, registry.vocabulary.words)
    groups = []
    for group in model.groups:
        about = {
            "label": tables.add("labels", group.label),
            "layers": group_layers(group),
            "indices": list(group.layers),
            "stack": "|".join(map(str, (*stack_of(group.facts), group.facts.kind))),
            "phrases": _phrases(group.facts) if group.request is not None else {},
            "beside": words_after_sizes(group.facts) if group.request is not None else [],
        }
        request = None if group.request is None else tables.add("requests", group.request.to_dict())
        groups.append([tables.add("groups", about), request])
    return {
        "dtype": model.dtype,
        "notes": list(model.assumptions),
        "groups": groups,
        "memory": [
            {"token_bytes": g.token_bytes, "keeps": g.keeps, "compress": g.compress, "told": told}
            for g, told in zip(memory.groups, _told(memory), strict=True)
        ],
    }


def _told(memory: KvMemory) -> list[dict[str, Any]]:
    """What the JSON of an explanation says of each group beside its layers and its bytes."""
    counted = ("label", "layers", "bytes_per_token", "bytes_at")
    groups = Memory((memory,), ()).to_dict()["groups"]
    return [{name: value for name, value in group.items() if name not in counted} for group in groups]


def _phrases(facts: LayerFacts) -> dict[str, str]:
    """Feature -> its phrase, where the layer's facts have its number."""
    numbers = {feature: number for feature, number in scores(facts).items() if number}
    return {feature: feature_words({feature: number})[0] for feature, number in numbers.items()}
