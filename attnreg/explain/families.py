"""Model families as text for a terminal and as JSON-ready values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, title=f"{len(names)} model families", title_justify="left", pad_edge=False)
    table.add_column("model_type", no_wrap=True)
    table.add_column("like", no_wrap=True, style="dim")
    table.add_column("layers of its class by default", ratio=1)
    for item in (family_dict(families, name) for name in names):
        lines = [f"{g['layers']}  {g['label']}" for g in item["groups"]]
        table.add_row(item["model_type"], item["like"] or "", "\n".join(lines))
    console.print(table)


def print_family(families: Families, name: str, console: Console) -> None:
    """Print a family's file, the files of the families that it is like, and its class's default layers."""
    from rich.text import Text

    values = family_dict(families, name)
    # the last, the general rules, holds for every family
    for member in families.lineage(name)[:-1]:
        heading = Text(member, style="bold").append("" if member == name else f"   which {name} is like", style="dim")
        console.print(heading.append(f"   {families.where(member).short}", style="blue"))
        for line in families.text(member).splitlines():
            # the heading has the name
            if not line.startswith("model_type:"):
                console.print(Text(f"  {line}" if line else ""), soft_wrap=True)
        console.print()
    console.print(Text("a config without any other field", style="bold"))
    for item in values["groups"]:
        console.print(Text(f"  {item['layers']}   {item['label']}"))
    if not values["groups"]:
        console.print(Text("  cannot be read: the class has no default for something that every file says"))
