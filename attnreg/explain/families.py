"""Model families as text for a terminal and as JSON-ready values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnreg.explain.layout import Column, emit, table, wrapped

if TYPE_CHECKING:
    from rich.console import Console

    from attnreg.models.families import Families


def family_dict(families: Families, name: str) -> dict[str, Any]:
    """A model family as JSON-ready values. ``groups`` are the layers of a config that has no field but model_type."""
    from attnreg.models.questions import group_layers
    from attnreg.models.reader import ConfigError, requests_from_model

    try:
        groups = requests_from_model({"model_type": name}, families=families).groups
    except ConfigError:
        # the class has no default for a field that every file has
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


def print_families(families: Families, names: Sequence[str], console: Console) -> None:
    """Print model families, each with the layers that its class has by default."""
    from rich.text import Text

    rows = []
    for item in (family_dict(families, name) for name in names):
        groups = [f"{g['layers']}  {g['label']}" for g in item["groups"]]
        rows.append([item["model_type"], item["like"] or "", "\n".join(groups)])
    columns = [
        Column("model_type", "bold"),
        Column("like", "dim"),
        Column("layers of its class by default", wraps=True),
    ]
    title = Text("1 model family" if len(names) == 1 else f"{len(names)} model families", style="bold")
    emit([title, Text(), *table(columns, rows, console.width)], console)


def print_family(families: Families, name: str, console: Console) -> None:
    """Print a family's file, the files of the families that it is like, and its class's default layers."""
    from rich.text import Text

    width = console.width
    values, lines = family_dict(families, name), []
    # the last, the general rules, holds for every family
    for member in families.lineage(name)[:-1]:
        heading = Text(member, style="bold").append("" if member == name else f"   which {name} is like", style="dim")
        lines.append(heading.append(f"   {families.where(member).short}", style="not bold blue"))
        # the heading has the name; lines of YAML stay as they are
        texts = [line for line in families.text(member).splitlines() if not line.startswith("model_type:")]
        lines += [*(Text(f"  {line}") for line in texts), Text()]
    lines.append(Text("a config without any other field", style="bold"))
    texts = [f"{item['layers']}   {item['label']}" for item in values["groups"]]
    texts = texts or ["cannot be read: the class has no default for something that every file says"]
    lines += [Text(part) for text in texts for part in wrapped(text, width, "    ", first="  ")]
    emit(lines, console)
