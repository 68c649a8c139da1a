"""A model as JSON: what its layers ask for, for every KV dtype of a registry and every usual number of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attnreg.models.facts import LayerFacts
from attnreg.models.fields import ConfigError
from attnreg.models.groups import ModelLayers, scores, words_beside
from attnreg.models.kv_memory import kv_memory
from attnreg.models.questions import ModelOptions, group_layers, model_layers
from attnreg.registry import Registry
from attnreg.selection.wording import feature_words
from picker.expressions import Tables

RANKS = (1, 2, 4, 8, 16)
# the option left out; the field None is `none`, as for the command
NOT_STATED = ""


def asks(registry: Registry) -> str:
    """What a model's document depends on in a registry, as text: registries with the same share the documents."""
    facets = [(f.name, f.config) for f in registry.vocabulary.facets.values() if f.config]
    return f"{registry.vocabulary.words['kv_dtypes']} {facets}"


def model_document(config: str, registry: Registry, kv_dtypes: Iterable[str] | None = None) -> dict[str, Any]:
    """The model of a config as JSON-ready values. Raises `ConfigError` for what is wrong with the config.

    The answer to a KV dtype and a number of ranks is a case: an error, or the groups of layers with their requests,
    the notes, and the bytes of the KV cache.
    """
    words = registry.vocabulary.words["kv_dtypes"]
    tables, answers = Tables(), {}
    # a config that cannot be read is an error of the whole document
    main, head = model_layers(config, ModelOptions(), registry)
    for kv_dtype in kv_dtypes if kv_dtypes is not None else (NOT_STATED, "none", *words):
        given = {} if kv_dtype == NOT_STATED else {"kv_dtype": None if kv_dtype == "none" else kv_dtype}
        for ranks in RANKS:
            try:
                model, head = model_layers(config, ModelOptions(given=given, ranks=ranks), registry)
            except ConfigError as e:
                case: dict[str, Any] = {"error": str(e)}
            else:
                case = _case(model, head, given.get("kv_dtype") or "auto", registry, tables)
            answers[f"{kv_dtype}|{ranks}"] = tables.add("cases", case)
    lengths = sorted({8192, main.max_length} if main.max_length else {8192})
    empty: dict[str, list[Any]] = {"cases": [], "groups": [], "labels": [], "requests": []}
    return {"name": main.name, "lengths": lengths, "answers": answers, **empty, **tables.to_dict()}


def _case(model: ModelLayers, head: str, kv_dtype: str, registry: Registry, tables: Tables) -> dict[str, Any]:
    memory = kv_memory(model, kv_dtype, registry.vocabulary.words["kv_dtypes"])
    groups = []
    for group in model.groups:
        about = {
            "label": tables.add("labels", group.label),
            "layers": group_layers(group),
            "indices": list(group.layers),
            "phrases": _phrases(group.facts) if group.request is not None else {},
            "beside": words_beside(group.facts) if group.request is not None else [],
        }
        request = None if group.request is None else tables.add("requests", group.request.to_dict())
        groups.append([tables.add("groups", about), request])
    return {
        "head": head,
        "dtype": model.dtype,
        "notes": list(model.assumptions),
        "groups": groups,
        "memory": [
            {"token_bytes": g.token_bytes, "keeps": g.keeps, "what": g.what, "compress": g.compress}
            for g in memory.groups
        ],
    }


def _phrases(facts: LayerFacts) -> dict[str, str]:
    """Feature -> its phrase, where the layer's facts have its number."""
    numbers = {feature: number for feature, number in scores(facts).items() if number}
    return {feature: feature_words({feature: number})[0] for feature, number in numbers.items()}
