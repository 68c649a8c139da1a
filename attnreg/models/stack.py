"""A compiled family, and the stack of layers that its rules make from a config's fields."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from attnreg.models.facts import CHECKS, MIXERS, AbsorbedMla, LayerFacts, MlaDims, MlaIndexer
from attnreg.models.fields import ConfigError, ConfigFields, anything, integer, mapping, number, positive, show
from attnreg.models.patterns import Pattern
from attnreg.models.states import NEEDED, StateDims
from attnreg.models.values import ConfigCondition, Literal, Value

_MAX_LAYERS = 10_000
_NEEDED = {
    "chunk": "a chunked layer needs the length of a chunk in tokens",
    # as in the models' classes, which refuse to make the mask
    "window": "a sliding layer needs a window in tokens: give one, or name the layers full_attention",
}
_MTP_WORD = "full_attention"
_any_size = integer(0)
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class StatedCall(NamedTuple):
    """The facts of one attention call of a layer, as a family's file gives them.

    ``fields`` are fields of these layers alone; a config with ``per_layer_config`` has its own instead.
    """

    kind: str | None = None
    attn_type: str | None = None
    when: ConfigCondition | None = None
    facts: Mapping[str, Value] = _NOTHING
    fields: Mapping[str, Value] = _NOTHING

    def over(self, below: StatedCall) -> StatedCall:
        """The facts of this call, and those of ``below`` that this call lacks."""
        kind, attn_type = self.kind or below.kind, self.attn_type or below.attn_type
        facts, fields = {**below.facts, **self.facts}, {**below.fields, **self.fields}
        return StatedCall(kind, attn_type, self.when or below.when, facts, fields)


class NestedStack(NamedTuple):
    """One stack of a model that has several: ``at`` has the fields that may hold its config.

    ``family(name)`` returns its family: the named one, from the part's own config, or with None the one in the data.
    ``absent`` is the part's config if the model's config has none. ``only`` is the index of the single part of that
    family that counts; None: all of its parts count.
    """

    at: tuple[str, ...]
    optional: bool
    absent: Mapping[str, Any]
    only: int | None
    family: Callable[[str | None], Family]


class Family(NamedTuple):
    """How a family's config, or a part of it, maps to a stack of layers; with ``parts``, to several stacks.

    ``refuse`` has the conditions of configs that contradict themselves, each with its message. ``watch`` has fields
    that mean something in other families: a note says that this family ignores them. ``renamed`` maps older words of
    a pattern to their present ones. ``mtp`` is the number of layers behind the others that predict further tokens.
    """

    name: str
    names: Mapping[str, tuple[str, ...]] = _NOTHING
    defaults: Mapping[str, Any] = _NOTHING
    layers: Value | None = None
    pattern: Pattern | None = None
    base: StatedCall = StatedCall()
    words: Mapping[str, tuple[StatedCall, ...]] = _NOTHING
    also: Mapping[str, tuple[Pattern, Mapping[str, StatedCall]]] = _NOTHING
    kv_shared: Mapping[str, Value] = _NOTHING
    mtp: Value | None = None
    refuse: tuple[tuple[ConfigCondition, str], ...] = ()
    watch: tuple[str, ...] = ()
    renamed: Mapping[str, str] = _NOTHING
    note: str = ""
    parts: tuple[NestedStack, ...] = ()


@dataclass(eq=False, repr=False)
class Stack:
    """One stack of layers: a family's rules and the fields that they are applied to.

    ``why_unknown`` says why no family's rules apply, "" for a known family.
    """

    family: Family
    fields: ConfigFields
    why_unknown: str = ""

    def layers(self) -> Iterator[tuple[int, LayerFacts, str, int | None]]:
        """Each attention call, in order: layer index, facts, attention type, and the layer whose KV it reads."""
        for condition, because in self.family.refuse:
            if condition.holds(self.fields):
                raise self.fields.error(condition.fields[0], because)
        words = self.words()
        also = {
            label: self.marks(label, pattern.words(self.fields, len(words)))
            for label, (pattern, _) in self.family.also.items()
        }
        shared = self.shared(words)
        own = self.own_fields(len(words))
        known: dict[Any, list[tuple[LayerFacts, str]]] = {}
        for i, word in enumerate(words):
            marks = tuple((label, entries[i]) for label, entries in also.items() if entries is not None)
            key = (word, marks, i if own.get(i) or self.by_layer else None)
            if key not in known:
                self.fields.layer, self.fields.own = i, own.get(i, {})
                known[key] = list(self.calls(word, i, marks))
                self.fields.layer, self.fields.own = None, {}
            for facts, attn_type in known[key]:
                attends = facts.head_size is not None and facts.kind != "cross"
                yield i, facts, attn_type, shared.get(i) if attends else None

    def mtp_layers(self) -> Iterator[tuple[int, LayerFacts, str, int | None]]:
        """Each attention call of the layers that predict further tokens (MTP): full layers, behind the others."""
        rule = self.family.mtp
        count = rule.checked(self.fields, _any_size, "mtp") if rule else None
        if rule is None or not count:
            return
        if count > _MAX_LAYERS:
            raise self.fields.error((*rule.names, "mtp")[0], f"expected at most {_MAX_LAYERS}")
        first = len(self.words())
        for i in range(first, first + count):
            for facts, attn_type in self.calls(_MTP_WORD, i, ()):
                yield i, facts, attn_type, None

    @functools.cached_property
    def by_layer(self) -> bool:
        """Whether a fact is read from a list with an entry for each layer, so that any two layers may differ."""
        calls = [self.family.base, *(call for calls in self.family.words.values() for call in calls)]
        calls += [call for _, words in self.family.also.values() for call in words.values()]
        return any(value.itemised for call in calls for value in call.facts.values())

    def count(self) -> int:
        """The number of layers that the config gives. Raises `ConfigError` without one, and for too many."""
        assert self.family.layers is not None
        count = self.family.layers.checked(self.fields, CHECKS["layers"], "layers")
        if count is None:
            raise self.missing(self.family.layers, "layers")
        if count > _MAX_LAYERS:
            raise self.fields.error((*self.family.layers.names, "layers")[0], f"expected at most {_MAX_LAYERS}")
        return int(count)

    def words(self) -> Sequence[str]:
        """The word of each layer."""
        assert self.family.layers is not None
        assert self.family.pattern is not None
        count, counted = self.family.layers.get(self.fields, CHECKS["layers"]), (*self.family.layers.names, "layers")[0]
        names = (*self.family.pattern.fields, counted)
        if count is not None and _any_size(self.fields, counted, count) > _MAX_LAYERS:
            raise self.fields.error(counted, f"expected at most {_MAX_LAYERS}")
        if count == 0:
            # 0 is a result of arithmetic: the model lacks this part
            return []
        words = self.family.pattern.words(self.fields, count)
        if words is None:
            if count is None:
                raise self.missing(self.family.layers, "layers")
            name = names[0]
            raise ConfigError(f"{self.fields.where}{name} is missing and has no default; add it to the config")
        words = [self.family.renamed.get(word, word) for word in words]
        if not words or len(words) > _MAX_LAYERS:
            name = names[0]
            raise ConfigError(f"{self.fields.where}{name} has {len(words)} entries; expected 1 to {_MAX_LAYERS}")
        listed = self.fields.value("layer_types")
        if (
            isinstance(listed, list | tuple)
            and len(listed) != len(words)
            and "layer_types" not in self.family.pattern.fields
        ):
            # the family ignores layer_types, but the model's class refuses a list of another length
            raise self.fields.error("layer_types", f"expected one word for each of the {len(words)} layers")
        for i, word in enumerate(words):
            if word not in self.family.words:
                name = next((n for n in self.family.pattern.fields if self.fields.given(n)), "layer_types")
                known = ", ".join(sorted(self.family.words))
                raise ConfigError(f"{self.fields.where}{self.fields.spelt(name)}[{i}] is {show(word)}; known: {known}")
        return words

    def marks(self, label: str, entries: Sequence[str] | None) -> Sequence[str] | None:
        known = self.family.also[label][1]
        for i, word in enumerate(entries or ()):
            if word not in known:
                name = (*self.family.also[label][0].fields, label)[0]
                raise ConfigError(f"{self.fields.where}{name}[{i}] is {show(word)}; known: {', '.join(sorted(known))}")
        return entries

    def own_fields(self, count: int) -> dict[int, Mapping[str, Any]]:
        """Layer -> the fields of that layer alone (``per_layer_config``, which any config may have)."""
        own = (
            self.fields.nested("per_layer_config")
            if not isinstance(self.fields.value("per_layer_config"), list)
            else {}
        )
        out = {}
        for key, values in (own or {}).items():
            if not str(key).isdecimal() or int(key) >= count:
                raise self.fields.error("per_layer_config", f"{show(key)} is no index of one of the {count} layers")
            out[int(key)] = mapping(values, f"{self.fields.where}per_layer_config.{key}", "expected an object")
        return out

    def shared(self, words: Sequence[str]) -> dict[int, int]:
        """Layer -> the layer whose keys and values it reads instead of its own."""
        rule = self.family.kv_shared
        if "list" in rule:
            sources = rule["list"].get(self.fields, anything) or []
            name = (*rule["list"].names, "kv_shared")[0]
            ok = isinstance(sources, list | tuple) and len(sources) in (0, len(words))
            if not ok or any(
                isinstance(s, bool) or not isinstance(s, int) or not 0 <= s <= i for i, s in enumerate(sources)
            ):
                raise self.fields.error(name, "expected the index of a layer up to its own for each layer")
            return {i: source for i, source in enumerate(sources) if source != i}
        last = rule["last"].checked(self.fields, _any_size, "kv_shared") if "last" in rule else None
        if not last:
            return {}
        first, name = len(words) - last, (*rule["last"].names, "kv_shared")[0]
        if first < 1:
            raise self.fields.error(name, f"expected less than the number of layers, {len(words)}")
        sources = {word: i for i, word in enumerate(words[:first])}
        for i in range(first, len(words)):
            if words[i] not in sources:
                raise self.fields.error(name, f"layer {i} ({words[i]}) has no earlier layer of its kind to share with")
        return {i: sources[words[i]] for i in range(first, len(words))}

    # one layer -------------------------------------------------------------------------------------------------------

    def calls(self, word: str, i: int, marks: Sequence[tuple[str, str]]) -> Iterator[tuple[LayerFacts, str]]:
        """The attention calls of a layer with their attention types."""
        for call in self.family.words[word]:
            if call.when is not None and not call.when.holds(self.fields):
                continue
            whole = call._replace(when=None).over(self.family.base)
            for label, mark in marks:
                whole = self.family.also[label][1][mark].over(whole)
            kind = whole.kind or "full"
            if kind == "none":
                continue
            if whole.fields and not self.fields.given("per_layer_config"):
                own = {name: value.get(self.fields, anything) for name, value in whole.fields.items()}
                self.fields.own = {name: value for name, value in own.items() if value is not None}
            if kind in MIXERS:
                facts = LayerFacts(layer_idx=0, kind=kind, state=self.state(whole))
            else:
                facts = self.facts(whole, kind)
            yield facts, whole.attn_type or "decoder"

    def facts(self, call: StatedCall, kind: str) -> LayerFacts:
        causal = self.maybe(call, "causal")
        causal = causal is not False and kind not in ("cross", "vision") and (causal or True)
        heads = self.need(call, "heads")
        form = self.maybe(call, "form")
        mla = self.mla(call) if self.maybe(call, "mla.used") and not form else None
        if mla:
            head_size = (mla.qk_nope_head_dim or 0) + mla.qk_rope_head_dim
            kv_heads, head_size_v = heads, mla.v_head_dim
        else:
            head_size = self.need(call, "head_size")
            kv_heads = self.need(call, "kv_heads")
            head_size_v = self.maybe(call, "head_size_v") or head_size
            if heads % kv_heads:
                raise self.indivisible(call, heads, kv_heads)
            mla = self.latent(call, form, kv_heads, head_size, head_size_v) if form else None
        window = chunk = None
        if kind == "sliding":
            window = self.maybe(call, "window")
            if window is None:
                raise self.missing(call.facts.get("window", Literal(None)), "window")
        elif kind == "chunked":
            chunk = self.need(call, "chunk")
        scaling = self.maybe(call, "scaling")
        attention = self.maybe(call, "attention")
        return LayerFacts(
            layer_idx=0,
            kind="encoder" if kind == "full" and causal is False else kind,
            attention=attention or ("mla_sparse" if mla and mla.indexer else "mla" if mla else "mha"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=head_size,
            head_size_v=head_size_v,
            sliding_window=window,
            chunk=chunk,
            sinks=bool(self.maybe(call, "sinks")),
            softcap=self.maybe(call, "softcap"),
            alibi=bool(self.maybe(call, "alibi")),
            causal=causal,
            bias=bool(self.maybe(call, "bias")),
            mla=mla,
            scaling=(head_size**-0.5 if scaling is None else scaling) * self.yarn(call),
            sparse_blocks=self.maybe(call, "sparse_blocks"),
            compress=self.maybe(call, "compress"),
        )

    def state(self, call: StatedCall) -> StateDims | None:
        """The state of a layer without softmax attention; None if the config lacks one of its dimensions."""
        kind = self.maybe(call, "state.kind")
        if kind is None:
            return None
        names = [name for name in StateDims._fields if f"state.{name}" in call.facts]
        try:
            state = StateDims(**{name: self.maybe(call, f"state.{name}") for name in names})
        except ConfigError:
            # layers with softmax attention do not read these fields, so the model is no reason to refuse
            return None
        state = state._replace(dtype=None) if state.dtype == "auto" else state
        return state if all(getattr(state, name) is not None for name in NEEDED[kind]) else None

    def mla(self, call: StatedCall) -> MlaDims:
        nope, rope = (self.need(call, f"mla.{name}") for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
        if not nope + rope:
            raise self.fields.error("qk_nope_head_dim", "qk_rope_head_dim is 0 as well; one of them must be above 0")
        rank, q_rank = self.need(call, "mla.kv_lora_rank"), self.maybe(call, "mla.q_lora_rank")
        latent = AbsorbedMla(1, rank + rope, rank)
        v_head_dim = self.need(call, "mla.v_head_dim")
        return MlaDims(rank, q_rank, nope, rope, v_head_dim, latent, self.indexer(call))

    def latent(self, call: StatedCall, form: str, kv_heads: int, head_size: int, head_size_v: int) -> MlaDims:
        """The dimensions of a latent without an expanded form: queries attend to the latent itself."""
        q_rank, rope = self.maybe(call, "mla.q_lora_rank"), self.maybe(call, "mla.qk_rope_head_dim")
        stored = AbsorbedMla(kv_heads, head_size, head_size_v)
        return MlaDims(None, q_rank, None, rope or 0, None, stored, self.indexer(call), form)

    def indexer(self, call: StatedCall) -> MlaIndexer | None:
        if not self.maybe(call, "indexer.used"):
            return None
        own = self.maybe(call, "indexer.own") is not False
        names = ("index_n_heads", "index_head_dim", "index_topk")
        return MlaIndexer(own, *(self.need(call, f"indexer.{name}") for name in names))

    def yarn(self, call: StatedCall) -> float:
        """YaRN's factor on the softmax scale, which some families apply in addition to the usual scale."""
        if not self.maybe(call, "yarn_scale"):
            return 1.0
        name = next((n for n in ("rope_parameters", "rope_scaling") if self.fields.value(n) is not None), "")
        data = self.fields.nested(name) if name else None
        rope = ConfigFields(data or {}, f"{self.fields.where}{name}.")
        if (rope.word("rope_type") or rope.word("type") or "default") == "default" or not rope.value("mscale_all_dim"):
            return 1.0
        mscale, factor = number(rope, "mscale_all_dim", rope.value("mscale_all_dim")), rope.value("factor")
        if factor is None:
            raise rope.error("factor", "mscale_all_dim needs it; give the factor by which positions are stretched")
        return (0.1 * mscale * math.log(max(positive(rope, "factor", factor), 1.0)) + 1.0) ** 2

    def need(self, call: StatedCall, fact: str) -> Any:
        value = self.maybe(call, fact)
        if value is None:
            raise self.missing(call.facts.get(fact, Literal(None)), fact)
        return value

    def maybe(self, call: StatedCall, fact: str) -> Any:
        """The value of a fact, None if neither the family nor the config has it."""
        rule = call.facts.get(fact)
        return None if rule is None else rule.checked(self.fields, CHECKS[fact], fact)

    def missing(self, value: Value, fact: str) -> ConfigError:
        """The error for a fact that the config lacks."""
        fields, first = self.fields, (*value.names, fact)[0]
        names = [n for n in dict.fromkeys((*value.names, *value.decided_by)) if fields.holds(n)]
        if not names or not fields.holds(first):
            why = f" ({self.why_unknown})" if self.why_unknown else ""
            return ConfigError(f"{fields.where}{first} is missing and has no default{why}; add it to the config")
        text = " and ".join(f"{fields.spelt(name)} is {show(fields.value(name))}" for name in names)
        return ConfigError(f"{fields.where}{text}; {_NEEDED.get(fact, 'a number is needed here')}")

    def indivisible(self, call: StatedCall, heads: int, kv_heads: int) -> ConfigError:
        names = [
            next((n for n in call.facts[f].names if self.fields.value(n) is not None), f) for f in ("heads", "kv_heads")
        ]
        cure = f"; add {names[1]}, which is a default here" if names[1] in self.fields.defaulted else ""
        return ConfigError(
            f"{self.fields.where}{self.fields.spelt(names[0])} is {heads} and {self.fields.spelt(names[1])} is "
            f"{kv_heads}; the second must divide the first{cure}"
        )
