"""The questions of a model and its draft, which `attnreg explain`, `lock` and `diff` ask a registry."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.errors import RequestError
from attnreg.language.computed import taken_from
from attnreg.models.facts import LayerFacts, of_layers
from attnreg.models.fields import ConfigError, facets_of, read_config
from attnreg.models.groups import LayerGroup, ModelLayers, changed_label, describe_indices, group_layers, per_rank
from attnreg.models.kv_memory import Memory, kv_memory
from attnreg.models.reader import families_of, mtp_from_model, requests_from_model
from attnreg.request import AttentionRequest
from attnreg.selection.question import Question
from attnreg.selection.wording import cache_words, facet_words, feature_words

if TYPE_CHECKING:
    from attnreg.language.conditions import Condition
    from attnreg.language.engine.architectures import Architectures
    from attnreg.language.vocabulary import Facet
    from attnreg.models.families import Families
    from attnreg.registry import Effect, Registry

# the value of `draft` that stands for the model's own MTP layers
MTP = "mtp"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The user's options beside the model's config; ``given`` are fields of every request, equal for all layers.

    ``ranks`` is the number of ranks of tensor parallelism. ``layer`` is the index of a layer, if the user asks about
    one alone. ``draft`` is another config, whose layers get the draft role, or ``mtp`` for the model's own MTP layers.
    ``draft_given`` are fields of the draft's requests that replace those of ``given``. ``lengths`` are the request
    lengths in tokens at which the KV cache is counted; by default 8,192 and the model's longest. ``skip_layers`` are
    the rules of the KV dtype for layers that keep another cache. ``families`` are the rules by which configs are read;
    by default the bundled ones. ``facets`` are the registry's facets that come from a config, ``architectures`` its
    table of the classes that the engine serves.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    extra: Any = ()
    ranks: int = 1
    layer: int | None = None
    draft: str | None = None
    draft_given: Mapping[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    skip_layers: Sequence[Mapping[str, Any]] = ()
    families: Families | None = None
    facets: tuple[Facet, ...] = ()
    architectures: Architectures | None = None

    def with_given(self, facets: Mapping[str, Any]) -> ModelOptions:
        """The options with further facets: fields of every request, and facets that a registry declares beyond them."""
        given, extra = {**self.given}, dict(self.extra)
        for name, value in facets.items():
            (given if name in AttentionRequest.__dataclass_fields__ else extra)[name] = value
        return dataclasses.replace(self, given=given, extra=tuple(extra.items()))

    def of_draft(self) -> ModelOptions:
        """The options of the draft."""
        return dataclasses.replace(self, given={**self.given, **self.draft_given})


class ModelQuestions(NamedTuple):
    """The questions of a model's groups in order, its name, a title line, the assumptions, and its KV cache."""

    questions: tuple[Question, ...]
    name: str
    title: str
    notes: tuple[str, ...]
    memory: Memory


# a layer, the kind of its question, and the number of the question among the layer's of that kind
_Place = tuple[object, str, int]


class Anew:
    """Asks a model's questions again under further options; it reads the model once for each set of options."""

    def __init__(self, ask: Callable[[Mapping[str, Any]], Iterable[Question]]) -> None:
        self._ask = ask
        self._kept: dict[tuple[tuple[str, Any], ...], dict[_Place, AttentionRequest]] = {}

    def of(self, questions: Iterable[Question]) -> tuple[Question, ...]:
        """The questions, each with ``anew``: the function from further options to the requests of its layers."""
        return tuple(dataclasses.replace(q, anew=partial(self._requests, places)) for q, places in _placed(questions))

    def _requests(self, places: tuple[_Place, ...], given: Mapping[str, Any]) -> tuple[AttentionRequest, ...]:
        """Each request of some layers under further options; empty if one of the layers then has no question."""
        key = tuple(sorted(given.items()))
        if key not in self._kept:
            self._kept[key] = self._read(given)
        found = self._kept[key]
        if not all(place in found for place in places):
            return ()
        return tuple(dict.fromkeys(found[place] for place in places))

    def _read(self, given: Mapping[str, Any]) -> dict[_Place, AttentionRequest]:
        try:
            placed = list(_placed(self._ask(given)))
        except (ConfigError, RequestError):
            return {}
        return {place: q.request for q, places in placed for place in places if q.request is not None}


def _placed(questions: Iterable[Question]) -> Iterator[tuple[Question, tuple[_Place, ...]]]:
    """Each question with the places of its layers. The place of a layer does not depend on the other layers."""
    counts: Counter[tuple[object, str]] = Counter()
    for question in questions:
        layers = [(member, question.kind) for member in sorted(question.members, key=repr)]
        yield question, tuple((*layer, counts[layer]) for layer in layers)
        counts.update(layers)


def model_questions(config: str, options: ModelOptions, registry: Registry) -> ModelQuestions:
    """The questions of a model. Raises `ConfigError` for a faulty config, or for a layer that the model lacks."""
    words = registry.vocabulary.words
    if missing := [name for name in _READ if name not in registry.vocabulary.facets]:
        raise ConfigError(f"{registry.title} has no facet `{missing[0]}`, so it reads no config: ask for one layer")
    asked = _asked(config, options, registry)
    (_, main, options), *others = asked
    drafts = [draft for _, draft, _ in others]
    phases = phases_of(registry)
    anew = Anew(lambda given: _questions(_asked(config, options.with_given(given), registry), phases))
    questions = anew.of(_questions(asked, phases))
    stored = [(model, each.given.get("kv_dtype") or "auto") for _, model, each in asked]
    formats = ("auto", *words["kv_dtypes"])
    memories = [kv_memory(model, dtype, words) for model, dtype in stored if dtype in formats]
    asked_phases = () if "phase" in options.given else phases
    memory = Memory(
        tuple(memories),
        options.lengths or _lengths(main),
        options.ranks,
        phases=tuple(asked_phases),
        whole=options.layer is None,
        block_size=options.given.get("block_size"),
    )
    notes = [*main.assumptions, *(f"draft: {note}" for d in drafts for note in d.assumptions)]
    return ModelQuestions(questions, main.name, _title(main, drafts, options), tuple(notes), memory)


# facets of each layer that a config describes
_READ = ("model", "kv_dtype", "num_heads", "num_kv_heads", "attn_type")
_Asked = tuple[str, ModelLayers, ModelOptions]
# the config of the model that a run serves, facts of its layers, and what its class gives fields that the config lacks
_Run = tuple[str, dict[str, Any], Mapping[str, Any]]


def _asked(config: str, options: ModelOptions, registry: Registry) -> list[_Asked]:
    """The model and its draft, if any: a prefix for the layers' words, the layers, and their options."""
    options = _informed(options, registry)
    asked = [("", _read(config, options), options)]
    if options.draft is not None:
        of_draft = options.of_draft()
        run = config, _said(asked[0][1], options), asked[0][1].defaults
        asked.append(("draft", _read_draft(config, options.draft, of_draft, run), of_draft))
    return asked


def _questions(asked: Sequence[_Asked], phases: Sequence[str]) -> list[Question]:
    return [question for name, model, options in asked for question in questions_of(model, options, name, phases)]


def model_layers(config: str, options: ModelOptions, registry: Registry) -> ModelLayers:
    """The layers of a model with the requests of its questions. Raises `ConfigError`."""
    return _read(config, _informed(options, registry))


def headline(model: ModelLayers) -> str:
    """A model's name with the number of its layers: ``Llama-3.1-8B · 32 layers``."""
    return f"{model.name} · {_count(model)}"


def _informed(options: ModelOptions, registry: Registry) -> ModelOptions:
    """The options with facts of the registry: rules for layers with another cache, the config's facets, its classes."""
    word = registry.vocabulary.words["kv_dtypes"].get(options.given.get("kv_dtype") or "auto")
    facets = tuple(facet for facet in registry.vocabulary.facets.values() if facet.config)
    skip_layers = word.facts.get("skip_layers", ()) if word else ()
    return dataclasses.replace(
        options,
        skip_layers=skip_layers,
        facets=facets,
        families=options.families or families_of(registry.base),
        architectures=registry.architectures,
    )


def _title(main: ModelLayers, drafts: Sequence[ModelLayers], options: ModelOptions) -> str:
    """The model, its draft, and every option that changes the requests."""
    words = [headline(main)]
    for draft in drafts:
        words += [f"draft {draft.name}", _count(draft), *([draft.dtype] if draft.dtype != main.dtype else [])]
    return " · ".join([*words, *option_words(options, main.dtype)])


def option_words(options: ModelOptions, dtype: str | None) -> list[str]:
    """The options in words: ``["TP 2", "bfloat16", "KV cache fp8"]``.

    dtype: the dtype in which the model computes; None if each model computes in its own.
    """
    words = [f"draft {cache_words(options.draft_given['kv_dtype'])}"] if "kv_dtype" in options.draft_given else []
    words += [f"only layer {options.layer}"] if options.layer is not None else []
    words += [f"TP {options.ranks}"] if options.ranks > 1 else []
    words += [dtype] if dtype else []
    kv_dtype = options.given.get("kv_dtype", "auto")
    words += [cache_words(kv_dtype)] if kv_dtype != "auto" else []
    words += facet_words({name: v for name, v in options.given.items() if name not in ("dtype", "kv_dtype")})
    words += facet_words(dict(options.extra))
    features = feature_words(dict.fromkeys(sorted(options.features), True))
    return words + ([f"with {', '.join(features)}"] if features else [])


def _read_draft(config: str, draft: str, options: ModelOptions, run: _Run) -> ModelLayers:
    """The layers of the draft: those of another model, or the model's own layers that predict further tokens."""
    own = _is_own(config, draft)
    return _read(config if own else draft, options, role="draft", mtp=own, run=run)


def _is_own(config: str, draft: str) -> bool:
    """Whether a model's own layers draft for it: ``mtp``, or the same config.json, given as a file or a directory."""
    files = {os.path.realpath(os.path.join(p, "config.json") if os.path.isdir(p) else p) for p in (config, draft)}
    return draft == MTP or len(files) == 1


def _read(
    config: str, options: ModelOptions, role: str | None = None, mtp: bool = False, run: _Run | None = None
) -> ModelLayers:
    """The layers of a model. run: the model that the run serves, if this one drafts for it."""
    special = {name: options.given[name] for name in ("dtype", "kv_dtype", "role") if name in options.given}
    special |= {"role": role} if role else {"skip_layers": options.skip_layers}
    read = mtp_from_model if options.draft == MTP and mtp else partial(requests_from_model, mtp=mtp)
    model = read(config, families=options.families, **special)
    if any(found.named for found in model.groups):
        return model
    model = per_rank(model, options.ranks)
    said = _said(model, options)
    if run is not None:
        said |= {"draft": _draft_words(config, model.name, mtp), "draft_kv_dtype": options.draft_given.get("kv_dtype")}
        said["heads_of_target"] = said["num_heads"] == run[1]["num_heads"]
    elif options.draft is not None:
        said["drafted_by"] = _draft_words(options.draft, "", _is_own(config, options.draft)).strip()
    # the architecture of a draft is another's: the engine makes it of the target's, or of the way of drafting
    table = None if role else options.architectures
    stated = facets_of(config, options.facets, options.given, said, table, run, model.defaults)
    if options.layer is None or role is not None:
        return _changed(model, options, stated)
    layers = tuple(facts for facts in model.layers if facts.layer_idx == options.layer)
    if not layers:
        raise ConfigError(_no_layer(model, options))
    # a group keeps its label, which says how it differs from the model's other layers
    groups = tuple(dataclasses.replace(g, layers=(options.layer,)) for g in model.groups if options.layer in g.layers)
    return _changed(dataclasses.replace(model, layers=layers, groups=groups), options, stated)


def _said(model: ModelLayers, options: ModelOptions) -> dict[str, Any]:
    """Facts of a whole model, which facets of a registry read as the section ``layers`` of its config."""
    said = of_layers(model.layers) | {"dtype": model.dtype, "ranks": options.ranks}
    said["kv_dtype"] = options.given.get("kv_dtype")
    # heads that an option gives are those of each layer, not of the model
    return said if {"num_heads", "num_kv_heads"}.isdisjoint(options.given) else said | {"queries_per_kv_head": None}


def _draft_words(config: str, name: str, mtp: bool) -> str:
    """What tells the method of a draft: its name and its architecture; ``mtp`` for a model's own MTP layers."""
    if mtp:
        return MTP
    data = read_config(config)[1]
    architectures = data.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else data.get("model_type")
    return f"{name} {first}"


def _no_layer(model: ModelLayers, options: ModelOptions) -> str:
    """The error message for the index of a layer that the model lacks."""
    indices = describe_indices([facts.layer_idx for facts in model.layers])
    message = f"{model.name} has no layer {options.layer}; it has {indices}"
    if options.draft is None:
        return message
    return f"{message} (--layer is one of the model's: those of its draft are asked about beside any)"


def _changed(model: ModelLayers, options: ModelOptions, stated: dict[str, Any]) -> ModelLayers:
    """The model with the options in the request of each group. A group with a changed request gets a new label.

    stated: the registry's facets that come from the config; labels leave them out.
    """
    changes = {k: v for k, v in options.given.items() if k not in ("dtype", "kv_dtype", "role")}
    sizes = {k: v for k, v in changes.items() if k in ("head_size", "head_size_v", "num_kv_heads")}
    groups = []
    for found in model.groups:
        if found.request is not None:
            features = found.request.features | options.features
            extra = tuple({**dict(found.request.extra), **dict(options.extra)}.items())
            alone = _prompts_alone(found, options)
            # options for prompts alone do not change the request of the latent form
            own = {k: v for k, v in changes.items() if not (alone and (k == "phase" or k in sizes))}
            if found.request.role in ("vision", "encoder"):
                # a tower keeps no cache
                own.pop("block_size", None)
            request = dataclasses.replace(found.request, **own, features=features, extra=extra)
            label = found.label if request == found.request else changed_label(found.facts, request)
            prefill = None
            if found.prefill is not None:
                prompts = dataclasses.replace(request.expanded(), **(sizes if alone else {}))
                if (label, prompts) != (found.label, found.prefill[0]):
                    prefill = _stating(prompts, stated, extra), changed_label(found.facts, prompts)
            request = _stating(request, stated, extra)
            found = dataclasses.replace(found, request=request, label=label, changed_prefill=prefill)
        groups.append(found)
    of_run = None
    if not any(found.request for found in groups):
        # its heads are nobody's: it has the dtypes, the features and the class of the model alone
        bare = AttentionRequest(head_size=128, num_heads=1, dtype=model.dtype, model=model.model_type or None)
        bare = dataclasses.replace(bare, kv_dtype=options.given.get("kv_dtype", "auto"), features=options.features)
        of_run = _stating(bare, stated, tuple(dict(options.extra).items()))
    return dataclasses.replace(model, groups=tuple(groups), of_run=of_run)


def _stating(request: AttentionRequest, stated: dict[str, Any], extra: tuple[tuple[str, Any], ...]) -> AttentionRequest:
    """A request with the facets of the config added; its own facets win."""
    return dataclasses.replace(request, extra=tuple((stated | dict(extra)).items())) if stated else request


def phases_of(registry: Registry) -> tuple[str, ...]:
    """The phases that need a question each, because a step of the engine reads the phase; empty for other engines."""
    steps = (s for s in registry.steps if s.when.decided({"attention": "mha"}) is not False)  # MLA has both anyway
    read = {facet for step in steps for effect in step.effects for facet in _read_by(step.when, effect)}
    derived = (case for name in read & registry.derived.keys() for case, _, _ in registry.derived[name].cases)
    return ("decode", "prefill") if "phase" in read or any("phase" in case.facets for case in derived) else ()


def _read_by(when: Condition, effect: Effect) -> set[str]:
    copied = [facet for value in effect.sets.values() for facet in taken_from(value)]
    return {*when.facets, *effect.when.facets, *copied}


def questions_of(
    model: ModelLayers, options: ModelOptions, name: str = "", phases: Sequence[str] = ()
) -> Sequence[Question]:
    """The questions of a model's groups; groups of MLA have one for each phase, and others one for each of ``phases``.

    name: a prefix for the layers' words, such as ``draft``.
    """
    questions = []
    for found in model.groups:
        layers = " · ".join(filter(None, (name, group_layers(found))))
        kind, numbers = found.facts.kind, found.facts.numbers
        members = frozenset((name, *stack_of(found.facts), index) for index in found.layers)
        if phases and found.request is not None and found.prefill is None and "phase" not in options.given:
            for phase in phases:
                request = dataclasses.replace(found.request, phase=phase)
                questions.append(Question(request, f"{found.label} · {phase}", layers, members, kind, numbers))
            continue
        alone = _prompts_alone(found, options)
        if not alone:
            state = found.facts.state
            questions.append(Question(found.request, found.label, layers, members, kind, numbers, state))
        if found.prefill is not None and (alone or "phase" not in options.given):
            questions.append(Question(*found.prefill, layers, members, kind, numbers))
    return questions


def _prompts_alone(found: LayerGroup, options: ModelOptions) -> bool:
    """Whether the user asks an MLA layer about prompts alone: these use keys for each head instead of latents."""
    return found.prefill is not None and options.given.get("phase") == "prefill"


def _count(model: ModelLayers) -> str:
    """``62 layers, 27 of towers``; a layer with several calls counts once."""
    if named := [found.named for found in model.groups if found.named]:
        return named[0]
    stacks: dict[tuple[str, bool], set[int]] = {}
    for facts in model.layers:
        stacks.setdefault(stack_of(facts), set()).add(facts.layer_idx)
    own = sum(len(indices) for (tower, _), indices in stacks.items() if not tower)
    towers = sum(map(len, stacks.values())) - own
    if not own:
        own, towers = towers, 0
    return f"{own} layer{'s' if own != 1 else ''}" + (f", {towers} of towers" if towers else "")


def stack_of(facts: LayerFacts) -> tuple[str, bool]:
    """The stack of a layer: its tower ("" for none), and whether it is an encoder. Two stacks may share indices."""
    encoder = facts.request is not None and facts.request.attn_type == "encoder"
    return facts.part or ("vision" if facts.kind == "vision" else ""), encoder


def _lengths(model: ModelLayers) -> tuple[int, ...]:
    return tuple(sorted({8192, model.max_length or 8192}))
