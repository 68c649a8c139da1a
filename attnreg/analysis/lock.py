"""`attnreg lock`: writes the outcomes that a deployment relies on to a file, and compares them with later data."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from attnreg.analysis.moves import AskedGroup, Move, Moves, moved, paired, refusal_of, renaming, why
from attnreg.analysis.outcome import (
    SETS,
    Decided,
    Outcome,
    completed,
    config_facets,
    decide,
    same_kernel,
    unknown_notes,
)
from attnreg.compile.inputs.bundled import bundled_registries
from attnreg.compile.source.json_places import RepeatedKeyError, place, repeated, unrepeated
from attnreg.compile.source.quoting import FileKind, may_quote, with_cuts
from attnreg.compile.source.yaml_source import shown
from attnreg.errors import Location, Problem, RegistryError, RequestError, plain_word
from attnreg.files import FileError, parse_json, read_text
from attnreg.loader import load_registry
from attnreg.platforms import Platform
from attnreg.request import AttentionRequest
from attnreg.selection.consequences import failure_words
from attnreg.selection.question import UNREAD
from attnreg.selection.selector import evaluate

if TYPE_CHECKING:
    from attnreg.registry import Registry
    from attnreg.selection.question import Question

_LOCK = FileKind("lock", frozenset({"format", "registry", "selections"}))
FORMAT = 4
MAX_BYTES = 64 << 20
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "text",
}


class LockError(RegistryError):
    """Raised for an unreadable lock file, and for one that `attnreg lock` cannot have written."""

    subject = "the lock"


class Locked(NamedTuple):
    """One entry of a lock: a group of a model's layers on a platform, and its outcome.

    ``is_exact`` is False for an entry of an older attnreg, which did not distinguish an unknown outcome from a refusal
    by every backend.
    """

    asked: AskedGroup
    platform: Platform
    outcome: Outcome
    is_exact: bool = True


class Lock(NamedTuple):
    """The contents of a lock file.

    ``registry`` and ``overlays`` name the data behind the outcomes, ``fingerprint`` is its hash. ``detected``: the
    platform is the machine on which the lock was written. ``skip_layers`` are the data's rules for layers that keep
    another KV cache, by KV dtype; the requests of those layers follow from them.
    """

    registry: str
    overlays: tuple[str, ...]
    fingerprint: str
    detected: bool
    skip_layers: Mapping[str, Any]
    entries: tuple[Locked, ...]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Platform(_Strict):
    platform: str
    arch: str
    flags: list[str]
    packages: dict[str, str] | None
    device: str | None = None


class _Outcome(_Strict):
    backend: str | None
    variant: str | None
    fails: list[str] = []
    emulates: list[str]
    unchecked: list[str]
    kv_cache: dict[str, str]
    needs: list[str]
    packages: dict[str, str]
    # an older attnreg did not record it, or recorded null
    follows: dict[str, str] | None = None
    problem: str | None = None


class _Entry(_Strict):
    model: str
    layers: str
    label: str
    platform: _Platform
    request: dict[str, Any]
    outcome: _Outcome


class _File(_Strict):
    format: int
    registry: str
    overlays: list[str]
    fingerprint: str
    detected: bool
    skip_layers: dict[str, list[dict[str, Any]]]
    selections: list[_Entry]


def write_lock(
    registry: Registry,
    models: Mapping[str, Sequence[Question]],
    platforms: Sequence[Platform],
    *,
    overlays: Sequence[str] = (),
    detected: bool = False,
    warnings: dict[str, None] | None = None,
) -> dict[str, Any]:
    """The lock of every question of every model on every platform, as JSON-ready values.

    warnings: a dict that gets a sentence for each choice with a known failure.

    Raises `RequestError` for a question with a word that the registry does not know.
    """
    entries: list[dict[str, Any]] = []
    failing = _Failing()
    for model, questions in models.items():
        for asked in paired(model, questions, questions):
            for platform in platforms:
                request = asked.requests[1]
                if request is None:
                    failing.unread(asked)
                    break
                # raises for a word that the registry does not know
                evaluate(request, platform, registry)
                decided = decide(request, platform, registry)
                failing.add(asked, platform, decided)
                entries.append(
                    {
                        "model": model,
                        "layers": asked.layers,
                        "label": asked.label,
                        "platform": platform.to_dict(),
                        "request": request.to_dict(),
                        "outcome": decided.outcome.to_dict(),
                    }
                )
    if warnings is not None:
        warnings |= dict.fromkeys(failing.sentences())
    head = {"format": FORMAT, "registry": registry.base, "overlays": list(overlays)}
    head |= {"fingerprint": registry.fingerprint, "detected": detected}
    return {
        **head,
        "skip_layers": _skip_layers(registry, {e["request"].get("kv_dtype") for e in entries}),
        "selections": entries,
    }


def nothing_to_lock(models: Mapping[str, Sequence[Question]]) -> str:
    """Why no layer of some models can be locked; "" if one can."""
    asked = [question for questions in models.values() for question in questions]
    if any(question.request for question in asked):
        return ""
    unread = any(question.kind == UNREAD for question in asked)
    return "which attention they have is not known" if unread else "none has softmax attention"


def open_entries(data: Mapping[str, Any], models: Mapping[str, Sequence[Question]]) -> tuple[bool, bool]:
    """Whether some layer of a written lock has no backend, and whether that of some layer is not known."""
    outcomes = [entry["outcome"] for entry in data["selections"] if entry["outcome"]["backend"] is None]
    unread = any(question.kind == UNREAD for questions in models.values() for question in questions)
    return any(not outcome["problem"] for outcome in outcomes), unread or any(o["problem"] for o in outcomes)


def _skip_layers(registry: Registry, kv_dtypes: Iterable[str | None]) -> dict[str, Any]:
    """The rules for layers that keep another cache in runs with these KV dtypes, without their reasons."""
    words = registry.vocabulary.words.get("kv_dtypes", {})
    found = {w: words[w].facts.get("skip_layers", ()) for w in kv_dtypes if w is not None and w in words}
    return {w: [_plain(rule) for rule in rules] for w, rules in sorted(found.items()) if rules}


def _plain(rule: Mapping[str, Any]) -> dict[str, Any]:
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in rule.items() if k != "because"}
    return plain | {"ask": dict(rule["ask"])}


def read_lock(path: Path) -> Lock:
    """The contents of a lock file. Raises `LockError`, with the place, for any other file."""
    try:
        text = read_text(path, MAX_BYTES)
        data = parse_json(text, str(path), unrepeated)
    except RepeatedKeyError:
        raise _LockFile(path, text).repeated() from None
    except FileError as e:
        raise LockError([e.problem]) from None
    file = _LockFile(path, text)
    if not isinstance(data, dict) or "format" not in data:
        raise file.problem((), "no lock file: it states no format", "write it with `attnreg lock`")
    if data["format"] != FORMAT or isinstance(data["format"], bool):
        message = f"a lock file of format {shown(data['format'])}; this attnreg reads format {FORMAT}"
        raise file.problem(("format",), message, "write it again with `attnreg lock`")
    try:
        contents = _File.model_validate(data)
    except ValidationError as e:
        raise file.invalid(e.errors(include_url=False)[0]) from None
    entries, seen = [], dict[Any, int]()
    for number, entry in enumerate(contents.selections):
        locked = file.entry(number, entry)
        first = seen.setdefault((locked.asked, locked.platform), number)
        if first != number:
            raise file.problem(("selections", number), f"selection {number + 1} repeats selection {first + 1}")
        entries.append(locked)
    if not entries:
        raise file.problem(("selections",), "the lock holds no selection")
    head = (contents.registry, tuple(contents.overlays), contents.fingerprint, contents.detected)
    return Lock(*head, contents.skip_layers, tuple(entries))


def drift(
    lock: Lock, registry: Registry, here: Platform | None = None, packages: Sequence[tuple[str, str]] | None = None
) -> Moves:
    """The locked outcomes that are different in ``registry``.

    An outcome that neither the lock nor ``registry`` knows is not a move; it becomes a note, and the model is among the
    unknown ones. If a lock of an older attnreg has no backend for an entry, an unknown outcome is not a move either.
    Another note lists choices that were locked with a known failure, and that still fail.

    A variant with another name and the same kernel is not a move but is renamed. That needs the lock's registry, which
    must be bundled and still decide what was locked.

    here: this machine. If it is like the machine on which the lock was written, its installed packages replace the
    lock's; an upgrade of a package is then a move. packages: name and version of packages that replace the lock's on
    every platform.

    Raises `RequestError` if ``registry`` and the lock's registry have different rules for layers that keep another KV
    cache: the lock's requests are then not those of such a run.
    """
    words = {entry.asked.requests[1].kv_dtype for entry in lock.entries if entry.asked.requests[1]}
    skip_layers = _skip_layers(registry, words | lock.skip_layers.keys())
    if changed := [
        word
        for word in sorted({*skip_layers, *lock.skip_layers})
        if skip_layers.get(word) != lock.skip_layers.get(word)
    ]:
        raise RequestError(
            f"the lock cannot be compared with {registry.name}: in runs with {', '.join(changed)} some layers of"
            " a model ask for something else there than where the lock was written",
            f"see what moves with `attnreg diff {lock.registry} {registry.name} --model ... --kv-dtype {changed[0]}`,"
            " then write the lock again",
        )
    moves, renamed = list[Move](), list[Move]()
    notes, unknown, failing = dict[str, None](), dict[tuple[str, str], dict[str, None]](), _Failing()
    locked = _bundled(lock.registry) if lock.registry in bundled_registries() and not lock.overlays else None
    if locked is not None and (lacking := config_facets(registry) - locked.vocabulary.facets.keys()):
        text = f"the lock lacks {len(lacking)} facets that {registry.name} reads from a model's config"
        notes[f"{text}: `attnreg upgrade` compares with them"] = None
    for entry in lock.entries:
        platform = entry.platform
        if packages is not None:
            platform = replace(platform, packages=tuple(packages))
        elif lock.detected and here is not None:
            if (here.platform, here.arch, here.device) == (platform.platform, platform.arch, platform.device):
                platform = replace(platform, packages=here.packages)
            else:
                was, now = (" ".join(filter(None, (p.platform, p.arch, p.device))) for p in (platform, here))
                notes[f"the lock was written on {was} and this is {now}: its packages are compared as locked"] = None
        request = entry.asked.requests[1]
        assert request is not None
        new = decide(completed(request, registry), platform, registry)
        notes |= dict.fromkeys(f"{registry.name} has no {word}: compared without it" for word in new.ignored)
        is_exact = entry.is_exact or new.selection is None
        old = entry.outcome if is_exact else replace(entry.outcome, problem=new.outcome.problem)
        if old.fails:
            failing.add(entry.asked, platform, new)
        if moved(old, new.outcome):
            before = Decided(old, None) if locked is None else decide(request, platform, locked)
            if before.outcome == old and (line := same_kernel(before, new)) is not None:
                renamed.append(Move(entry.asked, platform, old, new.outcome, (renaming(line),)))
                continue
            reasons = why(Decided(old, None), new)
            moves.append(Move(entry.asked, platform, old, new.outcome, reasons, refused=refusal_of(new)))
        elif new.outcome.problem:
            unknown.setdefault((registry.name, new.outcome.problem), {})[entry.asked.model or "the request"] = None
    asked = tuple(dict.fromkeys(entry.asked for entry in lock.entries))
    platforms = tuple(dict.fromkeys(entry.platform for entry in lock.entries))
    names = dict.fromkeys(model for models in unknown.values() for model in models)
    notes |= dict.fromkeys((*failing.sentences(), *unknown_notes(unknown)))
    return Moves(tuple(moves), asked, platforms, (*notes,), tuple(names), tuple(renamed))


@functools.lru_cache(maxsize=2)
def _bundled(name: str) -> Registry:
    """The bundled registry of that name, loaded once."""
    return load_registry(name)


class _Failing:
    """The choices with a known failure: each warning with the models and platforms that it applies to."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, None]] = {}

    def add(self, asked: AskedGroup, platform: Platform, decided: Decided) -> None:
        """Add the known failures of a decision."""
        selection = decided.selection
        if selection is None or not selection.fails:
            return
        where = " ".join(filter(None, (platform.arch, platform.device)))
        for follows in selection.consequences:
            if follows.kind == "fails":
                text = failure_words(selection.title, follows)
                self.found.setdefault(text, {})[f"{asked.model or 'the request'} on {where}"] = None

    def unread(self, asked: AskedGroup) -> None:
        """Add layers that are not locked, because their attention is not known."""
        text = "which attention they have is not known, so they are not locked"
        self.found.setdefault(text, {})[f"{asked.layers} of {asked.model}"] = None

    def sentences(self) -> list[str]:
        """A sentence for each failure."""
        return [f"{', '.join(places)}: {text}" for text, places in self.found.items()]


class _LockFile(NamedTuple):
    """The text of a lock file, for the places of its problems."""

    path: Path
    text: str

    def problem(self, at: tuple[str | int, ...], message: str, help_: str = "") -> LockError:
        """The error for the value at a path."""
        line, column = place(self.text, at)
        return LockError([Problem(Location(str(self.path), line, column), with_cuts(message), help_)])

    def invalid(self, error: Any) -> LockError:
        """The error for a value of the wrong form."""
        at = tuple(error["loc"])
        name = "".join(f"[{step + 1}]" if isinstance(step, int) else f".{step}" for step in at).lstrip(".")
        if error["type"] == "missing":
            return self.problem(at[:-1], f"{name} is missing", "write the lock again with `attnreg lock`")
        if error["type"] == "extra_forbidden":
            return self.problem(at, f"{name}: a lock has no such key")
        expected = _EXPECTED.get(error["type"]) or error["msg"]
        return self.problem(at, f"{name}: expected {expected}, got {shown(error['input'])}")

    def repeated(self) -> LockError:
        """The error for the first repeated key."""
        key, line, column = repeated(self.text)
        named = with_cuts(f"the key {key!r}") if may_quote(_LOCK, self.text) else "a key"
        return LockError([Problem(Location(str(self.path), line, column), f"{named} is given twice")])

    def entry(self, number: int, entry: _Entry) -> Locked:
        """One entry. Raises `LockError` for an impossible request, platform or outcome."""
        at = ("selections", number)
        try:
            request = AttentionRequest.from_dict(entry.request)
        except (RequestError, TypeError) as e:
            raise self.problem((*at, "request"), f"selection {number + 1}: {e}") from None
        try:
            place = entry.platform.model_dump()
            # the word of a lock is no product, and not left out
            place |= {name: plain_word(name, place[name]) for name in ("platform", "arch")}
            platform = Platform(**place)
        except RequestError as e:
            raise self.problem((*at, "platform"), f"selection {number + 1}: {e}") from None
        values = entry.outcome.model_dump()
        problem, backend = values.pop("problem"), values["backend"]
        if backend is None and any(values.values()):
            message = f"selection {number + 1}: an outcome without a backend has nothing else"
            raise self.problem((*at, "outcome"), message)
        if backend is not None and problem:
            message = f"selection {number + 1}: an outcome with a backend has no problem"
            raise self.problem((*at, "outcome", "problem"), message)
        sets = {name: tuple(values[name]) for name in SETS}
        asked = AskedGroup(entry.model, entry.layers, entry.label, (request, request))
        is_exact = backend is not None or problem is not None
        return Locked(asked, platform, Outcome(**{**values, **sets, "problem": problem or ""}), is_exact)
