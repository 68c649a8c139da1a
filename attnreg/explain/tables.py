"""Backends as text for a terminal, and as JSON-ready values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnreg.compile.source.yaml_source import as_written
from attnreg.explain.layout import Column, emit, table, wrapped
from attnreg.language.packed import packed_formats
from attnreg.selection.consequences import consequence_words
from attnreg.selection.wording import registry_words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from attnreg.language.conditions import Condition
    from attnreg.language.packed import Packed
    from attnreg.platforms import Platform
    from attnreg.registry import Backend, Order, Registry, Variant

# the head size for which the bytes of packed formats are printed
_HEAD_SIZE = 128


def backends_on(registry: Registry, platforms: Sequence[Platform]) -> list[Backend]:
    """The backends that may run on at least one of the platforms; all backends, if there are no platforms."""

    def runs(row: Backend, platform: Platform) -> bool:
        read = platform.platform in row.platforms and platform.arch not in registry.vocabulary.unread
        return read and any(fits(variant, _hardware(platform)) for variant in row.variants)

    return [row for row in registry.backends.values() if not platforms or any(runs(row, p) for p in platforms)]


def fits(variant: Variant, hardware: Mapping[str, Any]) -> bool:
    """Whether a variant may run on some hardware (``platform``, ``arch`` and ``device``), whatever is installed."""
    return variant.when.decided(hardware) is not False and variant.requires.decided(hardware) is not False


def _hardware(platform: Platform) -> dict[str, Any]:
    """The facts of a platform without its flags and packages; an unknown device is left out."""
    known = {"platform": platform.platform, "arch": platform.arch}
    return known if platform.device is None else {**known, "device": platform.device}


def _runnable(row: Backend, platforms: Sequence[Platform]) -> list[Variant]:
    """The variants with a kernel module that may run on a platform; all of them, if there are no platforms."""
    return [
        v
        for v in row.variants
        if v.module
        and (not platforms or any(fits(v, _hardware(p)) and v.when.decided(p.facts()) is not False for p in platforms))
    ]


def _run_by(variants: Sequence[Variant]) -> str:
    """The package that runs variants of a row: ``attnreg``, ``attnreg *`` if a user must name each, or ``–``."""
    packages = dict.fromkeys((v.module or "").partition(".")[0] for v in variants)
    star = " *" if variants and all(v.run_on_request for v in variants) else ""
    return f"{next(iter(packages))}{star}" if packages else "–"


def print_backends(registry: Registry, platforms: Sequence[Platform], console: Console) -> None:
    """Print the backends of `backends_on`, and the orders of the platforms."""
    from rich.text import Text

    width, shown = console.width, backends_on(registry, platforms)
    columns = [Column("backend", "bold"), *(Column(name) for name in ("attention", "platforms", "run by"))]
    rows = []
    for row in shown:
        status = "" if row.status == "stable" else f" ({row.status})"
        words = [", ".join(sorted(row.attention)), ", ".join(sorted(row.platforms))]
        rows.append([row.name, *words, _run_by(_runnable(row, platforms)), row.summary + status])
    lines = [Text(registry_words(registry), style="bold"), Text()]
    lines += [*table([*columns, Column("what it is", wraps=True)], rows, width), Text()]
    missing = sum(not _runnable(row, platforms) for row in shown)
    legends = []
    if any(row[3].endswith("*") for row in rows):
        legends.append(
            "*: attnreg itself runs it where it is named, by a user or as a variant in an order; `show` says why"
        )
    if missing:
        legends.append(
            f"–: knowledge only; {missing} of {len(shown)} rows have no kernel module: they can be explained, not run"
        )
    lines += [Text(part, style="dim") for text in legends for part in wrapped(text, width, "  ")]
    unread = {p.arch for p in platforms if p.arch in registry.vocabulary.unread}
    lines += [Text(f"{registry.name} says nothing of {arch}") for arch in sorted(unread)]
    for platform in sorted({p.platform for p in platforms if p.arch not in unread}):
        lines += _order_lines(registry.orders.get(platform, ()), width)
    emit(lines, console)


def _order_lines(orders: Iterable[Order], width: int) -> Iterator[Text]:
    """The name, the condition and the place of each order, and its backends below them."""
    from rich.text import Text

    for order in orders:
        yield from head(order.title, condition_words(order.when), order.where.short, width)
        names = []
        for rank, entry in enumerate(order.entries, 1):
            names.append(f"{rank} {entry.backend}" + condition_words(entry.condition, " if "))
        yield from (Text(part) for part in wrapped(" → ".join(names), width, "    ", first="  "))


def condition_words(condition: Condition, before: str = "") -> str:
    """A condition in words, after ``before``; "" for a condition that always holds."""
    text = condition.describe()
    return "" if text == "always" else f"{before}{text}"


def head(title: str, text: str, where: str, width: int, *, style: str = "bold") -> Iterator[Text]:
    """A title, a text and the line of data, on one line if there is room."""
    from rich.text import Text

    if len("   ".join(filter(None, (title, text, where)))) <= width:
        line = Text(title, style=style)
        for part, its_style in ((text, "not bold dim"), (where, "not bold not dim blue")):
            line.append(f"   {part}" if part else "", style=its_style)
        yield line
        return
    for part, its_style in ((title, style), (text, "dim"), (where, "blue")):
        first = "" if part == title else "  "
        yield from (Text(line, style=its_style) for line in wrapped(part, width, "  ", first=first))


def backend_dict(registry: Registry, row: Backend) -> dict[str, Any]:
    """A backend with its variants and the packed formats that it claims, as JSON-ready values."""
    return {
        "name": row.name,
        "summary": row.summary,
        "status": row.status,
        "module": row.module,
        "contract": row.contract,
        "options": dict(row.options),
        "platforms": sorted(row.platforms),
        "attention": sorted(row.attention),
        "phases": sorted(row.phases) if row.phases is not None else None,
        "source": row.source,
        "since": row.since,
        "where": str(row.where),
        "notes": list(row.notes),
        "only_on_request": row.only_on_request,
        "variants": [
            {
                "name": v.name,
                "when": v.when.describe(),
                "module": v.module,
                "run_on_request": v.run_on_request,
                "requires": v.requires.describe(),
                "claims": {c.key: c.matcher.text for c in v.claims} | dict.fromkeys(v.open, "any"),
                "features": sorted(v.features),
                "emulated": {f: reason for f, (reason, _) in v.emulated.items()},
                "rules": [{"when": r.when.describe(), "reject": r.reject, "where": str(r.where)} for r in v.rules],
                "consequences": [
                    {"when": c.when.describe(), "text": consequence_words(c), "where": str(c.where)}
                    for c in v.consequences
                ],
                "source": v.source,
            }
            for v in row.variants
        ],
        "packed_formats": [
            {
                "name": packed.name,
                "keys": packed.keys._asdict(),
                "values": packed.values._asdict(),
                "head_size": _HEAD_SIZE,
                "token_bytes": packed.token_bytes(_HEAD_SIZE),
                "ratio": round(packed.ratio(_HEAD_SIZE), 3),
            }
            for packed in _formats(registry, row)
        ],
    }


def print_backend(registry: Registry, row: Backend, console: Console) -> None:
    """Print one backend: its summary and status, and what each variant needs, accepts, serves and refuses."""
    from rich.text import Text

    width = console.width
    lines = [*head(row.name, row.summary, "", width)]
    contract = f"contract {row.contract}" if row.contract is not None else ""
    module = row.module or ("" if row.modules else "knowledge only: no kernel module")
    status = [row.status, module, contract, f"since {row.since}" if row.since else ""]
    lines += head(f"  {' · '.join(filter(None, status))}", "", row.where.short, width, style="dim")
    options = ", ".join(f"{name} {as_written(value)}" for name, value in row.options.items())
    named = {"only on request:": row.only_on_request, "options": options, "source": row.source}
    for text in (*row.notes, *(f"{name} {value}" for name, value in named.items() if value)):
        lines += [Text(part, style="dim") for part in wrapped(text, width, "    ", first="  ")]
    for variant in row.variants:
        own = variant.module if variant.module != row.module else None
        lines += [Text(), *_variant_lines(variant, own, [*registry.vocabulary.claims], width)]
    if formats := _formats(registry, row):
        lines += [Text(), *_format_lines(formats, width)]
    places = [
        f"{rank}. in {order.title}" + (f" as {entry.backend}" if entry.backend != row.name else "")
        for orders in registry.orders.values()
        for order in orders
        for rank, entry in enumerate(order.entries, 1)
        if entry.backend in (row.name, *(f"{row.name}/{variant}" for variant in row.variant_names))
    ]
    orders = [Text(part) for part in wrapped(f"orders  {', '.join(places) or 'none: only on request'}", width, "  ")]
    orders[0].stylize("bold", 0, len("orders"))
    emit([*lines, Text(), *orders], console)


def _formats(registry: Registry, row: Backend) -> list[Packed]:
    """The packed formats of the KV cache that a backend claims."""
    formats = packed_formats(registry.vocabulary.words.get("kv_dtypes", {}))
    claims = [c.matcher for v in row.variants for c in v.claims if c.facet == "kv_dtype"]
    return [packed for name, packed in formats.items() if any(claim.matches(name) for claim in claims)]


def _format_lines(formats: Iterable[Packed], width: int) -> Iterator[Text]:
    """The table of packed formats: their codes and their bytes."""
    bytes_of = f"bytes of a token and head of {_HEAD_SIZE}"
    columns = [Column("packed formats", "bold"), Column("keys and values", wraps=True), Column(bytes_of, right=True)]
    rows = []
    for packed in formats:
        of_16_bits = f"{packed.ratio(_HEAD_SIZE):.2f}x fewer"
        stored = f"{packed.keys.words}; {packed.values.words}"
        rows.append([f"  {packed.name}", stored, f"{packed.token_bytes(_HEAD_SIZE)} ({of_16_bits})"])
    yield from table(columns, rows, width)


def _variant_lines(variant: Variant, module: str | None, keys: list[str], width: int) -> Iterator[Text]:
    """The lines of one variant.

    module: its kernel module, if it has one of its own. keys: the keys of claims, in the order of the vocabulary.
    """
    if variant.name:
        yield from head(f"▸ {variant.name}", condition_words(variant.when, "when "), variant.where.short, width)
    if module:
        yield from head(f"  {module}", "", "", width, style="dim")
    if variant.run_on_request:
        from rich.text import Text

        text = f"runs only where it is named: {variant.run_on_request}"
        yield from (Text(part, style="dim") for part in wrapped(text, width, "    ", first="  "))
    rows = [[f"  needs {c.facet}", c.matcher.text, c.where.short] for c in variant.requires.clauses]
    for group in variant.requires.any_of:
        where = next(clause.where for condition in group for clause in condition.walk())
        rows.append(["  needs", " or ".join(condition.describe() for condition in group), where.short])
    stated = {claim.key: (claim.matcher.text, claim.where) for claim in variant.claims}
    stated |= {key: ("any", where) for key, where in variant.open.items()}
    for key in sorted(stated, key=lambda k: keys.index(k) if k in keys else -1):
        text, where = stated[key]
        rows.append([f"  {key}", text, where.short])
    rows.append(["  features", ", ".join(sorted(variant.features)) or "none", variant.features_at.short])
    rows += [["  emulates", f"{name}: {reason}", where.short] for name, (reason, where) in variant.emulated.items()]
    rows += [["  refuses", f"{rule.reject} [{rule.when.describe()}]", rule.where.short] for rule in variant.rules]
    for known in variant.consequences:
        when = condition_words(known.when, " [")
        rows.append(["  once chosen", f"{consequence_words(known)}{when}{']' if when else ''}", known.where.short])
    yield from table([Column(style="bold"), Column(wraps=True), Column(style="blue")], rows, width)
