"""The command `show`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attnreg.cli.command import argument, command
from attnreg.cli.inputs import RegistryInputs
from attnreg.cli.options import json_option, registry_options
from attnreg.cli.output import print_json, terminal
from attnreg.cli.refusals import BadInput
from attnreg.cli.screen.links import cite
from attnreg.errors import shown

if TYPE_CHECKING:
    from attnreg.registry import Registry


@command(short_help="Show one backend, order, feature, architecture, step or model family.")
@argument("name", metavar="NAME", completes="shown")
@registry_options
@json_option
def show(registry_inputs: RegistryInputs, name: str, as_json: bool) -> None:
    """Show the whole entry of one NAME, each fact with its line of data.

    NAME is a backend or a variant (FLASH_ATTN/FA3), a model family (llama) or an order (cuda/mha). It may also be a
    feature (sinks), an architecture or a product (sm90, L40S), or a step of an engine's start.

    \b
    attnreg show cuda/hopper-sinks
    attnreg show sinks --engine vllm-0.33
    """
    from attnreg.explain.entries import entries_named, print_entries
    from attnreg.explain.families import family_dict, print_family
    from attnreg.explain.tables import backend_dict, print_backend
    from attnreg.models.reader import bundled_families

    families = bundled_families()
    if name in families:
        if registry_inputs != RegistryInputs():
            raise BadInput(f"{name} is a model family, which is read alike with every registry", "give its name alone")
        if as_json:
            print_json(family_dict(families, name))
        else:
            cite(families.where(member).file for member in families.lineage(name)[:-1])
            print_family(families, name, terminal())
        return
    registry = registry_inputs.load()
    row = registry.row(name)
    if row is not None:
        if as_json:
            print_json(backend_dict(registry, row))
        else:
            print_backend(registry, row, terminal())
        return
    entries = entries_named(registry, name)
    if not entries:
        raise _unknown(registry, name, families)
    if as_json:
        print_json({"entries": [entry.to_dict() for entry in entries]})
    else:
        print_entries(registry, entries, terminal())


def _unknown(registry: Registry, name: str, families: Iterable[str]) -> BadInput:
    """The error for a name that nothing has: it names the release of an engine that has it, or similar names."""
    from attnreg.errors import nearest
    from attnreg.explain.entries import entry_names

    backend, _, variant = name.partition("/")
    if variant and backend in registry.backends:
        variants = registry.backends[backend].variant_names
        help_ = f"`attnreg show {backend}` prints {'all: ' + ', '.join(variants) if variants else 'it'}"
        return BadInput(f"{backend} has no variant {variant!r}", help_)
    message = f"{registry.name} has no entry {shown(name)}"
    if (other := _elsewhere(name)) is not None:
        return BadInput(message, f"`attnreg show {name} --registry {other}` shows that release's")
    near = nearest(name, [*registry.backends, *families, *(known for known, _ in entry_names(registry))])
    lists = "`attnreg list` lists backends and orders, `attnreg models` model families"
    return BadInput(message, (f"did you mean `{near}`?" if near else lists) + registry.missed)


def _elsewhere(name: str) -> str | None:
    """The newest release of an engine that has an entry of this name; None if no engine's newest release has it."""
    from attnreg.compile.inputs.bundled import release_name
    from attnreg.explain.entries import entries_named
    from attnreg.loader import load_registry

    for engine in ("vllm-0", "sglang-0"):
        registry = load_registry(release_name(engine))
        if registry.row(name) is not None or entries_named(registry, name):
            return registry.name
    return None
