"""Reads a model's config.json by the rules of its family: the facts and the request of each layer."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from attnreg.compile.inputs.bundled import joined_families, registry_root
from attnreg.compile.inputs.configs import config_path
from attnreg.compile.source.yaml_source import Document
from attnreg.errors import RequestError, escaped, plain_word
from attnreg.models.facts import MIXERS, UNREAD, LayerFacts, MlaDims, request_of
from attnreg.models.families import UNKNOWN, Families
from attnreg.models.fields import (
    MAX_NUMBER,
    ConfigError,
    ConfigFields,
    UndescribedMtpError,
    mapping,
    read_config,
    refuse_draft,
    show,
)
from attnreg.models.groups import LayerGroup, ModelLayers, describe_indices, group
from attnreg.models.stack import Family, Stack
from attnreg.request import with_extra
from attnreg.selection.wording import facet_words

__all__ = [
    "ConfigError",
    "LayerFacts",
    "LayerGroup",
    "MlaDims",
    "ModelLayers",
    "bundled_families",
    "describe_indices",
    "families_of",
    "requests_from_model",
]

_ACCEPTED = "give the config of a transformer"
_MAX_DEPTH = 4
_NO_DTYPE = (
    "The config has no dtype. Engines then use the dtype of the weights, which attnreg does not read. "
    "bfloat16 is assumed."
)
_DTYPES = {w: w for w in ("float16", "bfloat16", "float32")} | {"half": "float16", "float": "float32"}
_TEXT = ("text_config", "language_config", "llm_config", "thinker_config")
_TOWERS = ("vision_config", "audio_config", "speech_config", "encoder_config")


@functools.cache
def bundled_families() -> Families:
    """The families of the registry. Messages name the file of a family as a checkout has it."""
    directory, label = registry_root() / "models", "registry/models"
    texts = joined_families(directory)
    return Families.load(directory, label) if texts is None else Families.of(texts, label)


@functools.cache
def families_of(registry: str) -> Families:
    """The families by which a bundled registry's engine reads configs: those of transformers, and its own over them.

    registry: the registry's name, such as vllm-0.33.0. The engine's own files are in ``engines/vllm/models``; those in
    ``engines/vllm/models-until-0.28.0`` are for this release and earlier ones.
    """
    engine, families = registry.rpartition("-")[0], bundled_families()
    above = registry_root() / "engines" / engine
    if not engine or not above.is_dir():
        return families
    earlier = [folder for folder in above.glob("models-until-*") if _release(registry) <= _release(folder.name)]
    # the files for the fewest releases stand for all others
    for folder in (above / "models", *sorted(earlier, key=lambda folder: _release(folder.name), reverse=True)):
        if folder.is_dir():
            families = _over(families, Families.load(folder, f"registry/engines/{engine}/{folder.name}"))
    return families


def _release(name: str) -> tuple[int, ...]:
    """The numbers of the release at the end of a name."""
    return tuple(int(number) for number in name.rpartition("-")[2].split(".") if number.isdecimal())


def _over(below: Families, above: Families) -> Families:
    """The families of two directories. A file of ``above`` replaces that of ``below`` with its name."""

    def read(name: str) -> Document:
        return (above if name in above.files else below).document(name)

    return Families({*below.files, *above.files}, read, below.label)


def requests_from_model(
    config: object,
    *,
    role: str = "target",
    dtype: str | None = None,
    kv_dtype: str | None = "auto",
    block_size: int | None = None,
    mtp: bool = False,
    skip_layers: Sequence[Mapping[str, Any]] = (),
    families: Families | None = None,
) -> ModelLayers:
    """The facts and the request of each layer of a Hugging Face model.

    ``config`` is the path of a config.json or of its directory, a mapping, or an object with a ``to_dict`` method. It
    may also be a model's id in the hub's cache, or the name of one of attnreg's examples. ``dtype`` overrides the
    config's own. ``families`` are the rules of model families; by default the registry's. ``mtp`` returns the layers
    that predict further tokens, which draft for the model, instead of the model's own.

    ``skip_layers``, a fact of some KV dtypes, are rules for layers with another request. The key ``ask`` has the facets
    that such a rule sets. The first rule that fits a layer counts. A layer that reads another layer's keys and values
    follows the rule of that layer.

    General rules read a family that ``families`` lacks; ``assumptions`` then lists what they assume. Raises
    `ConfigError` (a ValueError) for a config that attnreg cannot read, and `attnreg.RequestError` for an argument that
    no request can have.
    """
    try:
        source, data = read_config(config_path(config) if isinstance(config, str) else config)
    except RequestError as e:
        raise ConfigError(str(e)) from None
    dtype = dtype and plain_word("dtype", dtype)
    reading = _Reading(families or bundled_families(), f"{source}: " if source else "", mtp)
    if role != "draft":
        refuse_draft(data, reading.where)
    reading.read(data, reading.where)
    outer = ConfigFields(data, reading.where)
    model_type = outer.word("model_type")
    dtype = dtype or _dtype([outer, *reading.texts], reading.notes)
    model = model_type or next((fields.word("model_type") for fields in reading.texts), "") or None
    given = {"role": role, "dtype": dtype, "kv_dtype": kv_dtype, "block_size": block_size, "model": model}
    requested = functools.cache(lambda facts, attn_type: request_of(facts, attn_type, given))
    skip_rules = reading.skip_rules([rule for rule in skip_layers if model in rule.get("models", (model,))])
    request_by_rule = functools.cache(
        lambda asked, facts, attn_type: request_of(facts, attn_type, {**given, **with_extra(dict(asked))})
    )
    layers = tuple(
        facts.changed(
            layer_idx=i,
            kv_shared_from=shared,
            state=facts.state and facts.state._replace(model_dtype=dtype),
            request=requested(facts, attn_type)
            if rule is None
            else request_by_rule((*rule["ask"].items(),), facts, attn_type),
        )
        for (i, facts, attn_type, shared), rule in zip(reading.layers, skip_rules, strict=True)
    )
    if not layers and mtp:
        counted = [name for family in reading.described if family.mtp for name in family.mtp.names]
        # vLLM's class may take one layer where the field is missing (qwen3_next_mtp.py)
        said = any(fields.value(name) is not None for fields in (outer, *reading.texts) for name in counted)
        why = f"{counted[0]} is missing or 0" if counted else f"attnreg describes none of {model_type or 'this config'}"
        message = f"{reading.where}there are no MTP layers to draft"
        raise ConfigError(f"{message}: {why}") if said else UndescribedMtpError(message, why)
    if not layers:
        why = "".join(f" ({family.note})" for family in reading.described if family.note)
        raise ConfigError(f"{reading.where}no layer of {model_type} is one that attnreg describes{why}; {_ACCEPTED}")
    if any(facts.chunk is not None for facts in layers):
        reading.notes.append(
            "Chunked layers ask for causal attention: an engine runs each chunk as a sequence of its own."
        )
    name = escaped(_name(source, data.get("_name_or_path")) or model_type or "unknown")
    notes = tuple(dict.fromkeys(reading.notes))
    longest = _longest([outer, *reading.texts])
    return ModelLayers(name, model or "unknown", dtype, layers, group(layers), notes, longest, defaults=reading.absent)


def mtp_from_model(config: str, **options: Any) -> ModelLayers:
    """The MTP layers of a model, as `requests_from_model` gives them; one unread group if attnreg describes none."""
    try:
        return requests_from_model(config, mtp=True, **options)
    except UndescribedMtpError as error:
        why = error.why
        model = requests_from_model(config, **options | {"role": "target"})
    first = LayerFacts(layer_idx=len({facts.layer_idx for facts in model.layers}), kind=UNREAD)
    note = f"Neither the number of the MTP layers nor what they ask for is known: {why}."
    groups = (LayerGroup("not known", (first.layer_idx,), None, first, named="MTP layers"),)
    return ModelLayers(model.name, model.model_type, model.dtype, (first,), groups, (note,))


@dataclass(eq=False, repr=False)
class _Reading:
    """The state of the reading of one config: its layers in order, and the assumptions."""

    families: Families
    where: str
    mtp: bool = False
    layers: list[tuple[int, LayerFacts, str, int | None]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    texts: list[ConfigFields] = field(default_factory=list)
    described: list[Family] = field(default_factory=list)
    absent: dict[str, Any] = field(default_factory=dict)

    def skip_rules(self, rules: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any] | None]:
        """The rule of ``skip_layers`` that applies to each of ``layers``; None for the other layers and for towers."""
        outermost = {count: self._outermost(count) for rule in rules if (count := rule.get("ends"))}

        def fits(rule: Mapping[str, Any], i: int, facts: LayerFacts) -> bool:
            if "window" in rule:
                return facts.sliding_window is not None and facts.sliding_window <= rule["window"]
            return i in (rule["layers"] if "layers" in rule else outermost[rule["ends"]])

        found, rule_of = [], dict[int, Mapping[str, Any] | None]()
        for i, facts, _, shared in self.layers:
            rule = next((r for r in rules if not facts.part and fits(r, i, facts)), None)
            if shared is not None and not facts.part:
                rule = rule_of.get(shared, rule)
            found.append(rule_of.setdefault(i, rule) if shared is None and not facts.part else rule)
        self.notes += (
            f"Layers {describe_indices(indices)} ask for {' and '.join(facet_words(rule['ask']))}: {rule['because']}."
            for rule in rules
            if "because" in rule and (indices := [x[0] for x, r in zip(self.layers, found, strict=True) if r is rule])
        )
        return found

    def _outermost(self, count: int) -> frozenset[int]:
        """The first and last ``count`` layers without towers, at most half of the model each; empty for hybrids."""
        own = [(i, facts.kind in MIXERS) for i, facts, _, _ in self.layers if not facts.part]
        if any(mixer for _, mixer in own):
            return frozenset()
        indices = sorted({i for i, _ in own})
        count = min(count, len(indices) // 2)
        return frozenset(indices[:count] + indices[len(indices) - count :])

    def read(self, data: Mapping[str, Any], where: str, depth: int = 0) -> None:
        """Read a config: by its family's rules, else by those of its text model, else by the general ones."""
        model_type = ConfigFields(data, where).word("model_type")
        if model_type in self.families:
            family = self.families.get(model_type)
            self.stacks(_fields(data, where, family), family, model_type, depth)
            return
        why_unknown = (
            f"model_type {show(model_type)} is not a known family" if model_type else "the config has no model_type"
        )
        if found := self.by_architecture(data):
            architecture, name = found
            self.notes.append(f"{why_unknown}; its architecture is {architecture}, so it is read as {name}.")
            family = self.families.get(name)
            self.stacks(_fields(data, where, family), family, name, depth)
            return
        text = next((name for name in _TEXT if data.get(name) is not None), None)
        if text is None or depth >= _MAX_DEPTH:
            self.unknown_stack(data, where, why_unknown)
            return
        inner = mapping(data[text], f"{where}{text}", "expected an object")
        self.texts.append(ConfigFields(inner, f"{where}{text}."))
        inner_type = inner.get("model_type")
        read_as = f"read as {inner_type}" if inner_type in self.families else "read by itself"
        self.notes.append(f"{why_unknown}; its text model ({text}) is {read_as}.")
        for name in _TOWERS:
            if data.get(name) is not None:
                self.unknown_tower(mapping(data[name], f"{where}{name}", "expected an object"), where, name, depth)
        self.read(inner, f"{where}{text}.", depth + 1)

    def by_architecture(self, data: Mapping[str, Any]) -> tuple[str, str] | None:
        """The architecture class that a config names, and the family that has this class under another model_type."""
        architectures = data.get("architectures")
        first = architectures[0] if isinstance(architectures, list) and architectures else None
        stem = re.match(r"(\w+?)(?:For[A-Z]\w*|LMHeadModel|Model)$", first) if isinstance(first, str) else None
        if stem is None or first is None:
            return None
        wanted = stem[1].lower()
        # the shorter name is the text model's, the longer one that of the composite that may hold it
        names = (n for n in self.families if n.replace("_", "").replace("-", "").lower() in (wanted, f"{wanted}text"))
        return next(((first, name) for name in sorted(names, key=len, reverse="text_config" not in data)), None)

    def unknown_stack(self, data: Mapping[str, Any], where: str, why_unknown: str) -> None:
        """Read a config by the general rules, and note what they assume."""
        unknown = self.families.get(UNKNOWN)
        fields = _fields(data, where, unknown)
        if not _unread(fields, unknown):
            self.notes.append(
                f"{why_unknown}; its layers are read as those of a Llama-like decoder: of one geometry, without "
                "attention sinks or score bias, and causal unless is_causal is false."
            )
            if data.get("is_encoder_decoder") is True:
                self.notes.append("is_encoder_decoder is True; only the decoder's self-attention is given.")
        self.stack(fields, unknown, "", why_unknown)

    def unknown_tower(self, data: Mapping[str, Any], where: str, name: str, depth: int) -> None:
        """Read a tower of a model of unknown family, if the tower's own family is known."""
        if data.get("model_type") not in self.families:
            self.notes.append(f"{name} is not read, because its model_type is not a known family.")
            return
        family = self.families.get(data["model_type"])
        self.part(_fields(data, f"{where}{name}.", family), family, name, depth)

    def stacks(self, fields: ConfigFields, family: Family, name: str, depth: int) -> None:
        """Read the stack, or the stacks, of a known family."""
        if not family.parts or depth >= _MAX_DEPTH:
            self.stack(fields, family, name)
            return
        for part in family.parts:
            at = next((a for a in part.at if a == "." or fields.value(a) is not None), None)
            if at is None and part.optional:
                continue
            given = None if at is None else fields.value(at)
            if at is None:
                at = part.at[0]
                self.notes.append(f"{at} is not in the config, so it is that of its class, with every default.")
            data = fields.data
            if at != ".":
                data = mapping(part.absent if given is None else given, f"{fields.where}{at}", "expected an object")
            inner = ConfigFields(data, f"{fields.where}{at}.").word("model_type") if at != "." else ""
            how = part.family(inner if inner in self.families and inner != name else None)
            if part.only is not None and how.parts:
                how = how._replace(parts=(how.parts[part.only],))
            own = _fields(data, fields.where if at == "." else f"{fields.where}{at}.", how, fields)
            if at in _TEXT:
                self.texts.append(own)
            self.part(own, how, "" if at == "." or at in _TEXT else at, depth)

    def part(self, fields: ConfigFields, family: Family, part: str, depth: int) -> None:
        """Read a part of a model. ``part``, the field of its config, marks its layers."""
        begun = len(self.layers)
        self.stacks(fields, family, family.name, depth + 1)
        if part:
            self.layers[begun:] = [(i, x.changed(part=x.part or part), t, s) for i, x, t, s in self.layers[begun:]]

    def stack(self, fields: ConfigFields, family: Family, name: str, why_unknown: str = "") -> None:
        """Read one stack of layers, and note the defaults that were used and the fields that were ignored."""
        self.described.append(family)
        section = fields.where.removeprefix(self.where)
        self.absent |= {f"{section}{name}": value for name, value in fields.absent().items()}
        stack = Stack(family, fields, why_unknown)
        if why_unknown and (unread := _unread(fields, family)):
            named = f"{' and '.join(unread)} {'is' if len(unread) == 1 else 'are'} in the config"
            self.notes.append(
                f"{why_unknown}, and {named}: what that means for the attention of its layers is not known."
            )
            facts = LayerFacts(layer_idx=0, kind=UNREAD)
            self.layers += [(i, facts, "decoder", None) for i in range(0 if self.mtp else stack.count())]
            return
        self.layers += stack.mtp_layers() if self.mtp else stack.layers()
        if why_unknown:
            self.notes += fields.notes
            return
        if family.note:
            self.notes.append(family.note)
        looked_at = {*fields.read, *(family.pattern.fields if family.pattern else ())}
        for watched in family.watch:
            if watched not in looked_at and (value := fields.value(watched)) not in (None, False):
                self.notes.append(f"{watched} is {show(value)}; {name} does not look at it.")
        plain = {k: v for k, v in fields.defaulted.items() if isinstance(v, int | float | str) and v is not False}
        used = ", ".join(f"{key} {show(value)}" for key, value in plain.items())
        if used:
            self.notes.append(f"Not in the config, so the defaults of {name} hold: {used}.")


def _unread(fields: ConfigFields, family: Family) -> list[str]:
    """The fields that change attention and that the general rules do not read; an initial value of 0 is no switch."""
    set_ = [n for n, v in fields.data.items() if v or (n.endswith("_init") and type(v) in (int, float))]
    watched = (watched.partition(" unless ") for watched in family.watch)
    patterns = [pattern for pattern, _, other in watched if not other or fields.value(other) is None]
    return [name for name in set_ if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _fields(data: Mapping[str, Any], where: str, family: Family, whole: ConfigFields | None = None) -> ConfigFields:
    return ConfigFields(data, where, family.names, family.defaults, whole)


def _name(source: str, named: object) -> str:
    """The model's name: that of its directory, of a file with another name than config.json, or in the config."""
    if not source:
        return named.rstrip("/").rpartition("/")[2] if isinstance(named, str) else ""
    path = Path(os.path.abspath(source))
    # a download cache: models--openai--gpt-oss-120b/snapshots/<revision>/config.json
    if path.parent.parent.name == "snapshots":
        return path.parents[2].name.rpartition("--")[2]
    return path.parent.name if path.name == "config.json" else path.stem


def _longest(parts: Sequence[ConfigFields]) -> int | None:
    values = [fields.data.get(n) for fields in reversed(parts) for n in ("max_position_embeddings", "max_seq_len")]
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 < v <= MAX_NUMBER), None)


def _dtype(parts: Sequence[ConfigFields], notes: list[str]) -> str:
    for fields, name in ((f, n) for f in reversed(parts) for n in ("dtype", "torch_dtype")):
        value = fields.data.get(name)
        # a config object may hold a torch.dtype
        word = (str(value) if type(value).__module__ == "torch" else fields.word(name)).removeprefix("torch.")
        if word in _DTYPES:
            return _DTYPES[word]
        if word not in ("", "auto"):
            notes.append(f"{name} {show(word)} is no dtype that attention computes in; bfloat16 is assumed.")
            return "bfloat16"
    notes.append(_NO_DTYPE)
    return "bfloat16"
