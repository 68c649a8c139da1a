"""The commands `list` and `models`."""

from __future__ import annotations

from attnreg.cli.command import argument, command, option
from attnreg.cli.inputs import PlatformInputs, RegistryInputs
from attnreg.cli.options import json_option, platform_options, registry_options
from attnreg.cli.output import print_json, print_lines, terminal
from attnreg.cli.refusals import BadInput


@command(name="list", short_help="List backends, and the orders of a platform.")
@option("--archs", is_flag=True, help="List the architectures with their products instead.")
@option("--engines", is_flag=True, help="List the releases of engines that have a table instead.")
@platform_options
@registry_options
@json_option
def list_(
    registry_inputs: RegistryInputs, platform_inputs: PlatformInputs, archs: bool, engines: bool, as_json: bool
) -> None:
    """List the backends: for a platform or an architecture, in the orders that apply there."""
    from attnreg.explain.tables import backend_dict, backends_on, print_backends

    if archs and engines:
        raise BadInput("--archs and --engines are two lists", "give one of them")
    if engines:
        from attnreg.compile.inputs.bundled import bundled_registries, patch_releases

        releases = [name for name in bundled_registries() if name != "default"]
        alike = {name: patch["as"] for name, patch in patch_releases().items()}
        lines = [*releases, *(f"{name}  as {table}" for name, table in alike.items())]
        print_json({"releases": releases, "alike": alike}) if as_json else print_lines("\n".join(sorted(lines)))
        return
    registry = registry_inputs.load()
    platforms = platform_inputs.platforms(registry) if platform_inputs.named else []
    if archs:
        named = {platform.arch for platform in platforms}
        known = [a for a in registry.vocabulary.architectures.values() if not named or a.name in named]
        found = [{"arch": a.name, "platform": a.platform, "family": a.family, "products": [*a.products]} for a in known]
        width = max(len(a.name) for a in known)
        lines = [f"{a.name:<{width}}  {a.platform:<4}  {', '.join((a.family, *a.products))}" for a in known]
        print_json({"architectures": found}) if as_json else print_lines("\n".join(lines))
        return
    if as_json:
        print_json({"backends": [backend_dict(registry, row) for row in backends_on(registry, platforms)]})
    else:
        print_backends(registry, platforms, terminal())


@command(short_help="List the model families whose configs can be read.")
@argument("words", nargs=-1, metavar="[WORD]...", completes="families")
@json_option
def models(words: tuple[str, ...], as_json: bool) -> None:
    """List all model families, or those whose model_type contains one of the WORDs."""
    from attnreg.explain.families import family_dict, print_families
    from attnreg.models.reader import bundled_families

    families = bundled_families()
    if not all(words):
        raise BadInput("an empty WORD is in every name", "without a WORD all families are listed")
    names = [name for name in families if not words or any(word.casefold() in name for word in words)]
    if not names:
        raise BadInput(f"no model family has {' or '.join(map(repr, words))} in its name")
    if as_json:
        print_json({"families": [family_dict(families, name) for name in names]})
    else:
        print_families(families, names, terminal())
