"""A snapshot: the backends of some requests on every platform in a file, and the moves since it was written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnreg.errors import Location, RegistryError, RequestError
from attnreg.platforms import Platform
from attnreg.request import AttentionRequest
from attnreg.selection.selector import evaluate
from attnreg.selection.wording import request_words

if TYPE_CHECKING:
    from attnreg.compile.source.yaml_source import Document
    from attnreg.registry import Registry

NOBODY = "none"


def snapshot(
    registry: Registry, requests: Sequence[Mapping[str, Any]], platforms: Sequence[str]
) -> list[dict[str, Any]]:
    """The entries of a snapshot: each request with, for each backend, the platforms that select it."""
    entries = []
    for fields in requests:
        request, platforms_of = AttentionRequest.from_dict(fields), dict[str, list[str]]()
        for text in platforms:
            platforms_of.setdefault(_selected(request, text, registry), []).append(text)
        entries.append({"request": dict(fields), "selected": {name: " ".join(p) for name, p in platforms_of.items()}})
    return entries


def moved_selections(document: Document, registry: Registry) -> Iterator[tuple[tuple[str, str], Location, str]]:
    """Each move from one backend to another since a snapshot was written, the line of its first request, and words.

    Raises `RegistryError` for a document that is not a snapshot of this registry.
    """
    firsts: dict[tuple[str, str], tuple[Location, str]] = {}
    counts = Counter[tuple[str, str]]()
    for path, request, name, platforms in _lines(document):
        moved: dict[str, list[str]] = {}
        for text in platforms:
            try:
                now = _selected(request, text, registry)
            except RequestError as e:
                raise RegistryError([document.problem(path, str(e))]) from None
            if now != name:
                moved.setdefault(now, []).append(text)
        for now, where in moved.items():
            words = f"{' · '.join(request_words(request))} on {', '.join(where)}"
            firsts.setdefault((name, now), (document.key_at(*path), words))
            counts[name, now] += len(where)
    for (before, now), (place, words) in firsts.items():
        count = counts[before, now]
        what = f"{count} selections of the snapshot move" if count > 1 else "a selection of the snapshot moves"
        yield (before, now), place, f"{what} from {before} to {now}, {'the first for' if count > 1 else 'for'} {words}"


def _lines(document: Document) -> Iterator[tuple[tuple[str | int, ...], AttentionRequest, str, list[str]]]:
    """For each entry and backend: the path in the document, the request, the backend, and its platforms."""
    data = document.data
    entries = data.get("selections") if isinstance(data, dict) else None
    if not isinstance(entries, list):
        raise RegistryError([document.problem((), "expected a list under `selections`")])
    for number, entry in enumerate(entries):
        try:
            request = AttentionRequest.from_dict(entry["request"])
            lines = [(str(name), str(platforms).split()) for name, platforms in entry["selected"].items()]
        except (KeyError, TypeError, AttributeError, RequestError) as e:
            message = f"expected a `request`, and under `selected` the platforms of each backend: {e}"
            raise RegistryError([document.problem(("selections", number), message)]) from None
        for name, platforms in lines:
            yield ("selections", number, "selected", name), request, name, platforms


def _selected(request: AttentionRequest, text: str, registry: Registry) -> str:
    """The selected backend (``FLASH_ATTN/FA3`` or ``none``) on a platform such as ``gfx942+aiter``, with its flags."""
    arch, *flags = text.split("+")
    known = registry.vocabulary.architectures.get(arch)
    if known is None:
        raise RequestError(f"unknown architecture {arch!r}")
    platform = Platform(platform=known.platform, arch=arch, flags=frozenset(flags))
    chosen = evaluate(request, platform, registry).backend
    if chosen is None:
        return NOBODY
    return f"{chosen.name}/{chosen.variant}" if chosen.variant else chosen.name
