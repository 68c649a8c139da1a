"""Compiles the consequences of rows and variants to `Consequence` objects."""

from __future__ import annotations

from collections.abc import Iterable

from attnreg.compile.parts import Reporter
from attnreg.compile.schema import values
from attnreg.compile.schema.tables import ConsequenceData
from attnreg.compile.source.yaml_source import Path_
from attnreg.compile.steps import blocks_of
from attnreg.compile.validation import FilePart
from attnreg.errors import Problem, did_you_mean
from attnreg.language.runs import LayoutRules
from attnreg.language.vocabulary import Vocabulary
from attnreg.registry import Consequence

_KINDS = ("fails", "runs", "workspace", "kernel_blocks", "stores", "layouts", "graphs")
# the kinds that a remark may follow
_WITH_REMARK = ("workspace", "kernel_blocks", "stores")


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
            if data.fails is not None:
                self.apart(part, here, failures, (data.id or "",), "a failure of this list")
            if data.stores is not None:
                self.name(part, (*here, "stores"), data.stores, self.vocabulary.words["kv_dtypes"], "KV dtype")
            for j, layout in enumerate(data.layouts or ()):
                if self.layout is not None and layout not in self.layout.layouts:
                    message = f"`{layout}` is none of the layouts in steps.yaml"
                    help_ = did_you_mean(layout, self.layout.layouts)
                    self.report(part, (*here, "layouts", j), message, help_)
            self.source(part, data.source, *here)
            consequence = Consequence(
                when=self.condition(part, data.when, *here, "when"),
                where=part.at(*here),
                fails=data.fails or "",
                runs=data.runs or "",
                workspace=None if data.workspace is None else values.size_in_bytes(data.workspace),
                per_query_element=data.per_query_element,
                kernel_blocks=None if data.kernel_blocks is None else blocks_of(data.kernel_blocks),
                prefers=data.prefers,
                stores=data.stores or "",
                layouts=None if data.layouts is None else tuple(data.layouts),
                slots=data.slots,
                graphs=data.graphs,
                some=None if data.some is None else self.condition(part, data.some, *here, "some"),
                undivided=data.undivided,
                says=data.says or "",
                source=data.source,
                id=data.id or "",
            )
            out.append(consequence)
        return out

    def _companions(self, part: FilePart[object], data: ConsequenceData, kind: str, here: Path_) -> None:
        """Report keys that belong to another kind of consequence."""
        if data.per_query_element is not None and data.workspace is None:
            self.report(part, (*here, "per_query_element"), "is about a workspace, which is not stated", key=True)
        if data.prefers is not None and data.kernel_blocks is None:
            self.report(part, (*here, "prefers"), "is a page of the blocks, which are not stated", key=True)
        if data.slots is not None and data.layouts is None:
            self.report(part, (*here, "slots"), "is of a cache whose layouts are not stated", key=True)
        for key in ("some", "undivided"):
            if getattr(data, key) is not None and data.graphs is None:
                self.report(part, (*here, key), "is of a graph level, which is not stated", key=True)
        if data.says is not None and kind in ("fails", "runs"):
            self.report(part, (*here, "says"), f"`{kind}` is the whole sentence", "put it there", key=True)
        elif data.says is not None and kind not in _WITH_REMARK:
            self.report(part, (*here, "says"), f"no remark follows `{kind}`", "write a comment", key=True)
        if data.id is not None and data.fails is None:
            self.report(part, (*here, "id"), "names a failure, and this is none", "remove it", key=True)
