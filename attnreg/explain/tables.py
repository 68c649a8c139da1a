"""Tables for a terminal: the backends, one backend, and the difference between two registries."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from attnreg.analysis.diff import Diff
    from attnreg.models.families import Families
    from attnreg.platforms import Platform
    from attnreg.registry import Backend, Order, Registry, Variant


def list_backends(
    registry: Registry, platforms: Sequence[Platform] | None, console: Console, *, as_json: bool = False
) -> None:
    """Print every backend, or those that run on some platforms, with the orders that may apply there."""
    wanted = {p.platform for p in platforms} if platforms else None
    rows = [r for r in registry.backends.values() if wanted is None or wanted & r.platforms]
    if as_json:
        click.echo(json.dumps([backend_dict(r) for r in rows], indent=2))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, title=f"registry {registry.title}", title_justify="left", pad_edge=False)
    for title, ratio in (("backend", None), ("attention", None), ("platforms", None), ("what it is", 1)):
        table.add_column(title, ratio=ratio, no_wrap=ratio is None, overflow="fold")
    for row in rows:
        status = "" if row.status == "stable" else f" ({row.status})"
        table.add_row(
            row.name, ", ".join(sorted(row.attention)), ", ".join(sorted(row.platforms)), row.summary + status
        )
    console.print(table)
    if wanted is not None:
        for platform in sorted(wanted):
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
    """Everything that the registry says of a backend, as JSON-ready values."""
    return {
        "name": row.name,
        "summary": row.summary,
        "status": row.status,
        "module": row.module,
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
                "claims": {c.key: c.matcher.text for c in v.claims},
                "features": sorted(v.features),
                "emulated": {f: reason for f, (reason, _) in v.emulated.items()},
                "rules": [{"when": r.when.describe(), "reject": r.reject, "where": str(r.where)} for r in v.rules],
                "source": v.source,
            }
            for v in row.variants
        ],
    }


def show_backend(registry: Registry, row: Backend, console: Console, *, as_json: bool = False) -> None:
    """Print one backend: who it is, and per variant what it needs, accepts, serves and refuses."""
    if as_json:
        click.echo(json.dumps(backend_dict(row), indent=2))
        return
    from rich.text import Text

    console.print(Text(row.name, style="bold").append(f"   {row.summary}", style=""))
    status = [row.status, row.module or "knowledge only: no kernel module", f"since {row.since}" if row.since else ""]
    console.print(Text(f"  {' · '.join(filter(None, status))}   ", style="dim").append(row.where.short, style="blue"))
    for line in (*row.notes, f"only on request: {row.only_on_request}" if row.only_on_request else ""):
        if line:
            console.print(Text(f"  {line}", style="dim"))
    if row.source:
        console.print(Text(f"  source {row.source}", style="dim"))
    for variant in row.variants:
        console.print()
        _show_variant(variant, console)
    places = [
        f"{rank}. in {order.title}"
        for orders in registry.orders.values()
        for order in orders
        for rank, entry in enumerate(order.entries, 1)
        if entry.backend == row.name
    ]
    console.print()
    console.print(Text("orders  ", style="bold").append(", ".join(places) or "none: only on request"))


def _show_variant(variant: Variant, console: Console) -> None:
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
    for claim in variant.claims:
        table.add_row(f"  {claim.key}", claim.matcher.text, claim.where.short)
    table.add_row("  features", ", ".join(sorted(variant.features)) or "none", variant.features_at.short)
    for feature, (reason, where) in variant.emulated.items():
        table.add_row("  emulates", f"{feature}: {reason}", where.short)
    for rule in variant.rules:
        table.add_row("  refuses", f"{rule.reject} [{rule.when.describe()}]".replace("[", "\\["), rule.where.short)
    console.print(table)


def family_dict(families: Families, name: str) -> dict[str, Any]:
    """What is known of a model family, as JSON-ready values; ``groups`` are those of a config without any field."""
    from attnreg.models.questions import group_layers
    from attnreg.models.reader import ConfigError, requests_from_model

    try:
        groups = requests_from_model({"model_type": name}, families=families).groups
    except ConfigError:
        # the class itself has no default for something that every file says
        groups = ()
    return {
        "model_type": name,
        "like": families.like(name) or None,
        "note": families.note(name) or None,
        "source": families.source(name),
        "where": str(families.where(name)),
        "rule": families.text(name),
        "groups": [{"layers": group_layers(g), "label": g.label} for g in groups],
    }


def list_families(families: Families, names: Sequence[str], console: Console, *, as_json: bool = False) -> None:
    """Print model families, each with the layers that its class has by default."""
    found = [family_dict(families, name) for name in names]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, title=f"{len(found)} model families", title_justify="left", pad_edge=False)
    table.add_column("model_type", no_wrap=True)
    table.add_column("like", no_wrap=True, style="dim")
    table.add_column("layers of its class by default", ratio=1)
    for item in found:
        lines = [f"{g['layers']}  {g['label']}" for g in item["groups"]]
        table.add_row(item["model_type"], item["like"] or "", "\n".join(lines))
    console.print(table)


def show_family(families: Families, name: str, console: Console, *, as_json: bool = False) -> None:
    """Print how a family's configs are read: its entry, those that it is like, and what its class has by default."""
    found = family_dict(families, name)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    from rich.text import Text

    chain = [name]
    while like := families.like(chain[-1]):
        chain.append(like)
    for member in chain:
        heading = Text(member, style="bold").append(
            "" if member == name else f"   which {chain[0]} is like", style="dim"
        )
        console.print(heading.append(f"   {families.where(member).short}", style="blue"))
        # without its first line, which is the name again
        for line in families.text(member).splitlines()[1:]:
            console.print(Text(line), soft_wrap=True)
        console.print()
    console.print(Text("a config without any other field", style="bold"))
    for item in found["groups"]:
        console.print(Text(f"  {item['layers']}   {item['label']}"))
    if not found["groups"]:
        console.print(Text("  cannot be read: the class has no default for something that every file says"))


def print_diff(difference: Diff, console: Console) -> None:
    """Print what changes between two registries: for each pair of backends its boxes and counts."""
    from rich.text import Text

    from attnreg.analysis.diff import facets_text

    title = Text(f"{difference.before.title} → {difference.after.title}", style="bold")
    console.print(title)
    changed, size = difference.count, difference.size
    share = f" ({changed / size:.2%})" if changed and size else ""
    console.print(Text(f"{changed:,} of {size:,} distinguishable configurations change{share}", style="dim"))
    for registry, words in ((difference.before, difference.gone), (difference.after, difference.new)):
        if words:
            text = "; ".join(f"{facet} {', '.join(names)}" for facet, names in words.items())
            _wrapped(console, text, f"only {registry.name} knows ", "dim")
    for change in difference.changes:
        console.print()
        head = Text()
        head.append(change.before or "none", style="red" if change.after else "bold red").append(" → ")
        head.append(change.after or "none", style="green" if change.after else "bold red")
        head.append(f"   {change.kind} · {change.count:,} configurations", style="dim")
        console.print(head)
        _wrapped(console, facets_text(change.frame), "  where ", "dim")
        for region in change.regions if len(change.regions) > 1 or change.regions[0].facets else ():
            _wrapped(console, f"{region.text} ({region.count:,})", "  • ", "")
        if change.rest:
            console.print(Text(f"  … and {change.rest:,} more (--limit shows more boxes)", style="dim"))


def _wrapped(console: Console, text: str, head: str, style: str) -> None:
    """Print text that hangs under its first word."""
    import textwrap

    from rich.text import Text

    indent = " " * len(head)
    for line in textwrap.wrap(
        text, console.width, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False
    ):
        console.print(Text(line, style=style))
