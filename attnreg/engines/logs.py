"""Explains lines that engines log about their attention backends, from a registry's data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from attnreg.engines.vllm_requests import LOGGED, request_from_selector_row
from attnreg.errors import RequestError, did_you_mean
from attnreg.language.computed import From
from attnreg.language.conditions import Condition
from attnreg.language.vocabulary import NAMED
from attnreg.platforms import Platform
from attnreg.registry import Effect, Order, Registry, Step
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import how_chosen, verdict_words

_NAME = r"(?:AttentionBackendEnum\.)?(?P<backend>[A-Z][A-Z0-9_]+)"
_VLLM = (
    rf"(?:Using|Overriding with) {_NAME}(?: attention)?(?: backend)? out of potential backends: \[(?P<others>[^\]]+)\]",
    rf"(?P<named>Using) {_NAME} backend(?: \(selected via --attention-backend\))?\.",
    rf"Using (?P<stores>\w+) KV cache format for {_NAME} backend\.",
    rf"Selected backend {_NAME} is not valid for this configuration\. Reason: \[?(?P<reasons>[^\]]*)",
    r"No valid attention backend found for (?P<device>\w+) with AttentionSelectorConfig\((?P<config>[^)]*)\)",
    rf"--block-size (?P<block>\d+) precluded higher-priority backend\(s\) (?P<lost>[\w, ]+)\. Using {_NAME} instead",
)
_WORD = r"(?P<backend>[a-z][a-z0-9_]+)"
_SGLANG = (
    rf"(?P<default>Attention backend not specified)\. Use {_WORD} backend by default",
    rf"Attention backend not specified\. Falling back to '{_WORD}' for (?P<mode>deterministic inference)",
    rf"Us(?:e|ing) {_WORD} as (?:the )?(?:default )?(?:prefill )?attention backend (?:for|on .* for) (?P<model>[\w-]+)",
    rf"(?:Us(?:e|ing)|Auto-select) {_WORD} attention backend for (?P<model>[\w-]+)",
    rf"only supports (?P<cache>fp8_e4m3) if using FP8; Setting attention backend to {_WORD}",
    (
        r"(?P<who>[\w-]+(?: M[HL]A)?)(?: attention| backend)? only supports (?:a )?page.size "
        r".*chang(?:e|ing) page_size (?:from \w+ )?to (?P<pages>\d{1,9})\b"
    ),
)
T = TypeVar("T")
# the facets with which SGLang's steps set a target's backend
_WRITTEN = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


@dataclass(frozen=True)
class LogLine:
    """The content of a log line: the engine, the backend that it names (or None), and the other parts."""

    engine: str
    backend: str | None
    parts: dict[str, str]


def read_line(line: str) -> LogLine | None:
    """The content of a line about attention backends; None for any other line."""
    for engine, patterns in (("vllm", _VLLM), ("sglang", _SGLANG)):
        for pattern in patterns:
            found = re.search(pattern, line)
            if found:
                groups = found.groupdict().items()
                parts = {name: text for name, text in groups if text is not None and name != "backend"}
                return LogLine(engine, found.groupdict().get("backend"), parts)
    return None


def explained(line: LogLine, registry: Registry, arch: str | None = None) -> Iterator[str]:
    """Sentences that explain a line from a registry's data; with ``arch`` only what is possible on it.

    Raises `RequestError` for a backend that the registry does not know.
    """
    name = line.backend
    known = _known(registry, arch)
    if name is not None and name not in registry.backends:
        help_ = f"the line is of another release; {did_you_mean(name, registry.backends)}"
        raise RequestError(f"{registry.title} has no backend {name}", help_)
    if line.engine == "sglang":
        yield from _of_sglang(line, registry, arch)
    elif "config" in line.parts:
        yield from _of_config(line.parts, registry, arch)
    elif "others" in line.parts:
        yield from _of_order(line, registry, arch)
    elif "lost" in line.parts:
        yield f"{name} was chosen because a block of {line.parts['block']} tokens rules out {line.parts['lost']}"
        for lost in line.parts["lost"].split(", "):
            yield from _claim(lost, "block_size", registry, known)
    elif "stores" in line.parts:
        yield from _of_stored(line, registry, arch)
    elif "reasons" in line.parts:
        yield f"{name} was asked for by name, and its class refuses: {line.parts['reasons']}"
        yield f"what it serves: `attnreg show {name} --registry {registry.name}`"
    else:
        steps = [f"{step.name} ({step.where.short})" for step in registry.steps if _names(step, name, known)]
        code = f", or by the code of a model: {', '.join(steps)}" if steps else ""
        yield f"{name} was named, and no order was looked at: by the user (--attention-backend){code}"


def _of_order(line: LogLine, registry: Registry, arch: str | None) -> Iterator[str]:
    """The orders that give a list of potential backends, and the entries before the chosen one."""
    accepted = re.findall(r"[A-Z][A-Z0-9_]+", line.parts["others"])
    known = _known(registry, arch)
    there = [o for platform, o in registry.orders.items() if platform == known.get("platform", platform)]
    tried = [order for orders in there for order, *_ in _reached(((o, o.when) for o in orders), known)]
    orders = [order for order in tried if _gives(order, accepted)]
    yield f"{line.backend} is the first of {len(accepted)} backends that accept the layer: {', '.join(accepted)}"
    if not orders:
        yield f"no order of {registry.title} gives these in this sequence{_elsewhere(arch)}"
    for order in orders:
        names = [entry.backend for entry in order.entries]
        before = names[: names.index(accepted[0])]
        refused = f"; {', '.join(before)} stood before it and refused the layer" if before else ", which it leads"
        yield f"order {order.title} ({order.where.short}), for {order.when.describe()}{refused}"
    lost = [n for o in orders for n in (e.backend for e in o.entries) if n not in accepted]
    if lost:
        yield f"why one refuses: `attnreg explain --registry {registry.name} --arch {arch or 'ARCH'} --model CONFIG`"


def _known(registry: Registry, arch: str | None) -> dict[str, Any]:
    """The facets whose values follow from an architecture, derived ones included; empty without an architecture."""
    if arch is None:
        return {}
    known: dict[str, Any] = {"arch": arch, "platform": registry.vocabulary.architectures[arch].platform}
    for name, facet in registry.derived.items():
        (value, holds), *_ = [*_reached(((value, when) for when, value, _ in facet.cases), known), (None, None)]
        if holds and not isinstance(value, From):
            known[name] = value
    return known


def _reached(cases: Iterable[tuple[T, Condition]], known: Mapping[str, Any]) -> Iterator[tuple[T, bool | None]]:
    """The cases that can be the first to hold at known values of some facets, each with whether it certainly holds."""
    for case, when in cases:
        holds = when.decided(known)
        if holds is not False:
            yield case, holds
        if holds:
            return


def _elsewhere(arch: str | None) -> str:
    """The end of a sentence about a line that the registry does not explain."""
    return f" on {arch}: the line is of another release or GPU" if arch else ": the line is of another release"


def _of_stored(line: LogLine, registry: Registry, arch: str | None) -> Iterator[str]:
    """The lines of data by which a backend stores the cache in the format of a log line, whatever was requested."""
    assert line.backend is not None
    stored = line.parts["stores"]
    known = _known(registry, arch)
    found = {
        consequence.where: consequence
        for variant in registry.backends[line.backend].variants
        if variant.when.decided(known) is not False
        for consequence in variant.consequences
        if consequence.stores == stored and consequence.when.decided(known) is not False
    }
    if not found:
        yield (
            f"{registry.title} does not say that {line.backend} stores a cache as {stored} where another format is "
            f"asked for{_elsewhere(arch)}"
        )
    for where, consequence in found.items():
        asked = f"where {consequence.when.describe()}" if consequence.when.facets else "whatever it is asked for"
        yield f"{line.backend} stores the KV cache as {stored}, {asked} ({where.short})"


def _names(step: Step, backend: str | None, known: Mapping[str, Any]) -> bool:
    """Whether a step can name a backend for the whole run at known values of some facets."""
    return any(effect.sets.get(NAMED) == backend for effect in _effects(step, known))


def _effects(step: Step, known: Mapping[str, Any]) -> list[Effect]:
    """The effects that a step can have at known values of some facets."""
    possible = step.when.decided(known) is not False
    return [effect for effect, _ in _reached(((e, e.when) for e in step.effects), known)] if possible else []


def _gives(order: Order, accepted: list[str]) -> bool:
    """Whether an order has these backends in this sequence."""
    names = iter(dict.fromkeys(entry.backend for entry in order.entries))
    return bool(accepted) and all(name in names for name in accepted)


def _of_config(parts: dict[str, str], registry: Registry, arch: str | None) -> Iterator[str]:
    """The registry's own answer to the configuration in a line, on one architecture."""
    row = {name: _value(text) for name, text in re.findall(r"(\w+)=([^,]+)", parts["config"])}
    platform = parts["device"]
    if arch is None:
        yield f"no backend accepts {parts['config']}; name the GPU with --arch, and each reason is printed"
        return
    lacks = [name for name in ("head_size", "dtype") if name not in row]
    if lacks:
        raise RequestError(f"the line holds no {' and no '.join(lacks)}", "give the whole line, as the engine logs it")
    defaults = {"use_mla": False, "use_sparse": False, "attn_type": "decoder", "kv_cache_dtype": None}
    request, _ = request_from_selector_row({**defaults, **row, "platform": platform, "arch": arch})
    selection = evaluate(request, Platform(platform=platform, arch=arch), registry)
    yield f"{registry.title} says: {how_chosen(selection)}"
    unknown = [f"{name}={value}" for name, value in row.items() if name not in LOGGED and value not in (False, None)]
    if unknown:
        yield f"it was not asked for {', '.join(unknown)}, which no request has here"
    if selection.backend is not None:
        yield f"it accepts what the line's engine did not: the line is of another release or machine than {arch}"
    for candidate in selection.candidates:
        words = "; ".join(f"{text} ({where.short})" for text, where in verdict_words(selection, candidate))
        yield f"{candidate.title}: {'accepts' if candidate is selection.chosen else words}"


def _value(text: str) -> object:
    """A value of a logged configuration; ``torch.bfloat16`` and ``AttentionType.DECODER`` lose their prefix."""
    text = text.strip().strip("'\"")
    if member := re.fullmatch(r"[A-Za-z]\w*\.([A-Za-z]\w*)", text):
        return member[1].lower()
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    return int(text) if re.fullmatch(r"-?\d{1,9}", text) else text


def _of_sglang(line: LogLine, registry: Registry, arch: str | None) -> Iterator[str]:
    """The steps of SGLang's resolution that may have logged a line: they write its value, for its model or reason."""
    known = _known(registry, arch)
    if "pages" in line.parts:
        who, pages = line.parts["who"], int(line.parts["pages"])
        yield f"{who} does not read the pages that were asked for, and a step writes {pages} tokens a page"
        word = _plain(who).replace("tensorrtllm", "trtllm")
        sizes = _written(registry, ("block_size",), known)
        found = [text for text, value, about in sizes if value == pages and word in _plain(about)]
    elif "default" in line.parts:
        yield f"{line.backend} is the default where neither the user nor the model names a backend"
        found = list(_defaults(registry, line.backend, known))
    else:
        about = line.parts.get("model") or line.parts.get("mode") or f"a cache other than {line.parts.get('cache')}"
        yield f"{line.backend} was written for {about} by one step of the resolution; a later step may write another"
        word = line.parts.get("model") or {"mode": "deterministic", "cache": "kv_dtype"}[next(iter(line.parts))]
        writes = [w for w in _written(registry, _WRITTEN, known) if w[1] == line.backend]
        found = [text for text, _, about in writes if _plain(word) in _plain(about)]
    yield from found or [f"no step of {registry.title} does so{_elsewhere(arch)}"]
    asked = f"--registry {registry.name} --arch {arch or 'ARCH'} --set architecture=NAME"
    yield f"`attnreg explain {asked}` says which one decided"


def _written(registry: Registry, facets: tuple[str, ...], known: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Each value that a step may write to one of some facets: a text with its place, the value, and its conditions."""
    for step in registry.steps:
        for effect in _effects(step, known):
            conditions = [c for c in (step.when, effect.when) if c.facets]
            where = " and ".join(c.describe() for c in conditions) or "always"
            looked = [registry.derived[name] for c in conditions for name in c.facets if name in registry.derived]
            about = " ".join([where, *(c.describe() for facet in looked for c, _, _ in facet.cases)])
            written = (effect.sets.get(name) for name in facets)
            for value in dict.fromkeys(v for v in written if v is not None and not isinstance(v, From)):
                yield f"{step.name} ({effect.where.short}), where {where}", value, about


def _defaults(registry: Registry, backend: str | None, known: Mapping[str, Any]) -> Iterator[str]:
    """The cases of the default that give a backend at known values of some facets."""
    sets = [effect.sets.get("attention_backend") for step in registry.steps for effect in step.effects]
    for facet in {value.facet: None for value in sets if isinstance(value, From) and value.facet in registry.derived}:
        cases = registry.derived[facet].cases
        for (condition, value, place), _ in _reached(((case, case[0]) for case in cases), known):
            if value == backend:
                where = condition.describe() if condition.facets else "nothing before holds"
                yield f"{facet} ({place.short}), where {where}"


def _plain(text: str) -> str:
    return re.sub(r"[\W_]", "", text).casefold()


def _claim(name: str, facet: str, registry: Registry, known: Mapping[str, Any]) -> Iterator[str]:
    for variant in registry.backends[name].variants if name in registry.backends else ():
        for claim in variant.claims if variant.when.decided(known) is not False else ():
            if claim.facet == facet:
                yield f"{name} takes blocks of {claim.matcher.text} ({claim.where.short})"
                return
