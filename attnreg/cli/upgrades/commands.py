"""The commands that show the effect of an upgrade: `diff`, `upgrade` and `lock`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from attnreg.cli.command import argument, command, option
from attnreg.cli.inputs import PlatformInputs, RegistryInputs, RequestInputs, Value
from attnreg.cli.names import compared_releases, named_releases, names_of_models
from attnreg.cli.options import json_option, models_options, outside_option, platform_options, registry_options
from attnreg.cli.output import print_json, status, terminal, working
from attnreg.cli.refusals import BadInput, refuse_unread
from attnreg.cli.upgrades.narrowing import narrowed, shown_facet, wanted_of
from attnreg.engines.releases import itself_note, patch_notes

if TYPE_CHECKING:
    from attnreg.analysis.moves import AskedGroup, Moves
    from attnreg.platforms import Platform
    from attnreg.registry import Registry

_MOST_BOXES = 8


@command(short_help="Record which backends models get on some platforms.")
@platform_options
@models_options
@option("--output", "-o", default="-", metavar="FILE", help="The file to write; by default standard output.")
@registry_options
def lock(
    registry_inputs: RegistryInputs, platform_inputs: PlatformInputs, request_inputs: RequestInputs, output: str
) -> None:
    """Record each layer's backend for some models on some platforms, with its packages and its emulated features.

    Exit status: 1 if a layer has no backend, 3 if that of a layer is not known.

    \b
    attnreg lock --arch gfx942 --model llama/ --model gpt-oss/ -o attnreg.lock
    attnreg check --lock attnreg.lock
    """
    from pathlib import Path

    from attnreg.analysis.lock import nothing_to_lock, open_entries, write_lock
    from attnreg.files import write_text
    from attnreg.selection.wording import unsaid

    registry = registry_inputs.load()
    refuse_unread(request_inputs.extra_facets, registry)
    if unsaid(registry):
        click.echo(f"attnreg: {unsaid(registry)}", err=True)
    platforms = platform_inputs.platforms(registry)
    models = request_inputs.models
    if not models and "head_size" not in request_inputs.facets:
        raise BadInput("lock needs --model", "give it once for each model; or give --head-size for one request")
    locked = request_inputs.questions(registry, models)
    if why := nothing_to_lock(locked):
        raise BadInput(f"nothing to lock of the layers of {names_of_models(models)}: {why}", "name another model")
    warnings: dict[str, None] = {}
    data = write_lock(
        registry,
        locked,
        platforms,
        overlays=registry_inputs.overlay,
        detected=not platform_inputs.named and not platform_inputs.packages,
        warnings=warnings,
    )
    for warning in warnings:
        click.echo(f"attnreg: {warning}", err=True)
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    if output == "-":
        click.echo(text, nl=False)
    else:
        write_text(Path(output), text)
    raise click.exceptions.Exit(status(*open_entries(data, locked)))


@command(short_help="Compare two registries: which layers move, and why.")
@argument("before", completes="registries")
@argument("after", completes="registries")
@argument("more", completes="registries", nargs=-1)
@platform_options
@models_options
@option(
    "--facet",
    "only",
    multiple=True,
    metavar="FACET=VALUE",
    help="Only layers that ask for this value; repeatable.",
    section="Request",
)
@option("--boxes", is_flag=True, help="List all configurations that change, as boxes of values.")
@option("--limit", type=click.IntRange(min=1), metavar="N", help="The most boxes for each pair of backends.")
@option("--any-packages", is_flag=True, help="Also compare configurations whose packages are not installed.")
@outside_option
@json_option
def diff(
    before: str,
    after: str,
    more: tuple[str, ...],
    platform_inputs: PlatformInputs,
    request_inputs: RequestInputs,
    only: tuple[str, ...],
    boxes: bool,
    limit: int | None,
    any_packages: bool,
    allow_outside: bool,
    as_json: bool,
) -> None:
    """Compare two registries: the layers that get another backend, the hardware on which they do, and why.

    BEFORE and AFTER are bundled names, directories, overlay files, or (in a git checkout) REV:DIRECTORY. An overlay
    that extends no registry is compared on BEFORE. Without a model, the well-known ones that come with attnreg are
    compared, and all other configurations. With MORE registries the models are compared alone, in one table. `attnreg
    upgrade` compares releases of an engine, layer by layer.

    Exit status: 0 if nothing changes, 1 if something does, 3 if nothing is known to and a part is not known.

    \b
    attnreg diff vllm-0.20.0 vllm-0.33.0 --arch sm90 --kv-dtype fp8 --model llama/
    attnreg diff main: default
    """
    from attnreg.analysis.diagram import EntangledError
    from attnreg.analysis.diff import EmptyQuestionError
    from attnreg.analysis.diff import diff as diff_registries
    from attnreg.analysis.model_changes import ModelChanges, model_changes
    from attnreg.analysis.moves import compare
    from attnreg.analysis.outcome import stated_otherwise
    from attnreg.analysis.revisions import family_texts, load_both
    from attnreg.explain.changes import print_changes, print_model_changes
    from attnreg.selection.wording import setting_words

    notes, wanted = patch_notes(before, after, *more), wanted_of(only)
    before, after, *further = named_releases(before, after, *more)
    notes += itself_note(before, after, *further)
    if further:
        if boxes or limit or any_packages:
            raise BadInput("--boxes, --limit and --any-packages compare two registries", "leave out the option")
        asked_for = platform_inputs, request_inputs, wanted, notes
        return _outcomes((before, after, *further), *asked_for, allow_outside=allow_outside, as_json=as_json)
    named = bool(request_inputs.models or "head_size" in request_inputs.facets)
    everywhere = boxes or not named
    for name, value in (("--limit", limit), ("--any-packages", any_packages)):
        if value and not (boxes if name == "--limit" else everywhere):
            raise BadInput(f"{name} is about all configurations, and --model asks for some", "give --boxes too")
    old, new = _of_selectors(load_both(before, after, allow_outside=allow_outside), request_inputs, notes)
    was, now = family_texts(before), family_texts(after)
    families = model_changes(was, now) if was and now else ModelChanges()
    platforms = _heard(platform_inputs, old, new, notes)
    rules = (was, now) if families.lines() else (None, None)
    left_out: dict[str, None] = {}
    asked = narrowed(_asked(request_inputs, (old, new), rules, left_out), wanted, (old, new))
    moves = working("comparing the models", shown=not as_json)(compare)(asked, platforms, old, new)
    notes += [f"left out: {error}" for error in left_out]
    if everywhere and (others := stated_otherwise(old, new)):
        what = "known failures, kernels, workspaces or block sizes differ; only those of the models were compared"
        notes.append(f"{', '.join(others)}: {what}")
    moves = replace(moves, notes=(*notes, *moves.notes))
    difference, nothing = None, ""
    if everywhere:
        try:
            difference = working("comparing all configurations", shown=not as_json)(diff_registries)(
                old,
                new,
                within=_within(platform_inputs, platforms, request_inputs, wanted),
                requests={r for item in asked for r in item.requests if named and r},
                packages=platforms[0].packages,
                any_packages=any_packages,
                limit=(limit or _MOST_BOXES) if boxes else 0,
            )
        except (EmptyQuestionError, EntangledError) as e:
            if boxes:
                raise
            nothing = str(e) if isinstance(e, EmptyQuestionError) else f"only models are compared: {e.message}"
    if as_json:
        data = {"before": old.title, "after": new.title, "known_models": not named, **moves.to_dict()}
        data |= {"families": families.to_dict()} if was and now else {}
        data["notes"] += [nothing] if nothing else []
        print_json(data | ({"all_configurations": difference.to_dict()} if difference else {}))
    else:
        words = [f"only layers with {name} {' or '.join(map(shown_facet, values))}" for name, values in wanted.items()]
        words += ["packages installed or missing"] if any_packages else []
        settings = setting_words(platforms[0].flags, platforms[0].packages)
        title = " · ".join([f"{old.title} → {new.title}", *request_inputs.words(), *words, *settings])
        print_changes(title, moves, difference or nothing or None, terminal(), known=not named, boxes=boxes)
        print_model_changes(families, terminal())
    changes = moves.moves or families.lines() or (difference is not None and difference.changes)
    raise click.exceptions.Exit(status(bool(changes), bool(moves.unknown)))


def _outcomes(
    sources: Sequence[str],
    platform_inputs: PlatformInputs,
    request_inputs: RequestInputs,
    wanted: Mapping[str, Sequence[Value]],
    notes: list[str],
    *,
    allow_outside: bool,
    as_json: bool,
) -> None:
    """Print what each of several registries chooses for the layers of models."""
    from attnreg.analysis.history import outcome_rows
    from attnreg.analysis.revisions import load_revision
    from attnreg.explain.changes import print_outcomes

    loaded = [load_revision(source, allow_outside=allow_outside) for source in sources]
    titles, left_out = [registry.title for registry in loaded], dict[str, None]()
    registries = _of_selectors(loaded, request_inputs, notes)
    ends = registries[0], registries[-1]
    platforms = _heard(platform_inputs, *ends, notes)
    asked = narrowed(_asked(request_inputs, ends, (None, None), left_out), wanted, ends)
    rows = outcome_rows(asked, platforms, registries, notes)
    notes += [f"left out: {error}" for error in left_out]
    if as_json:
        print_json({"registries": titles, "rows": [row.to_dict() for row in rows], "notes": notes})
    else:
        title = " · ".join([" → ".join(titles), *request_inputs.words()])
        print_outcomes(title, [registry.name for registry in loaded], rows, terminal())
        click.echo("".join(f"note: {note}\n" for note in notes), nl=False)
    changes, unknown = any(row.changes for row in rows), any("not known" in row.titles for row in rows)
    raise click.exceptions.Exit(status(changes, unknown))


@command(short_help="Say what an upgrade of an engine changes, layer by layer.")
@option("--from", "before", required=True, metavar="RELEASE", help="The release that runs now, such as vllm-0.31.")
@option("--to", "after", metavar="RELEASE", help="The release to upgrade to; by default the newest of the engine.")
@platform_options
@models_options
@outside_option
@json_option
def upgrade(
    before: str,
    after: str | None,
    platform_inputs: PlatformInputs,
    request_inputs: RequestInputs,
    allow_outside: bool,
    as_json: bool,
) -> None:
    """Say what changes for some models between two releases of an engine: which layers, and why on both sides.

    Without a model, the well-known ones that come with attnreg are compared. `attnreg diff` counts the same models.

    Exit status: 0 if nothing changes, 1 if something does, 3 if nothing is known to and a part is not known.

    \b
    attnreg upgrade --from vllm-0.31 --to vllm-0.33 --model llama/ --arch sm90
    """
    changed = upgraded(before, after, platform_inputs, request_inputs, allow_outside=allow_outside)
    if as_json:
        print_json(changed.to_dict())
    else:
        changed.print()
    raise click.exceptions.Exit(status(bool(changed.moves.moves), bool(changed.moves.unknown)))


@dataclass(frozen=True, kw_only=True)
class Upgraded:
    """What an upgrade changes. titles: of both releases. words: what was asked. known: whether models are bundled."""

    titles: Sequence[str]
    words: Sequence[str]
    moves: Moves
    known: bool

    def to_dict(self) -> dict[str, Any]:
        """The upgrade as JSON: both releases, and each move with the reasons of both sides."""
        data = self.moves.to_dict()
        for item, move in zip(data["moves"], self.moves.moves, strict=True):
            item["how"] = dict(zip(("before", "after"), move.how, strict=True))
        return {"before": self.titles[0], "after": self.titles[1], **data}

    def print(self) -> None:
        """Print the upgrade."""
        from attnreg.explain.changes import print_upgrade

        print_upgrade(" · ".join([" → ".join(self.titles), *self.words]), self.moves, terminal(), known=self.known)


def upgraded(
    before: str,
    after: str | None,
    platform_inputs: PlatformInputs,
    request_inputs: RequestInputs,
    *,
    allow_outside: bool = False,
) -> Upgraded:
    """What an upgrade changes between two releases that `compared_releases` finds by these names.

    Raises `BadInput` for names of no release of an engine, and of releases of two engines.
    """
    from attnreg.analysis.history import with_turns
    from attnreg.analysis.moves import compare
    from attnreg.analysis.revisions import load_revision
    from attnreg.compile.inputs.bundled import bundled_registries, help_for_registry
    from attnreg.selection.wording import setting_words

    names = compared_releases(before, after)
    old, new = (load_revision(source, allow_outside=allow_outside) for source in names)
    for given, registry in zip(names, (old, new), strict=True):
        if registry.base == "default":
            known = [name for name in bundled_registries() if name != "default"]
            help_ = f"{help_for_registry(given, known)}; `attnreg diff {' '.join(names)}` compares any two"
            raise BadInput(f"{given} is no release of an engine", help_)
    # the engine of a registry that is given by path is unknown
    engines = {registry.base.rpartition("-")[0] for registry in (old, new) if registry.base in bundled_registries()}
    if len(engines - {""}) == 2:
        message = f"{old.name} and {new.name} are releases of two engines, and no upgrade leads from one to the other"
        raise BadInput(message, f"`attnreg diff {old.name} {new.name}` compares them")
    titles, notes = [old.title, new.title], [*patch_notes(before, after), *itself_note(*names)]
    old, new = _of_selectors((old, new), request_inputs, notes)
    platforms = _heard(platform_inputs, old, new, notes)
    left_out: dict[str, None] = {}
    asked = _asked(request_inputs, (old, new), (None, None), left_out)
    moves = with_turns(compare(asked, platforms, old, new), old, new)
    moves = replace(moves, notes=(*notes, *(f"left out: {error}" for error in left_out), *moves.notes))
    words = [*request_inputs.words(), *setting_words(platforms[0].flags, platforms[0].packages)]
    return Upgraded(titles=titles, words=words, moves=moves, known=not request_inputs.models)


def _heard(inputs: PlatformInputs, old: Registry, new: Registry, notes: list[str]) -> list[Platform]:
    """The platforms about which both registries have data; each other one is a note. Raises `BadInput` without any."""
    platforms = inputs.of_both(old, new)
    # a registry without orders decides by its steps
    pairs = [(p, each.silence(p.platform, p.arch)) for each in (old, new) if each.orders for p in platforms]
    silent, texts = {p for p, text in pairs if text}, dict.fromkeys(text for _, text in pairs if text)
    if len(silent) == len(platforms):
        raise BadInput("; ".join(texts), "name an architecture of another platform")
    notes += [f"{text}: left out" for text in texts]
    return [platform for platform in platforms if platform not in silent]


def _of_selectors(registries: Sequence[Registry], inputs: RequestInputs, notes: list[str]) -> list[Registry]:
    """Registries to compare: only their selectors, if one lacks its engine's start. Refuses a facet that none reads."""
    from attnreg.selection.wording import unsaid

    refuse_unread(inputs.extra_facets, *registries)
    lacking = [unsaid(registry) for registry in registries if unsaid(registry)]
    notes += lacking
    if not lacking or not any(registry.steps for registry in registries):
        return list(registries)
    notes.append(f"the selectors of {'both' if len(registries) == 2 else 'all'} are compared")
    return [registry.selector for registry in registries]


def _asked(
    inputs: RequestInputs,
    registries: Sequence[Registry],
    texts: Sequence[Mapping[str, str] | None],
    left_out: dict[str, None],
) -> list[AskedGroup]:
    """The requests of the models' layers for both registries; each registry has its own rules of model families.

    left_out: a dict that gets the error of each well-known model for which these options are wrong.
    """
    from attnreg.analysis.moves import paired
    from attnreg.compile.inputs.bundled import bundled_configs
    from attnreg.models.families import Families

    for name, value in (("--draft", inputs.draft), ("--layer", inputs.layer)):
        if value is not None and not inputs.models:
            raise BadInput(f"{name} says something of a model", "give --model too")
    models = inputs.models or (() if "head_size" in inputs.facets else tuple(map(str, bundled_configs().values())))
    families = [
        Families.of(files, side) if files else None for files, side in zip(texts, ("before", "after"), strict=True)
    ]
    errors = None if inputs.models else left_out
    before, after = (
        inputs.questions(registry, models, rules, errors) for registry, rules in zip(registries, families, strict=True)
    )
    asked = [item for name in before | after for item in paired(name, before.get(name, ()), after.get(name, ()))]
    if left_out and not before | after:
        raise BadInput(f"none of the {len(models)} models can be asked so", f"the first: {next(iter(left_out))}")
    if not asked:
        raise BadInput(
            f"no layer of {names_of_models(models)} has softmax attention", "there is nothing to select a backend for"
        )
    return asked


def _within(
    platform_inputs: PlatformInputs,
    platforms: Sequence[Platform],
    request_inputs: RequestInputs,
    wanted: Mapping[str, Sequence[Value]],
) -> dict[str, Any]:
    """The part of all configurations that the options select, as facet -> values."""
    within: dict[str, Any] = dict(wanted)
    if platform_inputs.named:
        within["arch"] = [platform.arch for platform in platforms]
    if platform_inputs.device:
        within["device"] = [platform.device for platform in platforms]
    if platform_inputs.flags:
        within["flags"] = list(platform_inputs.flags)
    within |= {name: [value] for name, value in (request_inputs.request_facets | request_inputs.extra_facets).items()}
    if request_inputs.features:
        within["features"] = list(dict.fromkeys([*request_inputs.features, *within.get("features", ())]))
    return within
