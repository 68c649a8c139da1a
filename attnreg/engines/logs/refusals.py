"""The refusals that a registry holds: of steps, of rules, and the failures that follow a choice."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from attnreg.engines.logs.tables import TableView, where
from attnreg.errors import Location
from attnreg.language.conditions import Condition

# the fewest characters of a registry's sentence by which a line is recognised
_FEWEST = 24


class Refusal(NamedTuple):
    """One refusal: its sentence, the step or the backend that refuses, when, and its line of data.

    ``row`` is the backend whose rule or failure it is; ``facets`` are those of a rule, with each feature by its name.
    """

    sentence: str
    who: str
    when: tuple[Condition, ...]
    where: Location
    row: str | None = None
    facets: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The refusal in a line, with its place."""
        # a sentence with facets in braces is about one model and release, which are not known here
        sentence = "" if "{" in self.sentence else f": {self.sentence}"
        return f"{self.who} refuses it {where(*self.when)}{sentence} ({self.where.short})"


def refusals(table: TableView) -> Iterator[Refusal]:
    """All refusals that are possible on the table's GPU."""
    for step in table.registry.steps:
        for effect in step.effects:
            if effect.refuses and not effect.unknown and table.possible(step.when) and table.possible(effect.when):
                yield Refusal(effect.refuses, f"the step {step.name}", (step.when, effect.when), effect.where)
    step_files = {step.where.file for step in table.registry.steps if step.where.file.endswith("steps.yaml")}
    seen: set[Location] = set()
    for name, backend in table.registry.backends.items():
        for variant in backend.variants:
            if not table.possible(variant.when):
                continue
            for rule in variant.rules:
                if rule.where not in seen and table.possible(rule.when):
                    seen.add(rule.where)
                    yield Refusal(rule.reject, name, (rule.when,), rule.where, name, _facets(rule.when))
            for follows in variant.consequences:
                if follows.fails and follows.where not in seen and table.possible(follows.when):
                    seen.add(follows.where)
                    # what is stated beside the steps holds for every backend
                    everywhere = step_files.intersection([follows.where.file])
                    who, row = ("the engine", None) if everywhere else (name, name)
                    yield Refusal(follows.fails, who, (follows.when,), follows.where, row)


def _facets(when: Condition) -> tuple[str, ...]:
    """The facets of a condition, and the features that it asks for."""
    features = [clause.matcher.mentions for clause in when.clauses if clause.facet == "features"]
    return (*when.facets, *(str(name) for names in features for name in names))


def held(beginnings: Collection[str], row: str | None, table: TableView) -> list[Refusal]:
    """The refusals whose sentences begin so; of one backend alone, where it is named."""
    return [
        refusal
        for refusal in refusals(table)
        if refusal.sentence.startswith(tuple(beginnings)) and row in (None, refusal.row)
    ]


def quoted(text: str, table: TableView) -> list[Refusal]:
    """The refusals whose own sentence a line has."""
    return [refusal for refusal in refusals(table) if len(refusal.sentence) >= _FEWEST and refusal.sentence in text]
