"""models.yaml -> Family: how the config of a model family maps to its layers. An entry is read when it is asked for.

The file has three parts, each written at the left margin: ``sources``; ``general``, the rules that hold unless a family
says otherwise; and ``families``, of which each entry is parsed, checked and compiled alone, with those that it is
``like``, so that a cold `attnreg explain` does not pay for hundreds of families that it does not look at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from attnreg.compile.yaml_source import Document, as_data
from attnreg.errors import Location, Problem, RegistryError, did_you_mean
from attnreg.models.patterns import Pattern, compile_pattern
from attnreg.models.values import Complain, Condition, Value, compile_condition, compile_value

KINDS = ("full", "sliding", "chunked", "cross", "encoder", "vision", "linear", "mamba", "conv", "none")
# what a layer is, each a value of config_values; `kind`, `attn_type` and `when` are read apart
FACTS = (
    "heads", "kv_heads", "head_size", "head_size_v", "window", "chunk", "sinks", "softcap", "alibi", "bias", "causal",
    "scaling", "yarn_scale", "sparse_blocks", "compress", "attention", "form",
)  # fmt: skip
MLA = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
INDEXER = ("own", "index_n_heads", "index_head_dim", "index_topk")
ATTN_TYPES = ("decoder", "encoder", "encoder_only")
_ENTRY = re.compile(r"  (?:\"([^\"]+)\"|([^\s\"#:][^\s:]*)):(?=\s|$)")
_PARTS = "the parts of the file are sources, general and families"
_MAPS = ("names", "defaults", "words", "also")
_KEYS = {"like", "source", "note", "layers", "pattern", "parts", "kv_shared", "refuse", "watch", "renamed", *_MAPS}
_CALL = {"kind", "attn_type", "when", "fields", "mla", "indexer", *FACTS}


@dataclass(frozen=True)
class Call:
    """The facts of one attention call of a layer, as far as they are said; a fact that is not said is not here.

    ``fields`` are what the layers have to themselves where no ``per_layer_config`` says it.
    """

    kind: str | None = None
    attn_type: str | None = None
    when: Condition | None = None
    facts: Mapping[str, Value] = field(default_factory=dict)
    fields: Mapping[str, Value] = field(default_factory=dict)

    def over(self, below: Call) -> Call:
        """This call's facts, and those of ``below`` that it does not say."""
        kind, attn_type = self.kind or below.kind, self.attn_type or below.attn_type
        facts, fields = {**below.facts, **self.facts}, {**below.fields, **self.fields}
        return Call(kind, attn_type, self.when or below.when, facts, fields)


@dataclass(frozen=True)
class Family:
    """How a family's config, or a part of it, maps to a stack of layers; with ``parts``, to several stacks.

    ``refuse`` holds what contradicts itself, with the sentence for its user; ``watch`` are fields that mean something
    in other families, so that a reader is told where this one does not look at them; ``renamed`` are older words of a
    pattern and what they mean now.
    """

    name: str
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    layers: Value | None = None
    pattern: Pattern | None = None
    base: Call = field(default_factory=Call)
    words: Mapping[str, tuple[Call, ...]] = field(default_factory=dict)
    also: Mapping[str, tuple[Pattern, Mapping[str, Call]]] = field(default_factory=dict)
    kv_shared: Mapping[str, Value] = field(default_factory=dict)
    refuse: tuple[tuple[Condition, str], ...] = ()
    watch: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Part:
    """A stack of a model of several: where its config stands, and ``family(name)``, how it maps to layers.

    ``name`` is the family that the part's own config names, or None for the one that the data says. ``absent`` is the
    part's config where the file has none, ``only`` the index of the only part of that family that stands here.
    """

    at: tuple[str, ...]
    optional: bool
    absent: Mapping[str, Any]
    only: int | None
    family: Callable[[str | None], Family]


class Families:
    """The families of a models.yaml; raises `RegistryError` for what is wrong in the entries that are asked for."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self._lines = text.removeprefix("\ufeff").splitlines()
        self._spans = dict(self._index())
        self._compiled: dict[str, Family] = {}
        self._merged: dict[str, dict[str, Any]] = {}
        self._read: dict[str, tuple[dict[str, Any], Document]] = {}

    @classmethod
    def load(cls, path: Path, label: str) -> Families:
        """The families of a file, named ``label`` in messages."""
        try:
            return cls(path.read_text(encoding="utf-8"), label)
        except (OSError, UnicodeDecodeError) as e:
            raise RegistryError([Problem(Location(label, 1, 1), f"cannot be read: {e}")]) from None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(name for name in self._spans if not name.startswith("=")))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and not name.startswith("=") and name in self._spans

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def where(self, name: str) -> Location:
        """Where a family's entry begins."""
        return Location(self.file, self._spans[name][0] + 1, 3)

    def text(self, name: str) -> str:
        """The entry as it is written."""
        first, last = self._spans[name]
        return "\n".join(line.removeprefix("  ") for line in self._lines[first:last]).rstrip()

    def source(self, name: str) -> str:
        """Where the family's rule was read, following ``like``."""
        return str(self._raw(name).get("source", ""))

    def note(self, name: str) -> str:
        """What the entry says beside its facts."""
        return str(self._entry(name)[0].get("note", ""))

    def like(self, name: str) -> str:
        """The family that this one says it behaves like, or ""."""
        return str(self._entry(name)[0].get("like", ""))

    def get(self, name: str) -> Family:
        """The family, compiled; `general` is the rule for a family that is not in the data."""
        if name not in self._compiled:
            problems: list[Problem] = []
            family = self._compile(name, self._raw(name), self._complainer(name, problems))
            if problems:
                raise RegistryError(problems)
            self._compiled[name] = family
        return self._compiled[name]

    def check(self) -> list[Problem]:
        """Everything that is wrong in the file."""
        problems: list[Problem] = []
        reads: list[Callable[[], object]] = [self._sources, *(partial(self.get, name) for name in ("general", *self))]
        for read in reads:
            try:
                read()
            except RegistryError as e:
                problems += [problem for problem in e.problems if problem not in problems]
        known = self._sources() if not problems else {}
        for name in self if not problems else ():
            source = self.source(name)
            if source.partition(":")[0] not in known or "#" not in source:
                message = f"{name}: `{source}` is no source; write <name>:<path>#<symbol>"
                problems.append(
                    self._problem(name, ("source",), message, did_you_mean(source.partition(":")[0], known))
                )
        return problems

    # reading ---------------------------------------------------------------------------------------------------------

    def _index(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """The lines of each part and entry, by name; parts other than families have a ``=`` before theirs."""
        begun: tuple[str, int] | None = None
        inside = False
        for i, line in enumerate([*self._lines, "end:"]):
            top = line[:1] not in ("", " ", "#")
            entry = _ENTRY.match(line) if inside else None
            if not top and entry is None:
                continue
            if begun:
                yield begun[0], (begun[1], i)
            inside = line.startswith("families:") if top else inside
            if top and not line.startswith(("families:", "general:", "sources:", "end:")):
                problem = Problem(Location(self.file, i + 1, 1), f"unknown part `{line[:40]}`", _PARTS, line)
                raise RegistryError([problem])
            name = (entry[1] or entry[2]) if entry else "=" + line.partition(":")[0]
            begun = (name, i)

    def _entry(self, name: str) -> tuple[dict[str, Any], Document]:
        """An entry's own data, and the document of it alone, whose lines count as the file's."""
        if name not in self._read:
            document = self._document("=general" if name == "general" else name)
            data = document.data[name]
            if not isinstance(data, dict):
                raise RegistryError([document.problem((name,), f"{name}: expected a mapping")])
            self._read[name] = data, document
        return self._read[name]

    def _sources(self) -> Mapping[str, Any]:
        document = self._document("=sources")
        sources = document.data["sources"]
        if not isinstance(sources, dict):
            raise RegistryError([document.problem(("sources",), "sources: expected a mapping")])
        return sources

    def _document(self, span: str) -> Document:
        """A part or an entry alone, its lines counted as the file's."""
        if span in ("=sources", "=general") and span not in self._spans:
            raise RegistryError([Problem(Location(self.file, 1, 1), f"the part `{span[1:]}` is missing", _PARTS)])
        first, last = self._spans[span]
        return Document("\n" * first + "\n".join(self._lines[first:last]) + "\n", self.file)

    def _raw(self, name: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
        """The entry's data laid over that of the family it is like, down to the general rules."""
        if name in self._merged:
            return self._merged[name]
        data, document = self._entry(name)
        merged = data
        if name != "general":
            like = data.get("like", "general")
            if like != "general" and like not in self:
                help_ = did_you_mean(like, self)
                raise RegistryError([document.problem((name, "like"), f"{name}: no family `{like}`", help_)])
            if like in above:
                circle = " -> ".join((*above, name, like))
                raise RegistryError([document.problem((name, "like"), f"families are like each other: {circle}")])
            merged = _lay(self._raw(like, (*above, name)), data)
        self._merged[name] = merged
        return merged

    def _complainer(self, name: str, problems: list[Problem]) -> Complain:
        def complain(path: tuple[str | int, ...], message: str) -> None:
            # a fault of a family that this one is like is told where it stands
            holder = name
            while holder != "general" and path and path[0] not in self._entry(holder)[0]:
                holder = self.like(holder) or "general"
            problems.append(self._problem(holder, path, f"{holder}.{'.'.join(map(str, path))}: {message}"))

        return complain

    def _problem(self, name: str, path: tuple[str | int, ...], message: str, help_: str = "") -> Problem:
        return self._entry(name)[1].problem((name, *path), message, help_)

    # compiling -------------------------------------------------------------------------------------------------------

    def _compile(
        self, name: str, raw: Mapping[str, Any], complain: Complain, path: tuple[str | int, ...] = ()
    ) -> Family:
        for key in raw:
            if key not in _KEYS | _CALL:
                complain((*path, key), f"unknown key; {did_you_mean(key, _KEYS | _CALL)}")
        for key in _MAPS:
            if not isinstance(raw.get(key, {}), dict):
                complain((*path, key), "expected a mapping")
                return Family(name)
        words = {word: _calls(calls, complain, (*path, "words", word)) for word, calls in raw.get("words", {}).items()}
        pattern = compile_pattern(raw["pattern"], complain, (*path, "pattern")) if "pattern" in raw else None
        for word in sorted((pattern.vocabulary if pattern else frozenset()) - words.keys()):
            complain((*path, "pattern"), f"`{word}` is none of the family's words; {did_you_mean(word, words)}")
        also = {}
        for label, item in raw.get("also", {}).items():
            here = (*path, "also", label)
            if not isinstance(item, dict) or item.keys() != {"pattern", "words"}:
                complain(here, "expected a mapping with `pattern` and `words`")
                continue
            extra = {word: _call(facts, complain, (*here, "words", word)) for word, facts in item["words"].items()}
            also[label] = (compile_pattern(item["pattern"], complain, (*here, "pattern")), extra)
        shared = raw.get("kv_shared") or {}
        if not isinstance(shared, dict) or shared.keys() - {"last", "list"}:
            complain((*path, "kv_shared"), "expected a mapping with `last` or `list`")
            shared = {}
        parts = [
            self._part(name, raw, item, complain, (*path, "parts", i)) for i, item in enumerate(raw.get("parts", []))
        ]
        return Family(
            name=name,
            names={key: (v,) if isinstance(v, str) else tuple(v) for key, v in raw.get("names", {}).items()},
            defaults=as_data(raw.get("defaults", {})),
            layers=compile_value(raw["layers"], complain, (*path, "layers")) if "layers" in raw else None,
            pattern=pattern,
            base=_call({k: v for k, v in raw.items() if k in _CALL}, complain, path),
            words=words,
            also=also,
            kv_shared={k: compile_value(v, complain, (*path, "kv_shared", k)) for k, v in shared.items()},
            refuse=tuple(self._refuse(raw.get("refuse", []), complain, (*path, "refuse"))),
            watch=tuple(raw.get("watch", ())),
            renamed=raw.get("renamed", {}),
            note=str(raw.get("note", "")),
            parts=tuple(parts),
        )

    def _refuse(self, raw: Any, complain: Complain, path: tuple[str | int, ...]) -> Iterator[tuple[Condition, str]]:
        for i, item in enumerate(raw):
            if not isinstance(item, dict) or item.keys() != {"when", "because"}:
                complain((*path, i), "expected a mapping with `when` and `because`")
            else:
                yield compile_condition(item["when"], complain, (*path, i, "when")), str(item["because"])

    def _part(
        self, whole: str, raw: Mapping[str, Any], item: dict[str, Any], complain: Complain, path: tuple[str | int, ...]
    ) -> Part:
        """A part of ``whole``; one that stands where the whole stands is like the whole, unless it says otherwise."""
        at = item.get("at", ".")
        at = (at,) if isinstance(at, str) else tuple(at)
        like: str | None = item.get("like")
        own = {key: value for key, value in item.items() if key not in ("at", "optional", "absent", "only", "like")}
        below = {key: value for key, value in raw.items() if key != "parts"} if like is None and "." in at else None
        if like is not None and like not in self:
            complain((*path, "like"), f"no family `{like}`; {did_you_mean(like, self)}")
        made: dict[str, Family] = {}

        def family(name: str | None) -> Family:
            if name is None and below is not None:
                name, base = whole, below
            else:
                name = name or (like if like is not None and like in self else "general")
                base = self._raw(name)
            if name not in made:
                made[name] = self._compile(name, _lay(base, own), complain, path)
            return made[name]

        family(None)
        absent = as_data(item.get("absent", {}))
        if not isinstance(absent, dict):
            complain((*path, "absent"), "expected a mapping, the config that stands in")
            absent = {}
        only = item.get("only")
        if only not in (None, 0, -1):
            complain((*path, "only"), "expected 0 or -1, the first or the last part")
            only = None
        return Part(at, bool(item.get("optional", False)), absent, only, family)


def _lay(below: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """``data`` over ``below``: the mappings key by key (a word's facts fact by fact), all else whole."""
    merged = {key: value for key, value in below.items() if key not in ("note", "like")} | dict(data)
    for key in _MAPS:
        if isinstance(below.get(key), dict) and isinstance(data.get(key), dict):
            merged[key] = below[key] | data[key]
            if key == "words":
                both = [w for w in data[key] if isinstance(below[key].get(w), dict) and isinstance(data[key][w], dict)]
                merged[key] |= {word: below[key][word] | data[key][word] for word in both}
    return merged


def _calls(raw: Any, complain: Complain, path: tuple[str | int, ...]) -> tuple[Call, ...]:
    if isinstance(raw, list):
        return tuple(_call(item, complain, (*path, i)) for i, item in enumerate(raw))
    return (_call(raw, complain, path),)


def _call(raw: Any, complain: Complain, path: tuple[str | int, ...]) -> Call:
    if not isinstance(raw, dict):
        complain(path, "expected a mapping of facts, or a list of them")
        return Call()
    for key in raw.keys() - _CALL:
        complain((*path, key), f"unknown fact; {did_you_mean(key, _CALL)}")
    for key, known in (("kind", KINDS), ("attn_type", ATTN_TYPES)):
        if raw.get(key) not in (None, *known):
            complain((*path, key), f"`{raw[key]}` is not known; {did_you_mean(raw[key], known)}")
    facts = {name: compile_value(raw[name], complain, (*path, name)) for name in FACTS if name in raw}
    for key, dimensions in (("mla", MLA), ("indexer", INDEXER)):
        facts |= _dimensions(key, dimensions, raw, complain, path)
    when = compile_condition(raw["when"], complain, (*path, "when")) if "when" in raw else None
    said = raw.get("fields", {})
    if not isinstance(said, dict):
        complain((*path, "fields"), "expected a mapping from the names of fields to values")
        said = {}
    fields = {name: compile_value(value, complain, (*path, "fields", name)) for name, value in said.items()}
    return Call(raw.get("kind"), raw.get("attn_type"), when, facts, fields)


def _dimensions(
    key: str, names: tuple[str, ...], raw: Mapping[str, Any], complain: Complain, path: tuple[str | int, ...]
) -> dict[str, Value]:
    """``mla: true`` takes each dimension from the field of its name; a mapping says where some come from instead."""
    if key not in raw:
        return {}
    said = raw[key]
    given = said if isinstance(said, dict) and not said.keys() - {*names, "used"} else {}
    facts = {
        f"{key}.used": compile_value(given.get("used", True) if given or said == {} else said, complain, (*path, key))
    }
    for name in names:
        facts[f"{key}.{name}"] = compile_value(
            given.get(name, True if name == "own" else name), complain, (*path, key, name)
        )
    return facts
