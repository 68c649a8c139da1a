"""Outcome: a registry's decision for one layer on one platform, with everything that a deployment depends on.

`attnreg diff` compares the outcomes of two registries, `attnreg check --lock` those in a file with a registry's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.errors import RequestError
from attnreg.language.engine.architectures import REMOTE
from attnreg.models.fields import facets_of
from attnreg.selection.consequences import consequence_words
from attnreg.selection.judge import unchecked_words
from attnreg.selection.selector import evaluate

if TYPE_CHECKING:
    from attnreg.errors import Location
    from attnreg.language.matchers import Requirement
    from attnreg.platforms import Platform
    from attnreg.registry import Registry, Variant
    from attnreg.request import AttentionRequest
    from attnreg.selection.trace import Selection

# facets whose claims decide how an engine lays out the KV cache for a backend
KV_CACHE = ("block_size", "cache_layout")
# the fields of an outcome that are lists in JSON
SETS = ("fails", "emulates", "unchecked", "needs")
# kind of a consequence -> its name in an outcome
FOLLOWS = {
    "drops": "dropped part",
    "runs": "kernel",
    "unknown": "not known",
    "workspace": "workspace",
    "kernel_block": "block of the kernel",
    "stores": "stored KV dtype",
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The chosen backend and its consequences; all fields are empty if no backend is chosen.

    - ``fails``: the reasons why the engine is known to stop with it.
    - ``emulates``: the features that it serves slowly.
    - ``unchecked``: the words that it accepts unchecked.
    - ``kv_cache``: its claims on the block size and the layout of the KV cache.
    - ``needs``: the packages that it requires. ``packages``: their known versions.
    - ``follows``: the dropped part, the kernel that runs, its workspace, its block and the stored KV dtype, if the data
      has them. None: not recorded.
    - ``problem``: why the registry has no answer. It lacks a word of the request, or has no data.
    """

    backend: str | None = None
    variant: str | None = None
    fails: tuple[str, ...] = ()
    emulates: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    kv_cache: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    follows: Mapping[str, str] | None = field(default_factory=dict)
    problem: str = ""

    @property
    def title(self) -> str:
        """``FLASH_ATTN/FA3``; ``none`` if no backend accepts, ``not known`` if the registry has no answer."""
        if self.backend is None:
            return "not known" if self.problem else "none"
        return f"{self.backend}/{self.variant}" if self.variant else self.backend

    def to_dict(self) -> dict[str, Any]:
        """The outcome as JSON-ready values."""
        return asdict(self) | {name: list(getattr(self, name)) for name in SETS}


class Decided(NamedTuple):
    """An outcome with its selection; None if the registry does not know a word of the request.

    ``ignored`` are flags and extra facets that the registry does not have; its data cannot depend on them.
    """

    outcome: Outcome
    selection: Selection | None
    ignored: tuple[str, ...] = ()


def decide(request: AttentionRequest, platform: Platform, registry: Registry) -> Decided:
    """A registry's decision for a request on a platform."""
    facets = registry.vocabulary.facets
    request = _served_by(request, registry)
    known_flags = facets["flags"].known if "flags" in facets else frozenset()
    flags, extra = sorted(platform.flags - known_flags), [pair for pair in request.extra if pair[0] not in facets]
    if flags:
        platform = replace(platform, flags=platform.flags & known_flags)
    if extra:
        request = replace(request, extra=tuple(pair for pair in request.extra if pair[0] in facets))
    ignored = (*(f"flag {flag}" for flag in flags), *(f"facet {name}" for name, _ in extra))
    try:
        selection = evaluate(request, platform, registry)
    except RequestError as e:
        # without the help, whose list of known words would hide the message
        return Decided(Outcome(problem=e.message), None, ignored)
    return Decided(_outcome(selection), selection, ignored)


def completed(request: AttentionRequest, registry: Registry) -> AttentionRequest:
    """The request with the facets that a registry reads of a model's type, if the request lacks them.

    The release that a request was made for may not have these facets.
    """
    extra = dict(request.extra)
    lacking = [f for name, f in registry.vocabulary.facets.items() if f.config == ("model_type",) and name not in extra]
    if request.model is None or not lacking:
        return request
    found = facets_of({"model_type": request.model}, lacking, (), {})
    return replace(request, extra=(*request.extra, *found.items())) if found else request


def config_facets(registry: Registry) -> set[str]:
    """The facets that a registry reads from a config, except those that the type of the model decides."""
    facets = registry.vocabulary.facets.items()
    return {name for name, facet in facets if facet.config and facet.config != ("model_type",)}


def _served_by(request: AttentionRequest, registry: Registry) -> AttentionRequest:
    """The request with what a registry's table says of its architecture, in place of what another release's says."""
    extra, table = dict(request.extra), registry.architectures
    name = extra.get("architecture")
    if table is None or not name or request.role == "draft":
        return request
    served = table.of([str(name)], remote=extra.pop("served", None) == REMOTE)
    if served is not None and served.how in registry.vocabulary.facets["served"].known:
        extra["served"] = served.how
    return replace(request, extra=tuple(extra.items()))


def _outcome(selection: Selection) -> Outcome:
    chosen = selection.chosen
    if chosen is None:
        return Outcome(problem=(selection.silence or " ".join(selection.started)) if selection.unknown else "")
    variant = variant_of(selection.registry, chosen.name, chosen.variant)
    assert variant is not None
    requirements = sorted(set(_requirements(variant)), key=str)
    installed, names = dict(selection.platform.packages or ()), {r.package for r in requirements}
    return Outcome(
        backend=chosen.name,
        variant=chosen.variant,
        fails=tuple(follows.text for follows in selection.consequences if follows.kind == "fails"),
        emulates=chosen.emulates,
        unchecked=tuple(sorted(unchecked_words(variant, selection.request.facts()))),
        kv_cache={claim.facet: claim.matcher.text for claim in variant.claims if claim.facet in KV_CACHE},
        # `triton>=3.7` makes `triton` redundant
        needs=tuple(str(r) for r in requirements if r.versions or not _has_version(r.package, requirements)),
        packages={name: installed[name] for name in sorted(names) if installed.get(name)},
        follows=_follows(selection),
    )


def _follows(selection: Selection) -> dict[str, str]:
    out: dict[str, str] = {}
    for follows in selection.consequences:
        if name := FOLLOWS.get(follows.kind):
            out[name] = f"{out[name]} and {follows.fact}" if name in out else follows.fact
    return out


def variant_of(registry: Registry, backend: str, variant: str | None) -> Variant | None:
    """The variant of a backend with this name, else None."""
    row = registry.backends.get(backend)
    return next((v for v in row.variants if v.name == variant), None) if row else None


def same_kernel(old: Decided, new: Decided) -> Location | None:
    """The line of data that says that a variant has another name and is the same kernel; None if no line does.

    The line is the ``was`` of a variant. Nothing else may change: no consequence, and no value of a facet that both
    variants are for, such as the version of FlashAttention.
    """
    was, now = old.outcome, new.outcome
    same = was.backend is not None and was.backend == now.backend and was.variant != now.variant
    if not same or old.selection is None or new.selection is None or changes(was, now):
        return None
    before, after = old.selection.variant, new.selection.variant
    assert before is not None
    assert after is not None
    points = old.selection.point(), new.selection.point()
    if any(points[0][facet] != points[1][facet] for facet in {*before.when.facets} & {*after.when.facets}):
        return None
    return after.where if before.name in after.was else before.where if after.name in before.was else None


def _requirements(variant: Variant) -> Iterator[Requirement]:
    for condition in (variant.requires, variant.when):
        for clause in condition.clauses:
            if clause.facet == "packages" and clause.matcher.form == "all":
                yield from clause.matcher.mentions


def _has_version(package: str, requirements: list[Requirement]) -> bool:
    return any(r.package == package and r.versions for r in requirements)


def changes(before: Outcome, after: Outcome) -> tuple[str, ...]:
    """The changes in words, except those of the backend's and the variant's name.

    If one side has no backend, only a new choice with a known failure is a change. A word that a backend now checks is
    not a change, because no answer gets worse by it. Packages and consequences count only if both sides have the same
    backend.
    """
    failing = after.fails and not before.fails
    out = [f"is chosen, and then fails: {'; '.join(after.fails)}"] if failing else []
    if before.backend is None or after.backend is None:
        return tuple(out)
    if before.fails and not after.fails:
        out.append("is no longer known to fail")
    elif after.fails and not failing and after.fails != before.fails:
        out.append(f"fails otherwise than before: {'; '.join(after.fails)}")
    if slower := [w for w in after.emulates if w not in before.emulates]:
        out.append(f"emulates {', '.join(slower)} (slow)")
    if faster := [w for w in before.emulates if w not in after.emulates]:
        out.append(f"no longer emulates {', '.join(faster)}")
    if unseen := [w for w in after.unchecked if w not in before.unchecked]:
        out.append(f"accepts {', '.join(unseen)} unchecked")
    for facet in KV_CACHE:
        was, now = before.kv_cache.get(facet, "any"), after.kv_cache.get(facet, "any")
        out += [f"{facet} {was} → {now}"] if was != now else []
    if before.backend == after.backend:
        out += _package_changes(before, after)
        if before.follows is not None and after.follows is not None:
            for name in FOLLOWS.values():
                was, now = before.follows.get(name, "not stated"), after.follows.get(name, "not stated")
                out += [f"{name}: {was} → {now}"] if was != now else []
    return tuple(out)


def unknown_notes(unknown: Mapping[tuple[str, str], Iterable[str]]) -> list[str]:
    """What is not known, each sentence once for the same models: with all registries that it is about.

    unknown: (registry, sentence) -> the names of models.
    """
    about: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for (name, text), models in unknown.items():
        about.setdefault((tuple(models), text), []).append(name)
    return [
        f"not known of {', '.join(of)} in {', '.join(names[:-1])}{' and ' if names[1:] else ''}{names[-1]}: {text}"
        for (of, text), names in about.items()
    ]


def stated_otherwise(before: Registry, after: Registry) -> tuple[str, ...]:
    """The backends whose failures, kernels, workspaces or kernels' blocks differ between two registries."""

    def stated(registry: Registry, name: str) -> list[tuple[str | None, list[tuple[str, str]]]]:
        variants = registry.backends[name].variants
        # what is about a whole run changes no layer
        kept = [(v.name, [c for c in v.consequences if c.layouts is None and c.graphs is None]) for v in variants]
        return [(name, [(c.when.describe(), consequence_words(c)) for c in stated]) for name, stated in kept]

    both = before.backends.keys() & after.backends.keys()
    return tuple(sorted(name for name in both if stated(before, name) != stated(after, name)))


def _package_changes(before: Outcome, after: Outcome) -> Iterator[str]:
    if before.needs != after.needs:
        yield f"needs {', '.join(before.needs) or 'no package'} → {', '.join(after.needs) or 'no package'}"
    for name, was in before.packages.items():
        now = after.packages.get(name)
        if now is not None and now != was:
            yield f"package {name} {was} → {now}"
