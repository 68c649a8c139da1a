"""The closed world: every row states every claim, unless its file or an overlay states the claim for it.

If a row leaves a claim out, the ``unchecked`` list of its own file may state it. If an overlay declares the claim, its
``rows_below: any`` may state it for the rows below. A claim that neither states is reported as missing.
"""

from __future__ import annotations

from collections.abc import Mapping

from attnreg.compile.parts import RegistryParts, Reporter, VocabularyPart
from attnreg.compile.schema import tables as schema
from attnreg.compile.source.yaml_source import Document, as_written
from attnreg.compile.validation import FilePart
from attnreg.errors import Location
from attnreg.language.facets import SAME_AS
from attnreg.language.matchers import ANY
from attnreg.registry import Claim

# the most rows that a problem names
_MOST_NAMES = 3


class Statements:
    """The claims that files and overlays state for rows; one instance for a registry."""

    def __init__(
        self, reporter: Reporter, parts: RegistryParts, unchecked: Mapping[Document, Mapping[str, Location]]
    ) -> None:
        """unchecked: by document, the features and facets that its rows do not check."""
        self.reporter = reporter
        self.unchecked = unchecked
        # document with rows -> its place in the order of reading
        self.order = {part.document: i for i, part in enumerate(parts.sources)}
        # capability key -> the part that first declares its facet, and the facet's path there
        self.declared: dict[str, tuple[VocabularyPart, tuple[str, str]]] = {}
        self.defaults: dict[str, Location] = {}
        # claim of an overlay -> the rows below that lack it
        self.missing: dict[str, list[str]] = {}
        for part in parts.vocabulary:
            for group in ("facets", "derived"):
                for name, data in getattr(part.model, group).items():
                    if data.claim is not None:
                        self.declared.setdefault(data.claim, (part, (group, name)))
                    if data.rows_below is not None:
                        self._check_default(part, (group, name), data.claim)

    def _check_default(self, part: VocabularyPart, path: tuple[str, str], claim: str | None) -> None:
        here = (*path, "rows_below")
        if claim is None:
            self.reporter.report(part, here, "the facet has no claim", "give it a `claim`, or remove this", key=True)
        elif part.path != ("vocabulary",):
            message = f"only an overlay has rows below it; those of this registry state `{claim}` themselves"
            self.reporter.report(part, here, message, "remove it", key=True)
        elif self.declared[claim][0] is not part:
            self.reporter.report(part, here, f"the rows below state `{claim}` already", "remove it", key=True)
        else:
            self.defaults[claim] = part.key_at(*here)

    def complete(
        self, row: FilePart[schema.BackendData], claims: dict[str, Claim], unchecked: Mapping[str, Location]
    ) -> None:
        """Add the claims that a file or an overlay states for a row; report claims that are stated nowhere.

        claims: the claims of the row and its overlays; this method adds to them. unchecked: the features and facets
        that the row and its overlays do not check.
        """
        missing: list[str] = []
        for key, facet in self.reporter.vocabulary.claims.items():
            if key in claims:
                continue
            stated_at = unchecked.get(facet.name) or self.unchecked.get(row.document, {}).get(facet.name)
            below = self._is_below(row, key)
            if stated_at is None and below:
                stated_at = self.defaults.get(key)
            if stated_at is not None:
                claims[key] = Claim(facet.name, key, ANY, stated_at)
            elif below:
                self.missing.setdefault(key, []).append(str(row.path[-1]))
            else:
                missing.append(key)
        if missing:
            names = ", ".join(f"`{key}`" for key in missing)
            message = f"{names} {'is' if len(missing) == 1 else 'are'} missing"
            self.reporter.report(row, ("capabilities",), message, self._ways(missing), key=True)

    def _ways(self, missing: list[str]) -> str:
        """The ways in which a row can state claims."""
        facets = self.reporter.vocabulary.claims
        words = [as_written(word) for word in facets[missing[0]].words[:2]]
        values = ", ".join(words) or ("8, 16" if facets[missing[0]].kind == "integer" else "...")
        same = [f"`{k}: same` (as wide as {SAME_AS[facets[k].name]})" for k in missing if facets[k].name in SAME_AS]
        ways = [f"`{missing[0]}: [{values}]` (a list or a matcher of values)", "`any` (every value)", *same]
        return f"every row states every claim: {', '.join(ways[:-1])} or {ways[-1]}"

    def _is_below(self, row: FilePart[schema.BackendData], claim: str) -> bool:
        """Whether an overlay that was read after a row's file declares a claim."""
        part, _ = self.declared[claim]
        return part.path == ("vocabulary",) and self.order[row.document] < self.order[part.document]

    def report_missing(self) -> None:
        """Report the claims of overlays that rows below them lack."""
        for key, rows in self.missing.items():
            part, path = self.declared[key]
            names = ", ".join([*rows[:_MOST_NAMES], *(["…"] if len(rows) > _MOST_NAMES else [])])
            one = len(rows) == 1
            message = f"{len(rows)} row{'' if one else 's'} below {'does' if one else 'do'} not state `{key}`: {names}"
            help_ = "add `rows_below: any` where they accept every value, or state it for each under `backends`"
            self.reporter.report(part, path, message, help_, key=True)
