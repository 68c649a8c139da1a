"""Compiles the consequences of rows and variants to `Consequence` objects."""

from __future__ import annotations

from collections.abc import Iterable

from attnreg.compile.parts import Reporter, RowData
from attnreg.compile.schema import values
from attnreg.compile.schema.tables import ConsequenceData
from attnreg.compile.source.yaml_source import Path_
from attnreg.compile.steps import blocks_of
from attnreg.compile.validation import FilePart
from attnreg.errors import Problem, did_you_mean
from attnreg.language.consequence import Consequence
from attnreg.language.engine.runs import LayoutRules
from attnreg.language.vocabulary import Vocabulary

_KINDS = ("fails", "drops", "runs", "unknown", "workspace", "kernel_blocks", "stores")


class ConsequenceCompiler(Reporter):
    """Compiles the consequences of rows. ``layout``: the rules for the layout of a run, if the registry has them."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        sources: Iterable[str],
        broken: Iterable[str],
        problems: list[Problem],
        layout: LayoutRules | None,
    ) -> None:
        super().__init__(vocabulary, sources, broken, problems)
        self.layout = layout

    def of(self, part: FilePart[object], stated: list[ConsequenceData]) -> list[Consequence]:
        """The consequences that a row or a variant states, without those that are wrong."""
        out, failures = [], set[tuple[str, ...]]()
        for i, data in enumerate(stated):
            here = ("consequences", i)
            given = [kind for kind in _KINDS if getattr(data, kind) is not None]
            if len(given) != 1:
                message = f"states {' and '.join(given) or 'nothing that follows'}"
                self.report(part, here, message, f"state one of {', '.join(_KINDS)}; the list may have several items")
                continue
            self._companions(part, data, given[0], here)
            if data.fails is not None or data.drops is not None:
                self.apart(part, here, failures, (given[0], data.id or ""), "a failure of this list")
            if data.stores is not None:
                self.name(part, (*here, "stores"), data.stores, self.vocabulary.words["kv_dtypes"], "KV dtype")
            self.source(part, data.source, *here)
            consequence = Consequence(
                when=self.aside(part, data.when, *here, "when"),
                where=part.at(*here),
                fails=data.fails or "",
                drops=data.drops or "",
                runs=data.runs or "",
                unknown=data.unknown or "",
                workspace=None if data.workspace is None else values.size_in_bytes(data.workspace),
                per_query_element=data.per_query_element,
                kernel_blocks=None if data.kernel_blocks is None else blocks_of(data.kernel_blocks),
                prefers=data.prefers,
                stores=data.stores or "",
                says=data.says or "",
                source=data.source,
                id=data.id or "",
            )
            out.append(consequence)
        return out

    def of_run(self, part: FilePart[RowData]) -> list[Consequence]:
        """What a row, or an overlay's change of one, states for the whole run: its layouts and its graph levels."""
        out = []
        for i, item in enumerate(part.model.layouts or ()):
            here = ("layouts", i)
            self.source(part, item.source, *here)
            for j, layout in enumerate(item.layouts):
                if self.layout is not None and layout not in self.layout.layouts:
                    message = f"`{layout}` is none of the layouts in steps.yaml"
                    help_ = did_you_mean(layout, self.layout.layouts)
                    self.report(part, (*here, "layouts", j), message, help_)
            when = self.aside(part, item.when, *here, "when")
            known = tuple(item.layouts)
            out.append(Consequence(when, part.at(*here), layouts=known, slots=item.slots, source=item.source))
        for i, level in enumerate(part.model.graphs or ()):
            here = ("graphs", i)
            self.source(part, level.source, *here)
            consequence = Consequence(
                when=self.aside(part, level.when, *here, "when"),
                where=part.at(*here),
                graphs=level.level,
                some=None if level.some is None else self.aside(part, level.some, *here, "some"),
                undivided=level.undivided,
                source=level.source,
            )
            out.append(consequence)
        return out

    def _companions(self, part: FilePart[object], data: ConsequenceData, kind: str, here: Path_) -> None:
        """Report keys that belong to another kind of consequence."""
        if data.per_query_element is not None and data.workspace is None:
            self.report(part, (*here, "per_query_element"), "is about a workspace, which is not stated", key=True)
        if data.prefers is not None and data.kernel_blocks is None:
            self.report(part, (*here, "prefers"), "is a page of the blocks, which are not stated", key=True)
        if data.says is not None and kind in ("fails", "drops", "runs", "unknown"):
            self.report(part, (*here, "says"), f"`{kind}` is the whole sentence", "put it there", key=True)
        if data.id is not None and data.fails is None and data.drops is None:
            self.report(part, (*here, "id"), "names a failure, and this is none", "remove it", key=True)
