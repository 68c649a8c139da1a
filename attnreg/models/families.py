"""Reads the files of model families and compiles each to a `Family`, at its first use.

The file `models/<model_type>.yaml` describes one family by its differences from its base. The key ``like`` names the
base: another family, or a template, whose file name begins with ``_``. Every chain of bases ends with `_general`.
`_unknown` has the rules for models whose family has no file. Before compilation the statements of a file replace those
of its base. Each statement keeps its location, so an error names the file with the fault.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from attnreg.compile.conditions import Parser
from attnreg.compile.source.quoting import FileKind
from attnreg.compile.source.yaml_source import Document, Path_
from attnreg.compile.validation import FilePart, keys_of, validate
from attnreg.errors import Location, Problem, RegistryError, did_you_mean
from attnreg.files import ALLOW, outside
from attnreg.language.numbers import as_data
from attnreg.language.vocabulary import OpenFacets
from attnreg.models import schema
from attnreg.models.facts import CHECKS
from attnreg.models.patterns import Pattern, compile_pattern
from attnreg.models.stack import Family, NestedStack, StatedCall
from attnreg.models.values import ConfigCondition, Literal, Value, compile_condition, compile_value

GENERAL = "_general"
UNKNOWN = "_unknown"
SOURCES = "_sources"
_FAMILY = FileKind("model family", frozenset(("model_type", "summary")))
_SOURCES = FileKind("file of sources", frozenset(keys_of(schema.SourcesFile)))
# keys that describe the file, or the place of a part, but not the layers
_OWN = {"like", *schema.OF_FILE, *schema.OF_PART}
_FACTS = [name for name in schema.CallData.model_fields if name in CHECKS]
# mappings that are merged with the base's, key by key; any other value replaces the base's
_MAPS = ("names", "defaults", "words", "also")
_FIELDS = OpenFacets()
T = TypeVar("T")
# path in the family's description -> the value of that statement, and its place in a file
Statements = dict[Path_, FilePart[Any]]


class Families:
    """The families of a directory. Its methods raise `RegistryError` for faults in the files that they read.

    files: the names of the files, without their suffix. read: returns the document of a file. label: the name of the
    directory in messages. strays: the names of its other entries.
    """

    def __init__(
        self, files: Iterable[str], read: Callable[[str], Document], label: str, strays: Iterable[str] = ()
    ) -> None:
        self.files = dict.fromkeys(sorted(files))
        self.label = label
        self._strays = tuple(strays)
        self.document = read
        self._names = [name for name in self.files if not name.startswith("_")]
        self._read: dict[str, FilePart[schema.FamilyData]] = {}
        self._laid: dict[str, Statements] = {}
        self._compiled: dict[str, Family] = {}

    @classmethod
    def load(cls, directory: Path, label: str, *, allow_outside: bool = True) -> Families:
        """The families of a directory. label: its name in messages. allow_outside: accept links to other places."""
        if not allow_outside and (why := outside(directory.name, directory.parent)):
            raise RegistryError([Problem(Location(label, 1, 1), f"the directory {why}: copy it, or {ALLOW}")])
        try:
            found = [name for name in os.listdir(directory) if not name.startswith(".")]
        except OSError as e:
            raise RegistryError([Problem(Location(label, 1, 1), f"cannot be read: {e.strerror or e}")]) from None
        files = [name[:-5] for name in found if name.endswith(".yaml")]
        strays = sorted(name for name in found if not name.endswith(".yaml")) if len(files) < len(found) else ()

        below = None if allow_outside else directory

        def read(name: str) -> Document:
            kind = _SOURCES if name == SOURCES else _FAMILY
            return Document.load(directory / f"{name}.yaml", f"{label}/{name}.yaml", kind, below)

        return cls(files, read, label, strays)

    @classmethod
    def of(cls, texts: Mapping[str, str], label: str) -> Families:
        """The families of a mapping from file names, without their suffix, to the files' texts."""
        return cls(texts, lambda name: Document(texts[name], f"{label}/{name}.yaml"), label)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and not name.startswith("_") and name in self.files

    def __len__(self) -> int:
        return len(self._names)

    def where(self, name: str) -> Location:
        """The place of the file of a family or a template."""
        return Location(f"{self.label}/{name}.yaml", 1, 1)

    def text(self, name: str) -> str:
        """The text of the file of a family or a template."""
        return self._file(name).document.text.rstrip()

    def source(self, name: str) -> str:
        """The source in which the family's rule was read, as ``<source>:<path>#<symbol>``."""
        return self._file(name).model.source or ""

    def note(self, name: str) -> str:
        """The sentence that is printed with every model of the family."""
        return self._file(name).model.note

    def like(self, name: str) -> str:
        """The base that the file names: a family or a template; "" if the file has no ``like``."""
        return self._file(name).model.like or ""

    def lineage(self, name: str) -> tuple[str, ...]:
        """The files of a family: its own first, then each base, `_general` last."""
        chain = [name]
        while chain[-1] != GENERAL:
            file = self._file(chain[-1])
            like = file.model.like or GENERAL
            if like in chain:
                circle = " -> ".join((*chain, like))
                raise RegistryError([file.document.problem(("like",), f"like: families are like each other: {circle}")])
            if like not in self.files and like != GENERAL:
                message, known = f"like: there is no file {like}.yaml", (n for n in self.files if n != SOURCES)
                raise RegistryError([file.document.problem(("like",), message, did_you_mean(like, known))])
            chain.append(like)
        return tuple(chain)

    def statements(self, name: str) -> Statements:
        """All statements of a family: its own, and those of its bases that it does not replace.

        A key is a path: ``("window",)``, ``("defaults", "head_dim")`` or ``("words", "full_attention", "kind")``.
        """
        if name not in self._laid:
            laid: Statements = {}
            for member in reversed(self.lineage(name)):
                if member not in self._laid:
                    file = self._file(member)
                    self._laid[member] = _lay(laid, _statements(file))
                laid = self._laid[member]
        return self._laid[name]

    def get(self, name: str) -> Family:
        """The compiled family. The name `_unknown` gives the rules for models whose family has no file."""
        if name not in self._compiled:
            self._compiled[name] = self._compile(name, self.statements(name))
        return self._compiled[name]

    def check(self) -> list[Problem]:
        """The problems of all files of the directory."""
        problems: dict[Problem, None] = {}
        message, help_ = "no file of a family: their names end in .yaml", "rename it, or take it away"
        for stray in self._strays:
            problems[Problem(Location(f"{self.label}/{stray}", 1, 1), message, help_)] = None
        sources: frozenset[str] = frozenset()
        try:
            sources = frozenset(self._sources())
        except RegistryError as e:
            problems |= dict.fromkeys(e.problems)
        for name in sorted({*self.files, GENERAL, UNKNOWN}):
            try:
                if name != SOURCES:
                    self._check(name, sources)
            except RegistryError as e:
                problems |= dict.fromkeys(e.problems)
        return list(problems)

    def _check(self, name: str, sources: frozenset[str]) -> None:
        for part in self.get(name).parts:
            part.family(None)
        file = self._file(name)
        source = file.model.source
        if source is not None and (source.partition(":")[0] not in sources or "#" not in source):
            message = f"source: `{source}` is no source; write <name>:<path>#<symbol>"
            help_ = did_you_mean(source.partition(":")[0], sources)
            raise RegistryError([file.document.problem(("source",), message, help_)])

    def _file(self, name: str) -> FilePart[schema.FamilyData]:
        """The contents of one file, without its bases."""
        if name not in self._read:
            self._must_exist(name)
            document = self.document(name)
            data = validate(schema.FamilyData, document.data, document)
            if data is not None:
                _introduced(name, data, document)
            if data is None or document.problems:
                raise RegistryError(document.problems)
            self._read[name] = FilePart(data, document)
        return self._read[name]

    def _must_exist(self, name: str) -> None:
        if name not in self.files:
            raise RegistryError([Problem(Location(f"{self.label}/{name}.yaml", 1, 1), "the file is missing")])

    def _sources(self) -> Iterable[str]:
        """The names of the sources that the families' files cite."""
        self._must_exist(SOURCES)
        document = self.document(SOURCES)
        data = validate(schema.SourcesFile, document.data, document)
        if data is None or document.problems:
            raise RegistryError(document.problems)
        return data.sources

    def _compile(self, name: str, rules: Statements) -> Family:
        compiler = _FamilyCompiler()
        family = compiler.family(name, rules)
        if ("parts",) in rules:
            parts = rules["parts",]
            items = enumerate(parts.model)
            family = family._replace(
                parts=tuple(self._part(name, rules, parts.piece(item, i), compiler) for i, item in items)
            )
        if compiler.problems:
            raise RegistryError(compiler.problems)
        return family

    def _part(
        self, whole: str, rules: Statements, part: FilePart[schema.FamilyData], compiler: _FamilyCompiler
    ) -> NestedStack:
        """One part of the family ``whole``.

        The base of a part without ``like``, whose config is the whole's own config, is the whole family.
        """
        data, like, parser = part.model, part.model.like, compiler.parser(part)
        for key in schema.OF_FILE:
            if key in data.model_fields_set:
                parser.problem((*part.path, key), f"a part has no `{key}`", "it is the file that says it", key=True)
        if like is not None and like not in self.files:
            known = (name for name in self.files if name != SOURCES)
            message = f"there is no file {like}.yaml"
            parser.problem((*part.path, "like"), message, did_you_mean(like, known))
        own = _statements(part)
        made: dict[str, Family] = {}

        def family(name: str | None) -> Family:
            if name is None and like is None and "." in data.at:
                name, below = whole, {path: piece for path, piece in rules.items() if path != ("parts",)}
            else:
                name = name or like or GENERAL
                below = dict(self.statements(name))
            if name not in made:
                made[name] = self._compile(name, _lay(below, own))
            return made[name]

        return NestedStack(tuple(data.at), data.optional, as_data(data.absent), data.only, family)


class _FamilyCompiler:
    """Compiles the statements of a family, and collects their problems."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def parser(self, piece: FilePart[Any]) -> Parser:
        return Parser(_FIELDS, piece.document, self.problems)

    def family(self, name: str, rules: Statements) -> Family:
        """The `Family` of these statements (``rules``), without its parts."""
        plain = _under(rules)
        words = {word: self._calls(piece, rules) for word, piece in _under(rules, "words").items()}
        pattern = None
        if "pattern" in plain:
            pattern = self._pattern(plain["pattern"], words)
        shared: FilePart[schema.KvSharedData | None] | None = plain.get("kv_shared")
        refuse: list[FilePart[schema.RefusalData]] = _items(plain.get("refuse"))
        return Family(
            name=name,
            names={field: tuple(piece.model) for field, piece in _under(rules, "names").items()},
            defaults={field: as_data(piece.model) for field, piece in _under(rules, "defaults").items()},
            layers=self._value(plain["layers"], "layers") if "layers" in plain else None,
            pattern=pattern,
            base=self._call(plain),
            words=words,
            also={label: self._also(piece) for label, piece in _under(rules, "also").items()},
            kv_shared={} if shared is None or shared.model is None else self._shared(shared.piece(shared.model)),
            mtp=self._value(plain["mtp"], "layers") if "mtp" in plain else None,
            refuse=tuple(self._refusal(piece) for piece in refuse),
            watch=tuple(plain["watch"].model) if "watch" in plain else (),
            renamed=plain["renamed"].model if "renamed" in plain else {},
            note=plain["note"].model if "note" in plain else "",
        )

    def _value(self, piece: FilePart[Any], fact: str) -> Value:
        return compile_value(piece.model, self.parser(piece), piece.path, CHECKS[fact])

    def _condition(self, piece: FilePart[Any]) -> ConfigCondition:
        return compile_condition(piece.model, self.parser(piece), piece.path)

    def _pattern(self, piece: FilePart[Any], words: Iterable[str]) -> Pattern:
        parser = self.parser(piece)
        pattern = compile_pattern(piece.model, parser, piece.path)
        for word in sorted(pattern.vocabulary.difference(words)):
            parser.problem(piece.path, f"`{word}` is none of the family's words", did_you_mean(word, words))
        return pattern

    def _calls(self, piece: FilePart[list[schema.CallData]], rules: Statements) -> tuple[StatedCall, ...]:
        """The attention calls of a word. Each fact of a single call is a statement, so a base may give it."""
        word = piece.path[-1]
        if len(piece.model) == 1:
            return (self._call(_under(rules, "words", word)),)
        return tuple(self._call(_facts(call)) for call in _items(piece))

    def _call(self, rules: Mapping[str, FilePart[Any]]) -> StatedCall:
        kind, attn_type = (rules[key].model if key in rules else None for key in ("kind", "attn_type"))
        facts = {fact: self._value(rules[fact], fact) for fact in _FACTS if fact in rules}
        for key in ("mla", "indexer", "state"):
            if key in rules:
                facts |= self._dimensions(key, rules[key])
        fields = {} if "fields" not in rules else self._fields(rules["fields"])
        return StatedCall(kind, attn_type, self._condition(rules["when"]) if "when" in rules else None, facts, fields)

    def _dimensions(self, key: str, piece: FilePart[Any]) -> dict[str, Value]:
        if piece.model is None:
            return {f"{key}.used": Literal(False)}
        dimensions = [(name, f"{key}.{name}") for name in type(piece.model).model_fields]
        return {fact: self._value(piece.piece(getattr(piece.model, name), name), fact) for name, fact in dimensions}

    def _fields(self, piece: FilePart[dict[str, Any]]) -> dict[str, Value]:
        items = {name: piece.piece(value, name) for name, value in piece.model.items()}
        return {name: compile_value(item.model, self.parser(item), item.path) for name, item in items.items()}

    def _also(self, piece: FilePart[schema.AlsoData]) -> tuple[Pattern, Mapping[str, StatedCall]]:
        calls = {word: piece.piece(call, "words", word) for word, call in piece.model.words.items()}
        words = {word: self._call(_facts(call)) for word, call in calls.items()}
        return self._pattern(piece.piece(piece.model.pattern, "pattern"), words), words

    def _shared(self, piece: FilePart[schema.KvSharedData]) -> dict[str, Value]:
        items = {name: piece.piece(getattr(piece.model, name), name) for name in piece.model.model_fields_set}
        return {name: compile_value(item.model, self.parser(item), item.path) for name, item in items.items()}

    def _refusal(self, piece: FilePart[schema.RefusalData]) -> tuple[ConfigCondition, str]:
        condition = self._condition(piece.piece(piece.model.when, "when"))
        if not condition.fields and not self.problems:
            self.parser(piece).problem((*piece.path, "when"), "names no field", "say which configs are refused")
        return condition, piece.model.because


def _under(rules: Statements, *above: str | int) -> dict[str, FilePart[Any]]:
    """The statements directly below a path, by their last key."""
    depth = len(above)
    return {str(p[-1]): piece for p, piece in rules.items() if len(p) == depth + 1 and p[:depth] == above}


def _items(piece: FilePart[list[T]] | None) -> list[FilePart[T]]:
    return [] if piece is None else [piece.piece(item, i) for i, item in enumerate(piece.model)]


def _facts(call: FilePart[schema.CallData]) -> dict[str, FilePart[Any]]:
    """The facts that the data of a call has, by name."""
    names = [name for name in type(call.model).model_fields if name in call.model.model_fields_set]
    return {name: call.piece(getattr(call.model, name), name) for name in names}


def _statements(file: FilePart[Any]) -> Statements:
    """The statements of a file or of a part, without its bases, by their path in the family's description."""
    out: Statements = {}
    for key, piece in _facts(file).items():
        if key in _MAPS:
            for name, value in piece.model.items():
                out[key, name] = piece.piece(value, name)
                if key == "words" and len(value) == 1:
                    call = out[key, name].piece(value[0])
                    out |= {(key, name, fact): value for fact, value in _facts(call).items()}
        elif key not in _OWN:
            out[key,] = piece
    return out


def _lay(below: Statements, own: Statements) -> Statements:
    """The statements ``own``, merged over the statements of a base.

    A word with several calls replaces the base's word as a whole. A note is not inherited.
    """
    several = {path for path, piece in own.items() if path[0] == "words" and len(path) == 2 and len(piece.model) != 1}
    return {path: piece for path, piece in below.items() if path != ("note",) and path[:2] not in several} | own


def _introduced(name: str, file: schema.FamilyData, document: Document) -> None:
    """Report missing keys and forbidden keys of a file; families and templates differ in both."""
    template = name.startswith("_")
    kind, needed, foreign = "a family", ["model_type", "source"], ["summary", *schema.OF_PART]
    if template:
        kind, needed, foreign = "a template", ["summary"], ["model_type", "source", *schema.OF_PART]
    for key in needed:
        if getattr(file, key) is None:
            help_ = f"the file of {kind} must have it"
            document.problems.append(document.problem((), f"`{key}` is missing", help_))
    for key in foreign:
        if key in file.model_fields_set:
            help_ = "it says where a part stands" if key in schema.OF_PART else "the names of templates begin with `_`"
            document.problems.append(document.problem((key,), f"{kind} has no `{key}`", help_, key=True))
    if not template and file.model_type not in (None, name):
        message = f"model_type: `{file.model_type}` stands in the file of `{name}`"
        document.problems.append(document.problem(("model_type",), message, "give the file and the family one name"))
