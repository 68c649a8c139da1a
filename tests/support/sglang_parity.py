"""`decision` beside decisions that SGLang's own code made, as `tools/record/sglang_decisions.py` records them."""

from __future__ import annotations

from typing import Any

from attnreg.engines.sglang import decision

BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
ANSWERED = ("speculative_draft_attention_backend", "page_size", "kv_cache_dtype")
_UNKNOWN = "not known: "


def unknown(row: dict[str, Any]) -> bool:
    """Whether the registry says that it does not know the decision."""
    return str(decision(row["in"])["error"]).startswith(_UNKNOWN)


def difference(row: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What `decision` answers otherwise than SGLang did: name -> (answer, SGLang's). "not known" differs too."""
    answer, out = decision(row["in"]), row["out"]
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
