"""What a registry says of lines that vLLM logs about its choice of a backend."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from attnreg.engines.logs.reading.values import member
from attnreg.engines.logs.refusals import refusals
from attnreg.engines.logs.tables import TableView, reached, where
from attnreg.engines.vllm_requests import LOGGED, request_from_selector_row
from attnreg.errors import RequestError
from attnreg.language.vocabulary import NAMED
from attnreg.platforms import Platform
from attnreg.registry import Order, Step
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import how_chosen, verdict_words

_FIELD = re.compile(r"(\w{1,60})=([^,]{1,200})")


def of_order(backend: str, accepted: list[str], table: TableView) -> Iterator[str]:
    """The orders that give a list of potential backends, and the entries before the chosen one."""
    # vision towers and the prompts of MLA have orders of their own, and log other lines
    registry, known = table.registry, {**table.known, "role": "target", "phase": "any"}
    there = [o for platform, o in registry.orders.items() if platform == known.get("platform", platform)]
    tried = [order for orders in there for order, *_ in reached(((o, o.when) for o in orders), known)]
    orders = [order for order in tried if _gives(order, accepted)]
    if not orders:
        yield f"no order of {registry.title} gives these in this sequence{table.elsewhere}"
    for order in orders:
        names = list(dict.fromkeys(entry.backend for entry in order.entries))
        before = names[: names.index(accepted[0])]
        applies = f"which applies {where(order.when)}" if order.when.facets else "which applies to every request"
        place = f"the order {order.title} ({order.where.short}), {applies}"
        entries = [entry for entry in order.entries if entry.backend in before]
        some = {entry.backend: entry.condition for entry in entries if entry.condition.facets}
        before = [name for name in before if name not in some]
        for name, condition in some.items():
            place += f", and in which {name} comes first {where(condition)}"
        if before:
            rank = names.index(accepted[0]) + 1
            yield f"{backend} is entry {rank} of {place}; before it {_listed(before)} refused the layer"
        else:
            yield f"{backend} is {'the first entry' if not some else f'entry {len(some) + 1}'} of {place}"


def of_named(backend: str, table: TableView) -> Iterator[str]:
    """The steps that can name a backend for a run."""
    steps = [f"{step.name} ({step.where.short})" for step in table.registry.steps if _names(table, step, backend)]
    code = f", or by the code of a model: {', '.join(steps)}" if steps else ""
    yield f"{backend} was named by the user (--attention-backend){code}"


def of_old(backend: str) -> Iterator[str]:
    """What a line of a release before 0.12 says, which is the same for a default and for a named backend."""
    yield f"{backend} was chosen; this release prints the line for its default and for a backend that the user named"


def of_stored(backend: str, stored: str, table: TableView) -> Iterator[str]:
    """The lines of data by which a backend stores the cache in a format, whatever was requested."""
    found = {
        consequence.where: consequence
        for variant in table.registry.backends[backend].variants
        if table.possible(variant.when)
        for consequence in variant.consequences
        if consequence.stores == stored and table.possible(consequence.when)
    }
    if not found:
        yield (
            f"{table.registry.title} does not say that {backend} stores a cache as {stored} where another format is "
            f"asked for{table.elsewhere}"
        )
    for place, consequence in found.items():
        asked = where(consequence.when) if consequence.when.facets else "whatever it is asked for"
        yield f"{backend} stores the KV cache as {stored}, {asked} ({place.short})"


def of_refused(backend: str, reasons: str, names: Mapping[str, str], table: TableView) -> Iterator[str]:
    """What a backend accepts of each thing that an engine gave as a reason against it."""
    known = [subject for text, subject in names.items() if text in reasons]
    for subject in dict.fromkeys(known):
        yield from of_claim(backend, subject, table)
        for refusal in refusals(table):
            if refusal.row == backend and subject in refusal.facets:
                yield refusal.text


def of_claim(backend: str, subject: str, table: TableView) -> Iterator[str]:
    """What a backend accepts of a facet, or whether it has a feature, each with its line of data."""
    row = table.registry.backends.get(backend)
    said: dict[str, None] = {}
    for variant in row.variants if row is not None else ():
        if not table.possible(variant.when):
            continue
        name = f"{backend}/{variant.name}" if variant.name else backend
        claims = [claim for claim in variant.claims if claim.facet == subject]
        for claim in claims:
            said[f"{name} takes {subject} {claim.matcher.text} ({claim.where.short})"] = None
        if subject == "arch" and variant.requires.facets:
            said[f"{name} needs {variant.requires.describe()} ({variant.where.short})"] = None
        if subject in table.registry.vocabulary.features and subject not in {*variant.features, *variant.emulated}:
            said[f"{name} has no {subject} ({variant.features_at.short})"] = None
    yield from said


def of_version(number: str, row: str, table: TableView) -> Iterator[str]:
    """The variants of a row for a version of a library, with the facets that decide between versions."""
    found = table.registry.backends.get(row)
    for variant in found.variants if found is not None else ():
        if variant.name is not None and number in variant.name and table.possible(variant.when):
            yield f"{row}/{variant.name} is chosen {where(variant.when)} ({variant.where.short})"
    for name in ("fa_layer", "fa_default", "fa_requested", "fa_version"):
        facet = table.registry.derived.get(name)
        for (when, value, place), _ in reached(((c, c[0]) for c in facet.cases), table.known) if facet else ():
            if str(value) == number:
                yield f"version {number} resolves {where(when)} ({name}, {place.short})"
        if facet is not None:
            return


def of_tower(backend: str, table: TableView) -> Iterator[str]:
    """The orders for vision towers that have a backend."""
    for platform, orders in table.registry.orders.items():
        if platform != table.known.get("platform", platform):
            continue
        for order in orders:
            clause = [c for c in order.when.clauses if c.facet == "role" and "vision" in c.matcher.text]
            names = list(dict.fromkeys(entry.backend for entry in order.entries))
            if clause and backend in names and table.possible(order.when):
                at = names.index(backend)
                before = f", after {_listed(names[:at])}" if at else ""
                yield f"{backend} is entry {at + 1} of the order {order.title} ({order.where.short}){before}"


def of_config(text: str, table: TableView) -> Iterator[str]:
    """The registry's own answer to a logged configuration of one layer.

    Raises `RequestError` for a configuration that is cut off, or that has a word which the registry does not know.
    """
    row: dict[str, Any] = {name: _value(value) for name, value in _FIELD.findall(text)}
    lacks = [name for name in ("head_size", "dtype") if name not in row]
    if lacks:
        raise RequestError(f"the line holds no {' and no '.join(lacks)}", "give the whole line, as the engine logs it")
    words = table.registry.vocabulary.words
    for name, known in (("dtype", "dtypes"), ("kv_cache_dtype", "kv_dtypes"), ("attn_type", "attn_types")):
        # the message does not quote the value: it may be anything
        if row.get(name) not in (None, "auto") and row[name] not in words[known]:
            raise RequestError(f"{table.registry.title} does not know the {name} of the line", "is it cut or changed?")
    if table.arch is None:
        yield f"no backend accepts a layer with {_layer_words(row)}"
        yield "no line names the GPU: with --arch the reasons against each backend are printed"
        return
    defaults = {"use_mla": False, "use_sparse": False, "attn_type": "decoder", "kv_cache_dtype": None}
    platform = table.registry.vocabulary.architectures[table.arch].platform
    request, _ = request_from_selector_row({**defaults, **row, "platform": platform, "arch": table.arch})
    selection = evaluate(request, Platform(platform=platform, arch=table.arch), table.registry)
    yield f"{table.registry.title} says: {how_chosen(selection)}"
    unknown = [name for name, value in row.items() if name not in LOGGED and value not in (False, None)]
    if unknown:
        yield f"it was not asked for {', '.join(unknown)}, which no request has here"
    if selection.backend is not None:
        engine = table.registry.title.partition("@")[0]
        yield f"{engine} would accept this layer on {table.arch}, but your engine refused it: is its GPU another?"
    for candidate in selection.candidates:
        against = "; ".join(f"{reason} ({place.short})" for reason, place in verdict_words(selection, candidate))
        yield f"{candidate.title}: {'accepts' if candidate is selection.chosen else against}"


def _layer_words(row: Mapping[str, Any]) -> str:
    stated = {name: value for name, value in row.items() if name in LOGGED and value not in (False, None)}
    words = [name for name in ("dtype", "kv_cache_dtype", "attn_type") if name in stated]
    shown = [name for name, value in stated.items() if name in words or isinstance(value, bool | int)]
    return ", ".join(name if stated[name] is True else f"{name} {stated[name]}" for name in shown)


def _value(text: str) -> object:
    """A value of a logged configuration; ``torch.bfloat16`` and ``AttentionType.DECODER`` lose their prefix."""
    text = member(text.strip().strip("'\"<>"))
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    return int(text) if re.fullmatch(r"-?\d{1,9}", text) else text


def _names(table: TableView, step: Step, backend: str) -> bool:
    return any(effect.sets.get(NAMED) == backend for effect in table.effects(step))


def _gives(order: Order, accepted: list[str]) -> bool:
    """Whether an order has these backends in this sequence."""
    names = iter(dict.fromkeys(entry.backend for entry in order.entries))
    return bool(accepted) and all(name in names for name in accepted)


def _listed(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
