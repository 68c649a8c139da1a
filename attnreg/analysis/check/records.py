"""Findings about records of evidence beside a registry: edited, incomplete, malformed, or of an earlier kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from attnreg.analysis.check.finding import Finding
from attnreg.analysis.space import Space
from attnreg.analysis.symbolic.model import Model
from attnreg.compile.inputs.bundled import bundled_registries
from attnreg.errors import Location, RequestError
from attnreg.files import ALLOW, outside
from attnreg.packages.records import Record, evidence_files, read_records
from attnreg.platforms import Platform

if TYPE_CHECKING:
    from attnreg.registry import Registry

# what a row claims of them must have been run; sizes are claimed by ranges
_WORDS = ("attn_type", "dtype", "features", "kv_dtype")
_AGAIN = "run `attnreg verify --record` again where it was recorded, or remove the record"


def record_findings(registry: Registry, allow_outside: bool = False) -> Iterator[Finding]:
    """The findings about records. A record of an earlier kernel is a note: kernels change between runs on a device.

    allow_outside: records may be links that lead out of the registry's directory.
    """
    rows = next(PurePath(file) for file in registry.files if PurePath(file).name == "backends.yaml")
    brought = bundled_registries().get(registry.base)
    directory = brought or Path(registry.base)
    model: Model | None = None
    # the file of each record
    known: dict[tuple[object, ...], str] = {}
    for path in evidence_files(directory):
        label = str(rows.parent / "evidence" / path.name)
        if not (allow_outside or brought) and (why := outside(os.path.join("evidence", path.name), directory)):
            yield Finding(
                "broken-record", (path.name,), Location(label, 1, 1), f"the record {why}", f"copy it; or {ALLOW}"
            )
            continue
        found = read_records(path, label)
        yield from (Finding("broken-record", (path.name,), p.where, p.message, p.help) for p in found.problems)
        for record in found.rows:
            subject = record.title, record.device
            if (first := known.setdefault((*subject, record.versions), label)) != label:
                message = f"the record of {record.title} on {record.device} is in {first} too, with the same versions"
                yield Finding("doubled-record", subject, record.where, message, "remove one of them")
            elif registry.row(record.title) is None:
                message = f"the record of {record.title}: the registry has no such backend"
                yield Finding("orphan-record", subject, record.where, message, "remove it")
            elif not record.is_current(registry):
                what = "a kernel that is not known" if record.kernel is None else "an earlier kernel"
                message = f"the record of {record.title} is of {what}, and proves nothing of this one"
                yield Finding("earlier-record", subject, record.where, message, _AGAIN, is_note=True)
            else:
                model = model or Model(Space([registry]), registry)
                yield from _unrun(registry, model, record)


def _unrun(registry: Registry, model: Model, record: Record) -> Iterator[Finding]:
    """A finding if no case of a record has a word that the row claims on the record's platform with its packages."""
    claims: Mapping[str, Any] = record.result["claims"]
    missing = [
        f"{facet} {word}"
        for facet, words in _claimed(registry, model, record).items()
        for word in words
        if not {word, facet} & {*claims.get(facet, ()), *record.result["unproven"]}
    ]
    # variants for other devices were not run, and their claims are not tested here
    if missing and "variants" not in record.result["unproven"]:
        message = f"the record of {record.title} is not whole: no case has {', '.join(missing)}, which the row claims"
        yield Finding("partial-record", (record.title, record.device), record.where, message, _AGAIN)


def _claimed(registry: Registry, model: Model, record: Record) -> dict[str, list[str]]:
    """Facet -> the words that a row accepts on the platform of a record, if a user names the row."""
    packages = tuple((n, v) for n, v in record.result["versions"].items() if v is not None)
    try:
        facts = Platform(platform=record.platform, arch=record.arch, packages=packages).facts()
        known = {
            level: frozenset({variable.class_of(variable.value_in(facts))})
            for level, variable in enumerate(model.space.variables)
            if variable.facet in ("arch", "packages")
        }
    # an impossible architecture or version
    except (RequestError, KeyError):
        return {}
    d = model.d
    box = d.bounds(d.conjoin([model.space.possible, d.box(known), model.naming(record.title).row(record.title)[0]]))
    if not box[0]:
        return {}
    found: dict[str, list[str]] = {}
    for facet in (name for name in _WORDS if name in registry.vocabulary.facets):
        for word in registry.vocabulary.words_of(facet):
            key, value = ((facet, word), True) if facet == "features" else ((facet, None), word)
            level = model.space.level.get(key)
            if level is None:
                continue
            if (1 if value is True else model.space.variables[level].class_of(value)) in box[level]:
                found.setdefault(facet, []).append(word)
    return found
