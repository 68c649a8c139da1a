"""Whether a draft can draft for a model, as far as their configs show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from attnreg.errors import RequestError
from attnreg.models.fields import read_config
from attnreg.models.questions import MTP

if TYPE_CHECKING:
    from attnreg.models.questions import ModelQuestions

# fields of a draft that reads the hidden states of its model, and of no model that stands alone
_READS = ("target_hidden_size", "backbone_hidden_size")
_OF_HEADS = (*_READS, "draft_vocab_size", "num_target_layers", "eagle_config", "dflash_config")
_ENCODERS = ("encoder", "encoder_only")
# vLLM 0.25 and later serve such a draft if the user says so (SpeculativeConfig)
_OTHER_VOCABULARY = "; attnreg does not read vLLM's use_heterogeneous_vocab"
_TEXT = ("text_config", "language_config", "llm_config", "thinker_config")


def refuse_foreign_draft(config: str, draft: str | None) -> list[str]:
    """Raise `RequestError` if the draft is no draft of the model: it has another vocabulary, or reads other states.

    A draft that reads hidden states may have a vocabulary of its own, and a model's own MTP layers are no other draft.
    Returns a note if the configs leave it open.
    """
    if draft in (None, MTP):
        return []
    target, own = (dict(_fields(read_config(path)[1])) for path in (config, draft))
    if not any(name in own for name in _OF_HEADS):
        sentence = "the draft has a vocabulary of {} tokens, the model one of {}"
        _compare(target, own, "vocab_size", "vocab_size", sentence, _OTHER_VOCABULARY)
        if all(type(fields.get("vocab_size")) is int for fields in (target, own)):
            return []
        return ["a config has no vocab_size: attnreg cannot tell whether the draft has the model's vocabulary"]
    reads = next((name for name in _READS if own.get(name)), "hidden_size")
    _compare(target, own, "hidden_size", reads, "the draft reads hidden states of {} elements, the model has {}")
    read = own.get("target_layer_ids")
    # in vLLM's K3DSparkConfig it is the number of layers that the draft reads
    if not isinstance(read, list) or own.get("num_target_layers") != len(read):
        sentence = "the draft is for a model of {} layers, the model has {}"
        _compare(target, own, "num_hidden_layers", "num_target_layers", sentence)
    return []


def refuse_encoders(model: ModelQuestions) -> None:
    """Raise `RequestError` if the draft of a model has an encoder: it cannot go on with another model's tokens."""
    for draft in (memory.model for memory in model.memory.models[1:]):
        asked = (group.request for group in draft.groups)
        if any(r is not None and r.role == "draft" and r.attn_type in _ENCODERS for r in asked):
            message = f"{draft.name} has an encoder, so it drafts for no other model"
            raise RequestError(message, "give --draft a decoder")


def _compare(
    target: Mapping[str, Any], draft: Mapping[str, Any], of_target: str, of_draft: str, sentence: str, more: str = ""
) -> None:
    ours, theirs = target.get(of_target), draft.get(of_draft)
    if type(ours) is int and type(theirs) is int and ours != theirs:
        raise RequestError(sentence.format(f"{theirs:,}", f"{ours:,}"), f"give --draft a draft of this model{more}")


def _fields(data: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a config; those of its text model replace its own."""
    yield from data.items()
    for name in _TEXT:
        inner = data.get(name)
        if isinstance(inner, Mapping):
            yield from _fields(inner)
