"""`decision` beside decisions that SGLang's own code made, as `tools/record/sglang_decisions.py` records them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from functools import cache
from typing import Any
from unittest import mock

import yaml

from attnreg.engines import sglang
from attnreg.language.vocabulary import Word
from attnreg.loader import load_registry
from attnreg.models.fields import facets_of
from support import DATA, ROOT

BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
ANSWERED = ("speculative_draft_attention_backend", "page_size", "kv_cache_dtype")
# the release whose classes are recorded beside the models of its table
CLASSES = "0.5.23"
_UNKNOWN = "not known: "
_FACTS = {"head_dim": "head_size", "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads"}
# facets that an answer has from elsewhere
_GIVEN = ("architecture", "served", "asked_kv_dtype")


@cache
def classes() -> Mapping[str, Word]:
    """The models of classes-0.5.23.jsonl.gz: what SGLang stated of each, and what the registry reads of its config."""
    registry = load_registry(f"sglang-{CLASSES}")
    where = next(iter(registry.vocabulary.words["recorded_models"].values())).where
    configs = yaml.safe_load((ROOT / "tools/record/sglang_models.yaml").read_text(encoding="utf-8"))
    found: dict[str, Word] = {}
    with gzip.open(DATA / f"sglang/classes-{CLASSES}.jsonl.gz", "rt") as file:
        for row in map(json.loads, file):
            if stated := row["out"].get("model"):
                name = row["in"]["model"]
                config = {"architectures": [name.partition("#")[0]], **configs[name]}
                facts = facets_of(config, registry.vocabulary.facets.values(), (), {})
                facts = {facet: value for facet, value in facts.items() if facet not in _GIVEN}
                facts |= {ours: stated[theirs] for theirs, ours in _FACTS.items()}
                facts["attention"] = "mha"
                if stated["attention_arch"] == "MLA":
                    sparse = config.get("text_config", config).get("index_topk")
                    facts["attention"] = "mla_sparse" if sparse else "mla"
                if stated["v_head_dim"] != stated["head_dim"]:
                    facts["head_size_v"] = stated["v_head_dim"]
                found[name] = Word(name=name, legend="A class that steps name.", where=where, facts=facts)
    return found


def answered(row: dict[str, Any]) -> dict[str, Any]:
    """`decision` of a row, whose model may be one of `classes`."""
    if row["in"]["version"] != CLASSES or row["in"]["model"] not in classes():
        return sglang.decision(row["in"])
    with mock.patch.object(sglang, "_models", return_value=classes()):
        return sglang.decision(row["in"])


def unknown(row: dict[str, Any]) -> bool:
    """Whether the registry says that it does not know the decision."""
    return str(answered(row)["error"]).startswith(_UNKNOWN)


def difference(row: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What `decision` answers otherwise than SGLang did: name -> (answer, SGLang's). "not known" differs too."""
    answer, out = answered(row), row["out"]
    if out["error"] or answer["error"]:
        refused = out["error"] and out["error"]["in"]
        got = answer["error"] and (answer["decided_by"] or answer["error"])
        return {} if got == refused else {"refused by": (got, refused)}
    pairs = {name: (answer[name], _of_phase(out, name)) for name in ("prefill", "decode")}
    pairs |= {name: (answer[name], out[name]) for name in ANSWERED}
    pairs["decided_by"] = (answer["decided_by"], _writer(out["trace"], "attention_backend"))
    for field in (*BACKENDS, *ANSWERED):
        pairs[f"writer of {field}"] = (_writer(answer["trace"], field), _writer(out["trace"], field))
    if "refused_later" in out:
        # the factories ran; the classes that they build did not
        said = [later for later in answer["refused_later"] if not later[2].startswith("FlashInfer is not there")]
        pairs["refused later"] = (bool(said), bool(out["refused_later"]))
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _writer(trace: list[Any], field: str) -> str | None:
    return next((step for step, fields in reversed(trace) if field in fields), None)


def _of_phase(out: dict[str, Any], name: str) -> Any:
    return out[f"{name}_attention_backend"] or out["attention_backend"]
