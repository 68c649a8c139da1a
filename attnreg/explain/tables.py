"""Backends as text for a terminal, and as JSON-ready values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from attnreg.compile.yaml_source import as_written

if TYPE_CHECKING:
    from rich.console import Console

    from attnreg.platforms import Platform
    from attnreg.registry import Backend, Order, Registry, Variant


def backends_on(registry: Registry, platforms: Sequence[Platform]) -> list[Backend]:
    """The backends that run on at least one of the platforms; all backends, if there are no platforms."""
    names = {p.platform for p in platforms}
    return [row for row in registry.backends.values() if not names or names & row.platforms]


def print_backends(registry: Registry, platforms: Sequence[Platform], console: Console) -> None:
    """Print the backends of `backends_on`, and the orders of the platforms."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, title=f"registry {registry.title}", title_justify="left", pad_edge=False)
    columns = (("backend", None), ("attention", None), ("platforms", None), ("run by", None), ("what it is", 1))
    for title, ratio in columns:
        table.add_column(title, ratio=ratio, no_wrap=ratio is None, overflow="fold")
    rows = backends_on(registry, platforms)
    for row in rows:
        status = "" if row.status == "stable" else f" ({row.status})"
        words = [", ".join(sorted(row.attention)), ", ".join(sorted(row.platforms))]
        table.add_row(row.name, *words, row.module.partition(".")[0] if row.module else "–", row.summary + status)
    console.print(table)
    missing = sum(row.module is None for row in rows)
    if missing:
        text = f"–: knowledge only; {missing} of {len(rows)} rows have no kernel module: they can be explained, not run"
        console.print(Text(text, style="dim"))
    for platform in sorted({p.platform for p in platforms}):
        _print_orders(registry.orders.get(platform, ()), console)


def _print_orders(orders: Iterable[Order], console: Console) -> None:
    from rich.text import Text

    for order in orders:
        condition = order.when.describe()
        head = Text(order.title, style="bold").append("" if condition == "always" else f"   {condition}", style="dim")
        head.append(f"   {order.where.short}", style="blue")
        console.print(head)
        names = []
        for rank, entry in enumerate(order.entries, 1):
            extra = entry.condition.describe()
            names.append(f"{rank} {entry.backend}" + ("" if extra == "always" else f" if {extra}"))
        console.print(Text("  " + " → ".join(names)))


def backend_dict(row: Backend) -> dict[str, Any]:
    """A backend with its variants, as JSON-ready values."""
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
                "requires": v.requires.describe(),
                "claims": {c.key: c.matcher.text for c in v.claims} | dict.fromkeys(v.open, "any"),
                "features": sorted(v.features),
                "emulated": {f: reason for f, (reason, _) in v.emulated.items()},
                "rules": [{"when": r.when.describe(), "reject": r.reject, "where": str(r.where)} for r in v.rules],
                "source": v.source,
            }
            for v in row.variants
        ],
    }


def print_backend(registry: Registry, row: Backend, console: Console) -> None:
    """Print one backend: its summary and status, and what each variant needs, accepts, serves and refuses."""
    from rich.text import Text

    console.print(Text(row.name, style="bold").append(f"   {row.summary}", style=""))
    module = row.module or "knowledge only: no kernel module"
    contract = f"contract {row.contract}" if row.contract is not None else ""
    status = [row.status, module, contract, f"since {row.since}" if row.since else ""]
    console.print(Text(f"  {' · '.join(filter(None, status))}   ", style="dim").append(row.where.short, style="blue"))
    for line in (*row.notes, f"only on request: {row.only_on_request}" if row.only_on_request else ""):
        if line:
            console.print(Text(f"  {line}", style="dim"))
    if row.options:
        options = ", ".join(f"{name} {as_written(value)}" for name, value in row.options.items())
        console.print(Text(f"  options {options}", style="dim"))
    if row.source:
        console.print(Text(f"  source {row.source}", style="dim"))
    for variant in row.variants:
        console.print()
        _print_variant(variant, [*registry.vocabulary.claims], console)
    places = [
        f"{rank}. in {order.title}"
        for orders in registry.orders.values()
        for order in orders
        for rank, entry in enumerate(order.entries, 1)
        if entry.backend == row.name
    ]
    console.print()
    console.print(Text("orders  ", style="bold").append(", ".join(places) or "none: only on request"))


def _print_variant(variant: Variant, keys: list[str], console: Console) -> None:
    """Print one variant. ``keys`` are the keys of claims, in the order of the vocabulary."""
    from rich.table import Table
    from rich.text import Text

    if variant.name:
        condition = variant.when.describe()
        head = Text(f"▸ {variant.name}", style="bold")
        head.append("" if condition == "always" else f"   when {condition}", style="dim")
        console.print(head.append(f"   {variant.where.short}", style="blue"))
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(ratio=1)
    table.add_column(no_wrap=True, style="blue")
    for clause in variant.requires.clauses:
        table.add_row(f"  needs {clause.facet}", clause.matcher.text, clause.where.short)
    stated = {claim.key: (claim.matcher.text, claim.where) for claim in variant.claims}
    stated |= {key: ("any", where) for key, where in variant.open.items()}
    for key in sorted(stated, key=lambda k: keys.index(k) if k in keys else -1):
        text, where = stated[key]
        table.add_row(f"  {key}", text, where.short, style="dim" if key in variant.open else None)
    table.add_row("  features", ", ".join(sorted(variant.features)) or "none", variant.features_at.short)
    for feature, (reason, where) in variant.emulated.items():
        table.add_row("  emulates", f"{feature}: {reason}", where.short)
    for rule in variant.rules:
        table.add_row("  refuses", f"{rule.reject} [{rule.when.describe()}]".replace("[", "\\["), rule.where.short)
    console.print(table)
