"""Whether a draft can draft for a model, as far as their configs show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from attnreg.analysis.check.finding import Finding
from attnreg.engines.settings import settings_of
from attnreg.errors import RequestError
from attnreg.models.fields import ConfigError, read_config
from attnreg.models.questions import MTP

if TYPE_CHECKING:
    from attnreg.engines.deploy.launch import EngineLaunch
    from attnreg.engines.surroundings import Surrounded
    from attnreg.models.questions import ModelQuestions
    from attnreg.registry import Registry

# fields of a draft that reads the hidden states of its model, and of no model that stands alone
_READS = ("target_hidden_size", "backbone_hidden_size")
_OF_HEADS = (*_READS, "draft_vocab_size", "num_target_layers", "eagle_config", "dflash_config")
_ENCODERS = ("encoder", "encoder_only")
# vLLM 0.25 and later serve such a draft if the user says so (SpeculativeConfig)
_OTHER_VOCABULARY = "; attnreg does not read vLLM's use_heterogeneous_vocab"
# a class whose width of states is its model's, whatever its own is (DFlashLagunaModel)
_OF_MODEL = ("DFlashLagunaForCausalLM", "LagunaForCausalLM")
# what engines make of a draft for another number of layers (SGLang: resolve_spec_aux_hidden_state)
_GO_ON = {"sglang": "the engine warns of it, and goes on", "vllm": "vLLM does not compare them, and goes on"}
# the type of drafts whose `num_target_layers` is the number of layers that they read (vLLM: K3DSparkConfig)
_COUNTS_READ = "k3_dspark"
_TEXT = ("text_config", "language_config", "llm_config", "thinker_config")


def refuse_foreign_draft(config: str, draft: str | None, registry: Registry) -> list[str]:
    """Raise `RequestError` if the draft is no draft of the model: it has another vocabulary, or reads other states.

    A draft that reads hidden states may have a vocabulary of its own, and a model's own MTP layers are no other draft.
    Returns a note if the configs leave it open.
    """
    if draft in (None, MTP):
        return []
    target, own = (dict(_fields(read_config(path)[1])) for path in (config, draft))
    if not any(name in own for name in _OF_HEADS):
        sentence = "the draft has a vocabulary of {} tokens, the model one of {}"
        more = _OTHER_VOCABULARY if "vllm" in registry.sources else ""
        _compare(target, own, "vocab_size", "vocab_size", sentence, more)
        if all(type(fields.get("vocab_size")) is int for fields in (target, own)):
            return []
        return ["a config has no vocab_size: attnreg cannot tell whether the draft has the model's vocabulary"]
    reads = next((name for name in _READS if own.get(name)), "hidden_size")
    if reads != "hidden_size" or not {*_OF_MODEL}.intersection(own.get("architectures") or ()):
        _compare(target, own, "hidden_size", reads, "the draft reads hidden states of {} elements, the model has {}")
    layers, read = own.get("num_target_layers"), own.get("target_layer_ids")
    if own.get("model_type") == _COUNTS_READ:
        if "vllm" in registry.sources and not (isinstance(read, list) and read and layers == len(read)):
            message = f"the draft has num_target_layers {layers}, which is not the number of its target_layer_ids"
            raise RequestError(message, "give --draft a config whose target_layer_ids name that many layers")
        return []
    ours = target.get("num_hidden_layers")
    if type(layers) is not int or type(ours) is not int or layers == ours:
        return []
    what = next((words for engine, words in _GO_ON.items() if engine in registry.sources), "an engine may go on")
    return [f"the draft is for a model of {layers:,} layers, the model has {ours:,}: {what}"]


def refuse_encoders(model: ModelQuestions) -> None:
    """Raise `RequestError` if the draft of a model has an encoder: it cannot go on with another model's tokens."""
    for draft in (memory.model for memory in model.memory.models[1:]):
        asked = (group.request for group in draft.groups)
        if any(r is not None and r.role == "draft" and r.attn_type in _ENCODERS for r in asked):
            message = f"{draft.name} has an encoder, so it drafts for no other model"
            raise RequestError(message, "give --draft a decoder")


def compared_draft(launch: EngineLaunch, around: Surrounded) -> list[Finding]:
    """The finding of a draft that does not fit its model, which is then left out; an empty list if it fits."""
    try:
        around.assumed += refuse_foreign_draft(around.model, around.draft or None, around.registry)
    except (ConfigError, RequestError) as error:
        return without_draft(launch, around, error)
    return []


def without_draft(launch: EngineLaunch, around: Surrounded, error: ConfigError | RequestError) -> list[Finding]:
    """The finding about the draft of a launch, which is left out of ``around``."""
    subject, around.draft = around.draft, ""
    kinds = {option.where: settings_of(launch.engine).of_option(option.name) for option in launch.options}
    where = next((at for at, setting in kinds.items() if setting and setting.kind == "draft"), launch.where)
    told, help_ = (error.message, error.help) if isinstance(error, RequestError) else (str(error), "")
    message = f"no draft of this model: {launch.hidden(told)}"
    return [Finding("refused-draft", (launch.shown(subject),), where, message, help_.replace(" --draft", "", 1))]


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
