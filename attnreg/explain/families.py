"""Model families as text for a terminal and as JSON-ready values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnreg.explain.layout import Column, emit, table, wrapped

if TYPE_CHECKING:
    from rich.console import Console

    from attnreg.models.families import Families


def family_dict(families: Families, name: str) -> dict[str, Any]:
    """A model family as JSON-ready values. ``groups`` are the layers of a config with no field except model_type."""
    from attnreg.models.groups import group_layers
    from attnreg.models.reader import ConfigError, requests_from_model

    try:
        groups = requests_from_model({"model_type": name}, families=families).groups
    except ConfigError:
        # the model's class has no default for a required field
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
    """Print model families, each with the default layers of its class."""
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
    """Print a family's file, the files of its bases, and the default layers of its class."""
    from rich.text import Text

    width = console.width
    values, lines = family_dict(families, name), []
    # without the last file, the general rules, which every family has
    for member in families.lineage(name)[:-1]:
        heading = Text(member, style="bold").append("" if member == name else f"   which {name} is like", style="dim")
        lines.append(heading.append(f"   {families.where(member).short}", style="not bold blue"))
        # the heading has the model_type already; lines of YAML are not wrapped
        texts = [line for line in families.text(member).splitlines() if not line.startswith("model_type:")]
        lines += [*(Text(f"  {line}") for line in texts), Text()]
    lines.append(Text("a config without any other field", style="bold"))
    texts = [f"{item['layers']}   {item['label']}" for item in values["groups"]]
    texts = texts or ["cannot be read: the class has no default for something that every file says"]
    lines += [Text(part) for text in texts for part in wrapped(text, width, "    ", first="  ")]
    emit(lines, console)
