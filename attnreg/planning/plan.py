"""Plan: the answer for a whole run, plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.errors import Location
from attnreg.models.groups import describe_indices
from attnreg.planning.run import RunGroup

if TYPE_CHECKING:
    from attnreg.explain.block_size import BlockSize
    from attnreg.planning.memory import CacheOfLayers, MemoryFit, PipelineStage
    from attnreg.planning.run import Agreed, Conflict
    from attnreg.platforms import Platform
    from attnreg.registry import Registry
    from attnreg.selection.consequences import Following
    from attnreg.selection.trace import Selection


class Stated(NamedTuple):
    """A sentence with its line of data; ``group`` is the label of the layers that it is about, "" for the run."""

    text: str
    where: Location | None = None
    group: str = ""

    @property
    def line(self) -> str:
        """The sentence, and its line of data in brackets."""
        return f"{self.text} ({self.where.short})" if self.where is not None else self.text

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {"text": self.text, "group": self.group, "where": str(self.where) if self.where else None}


@dataclass(frozen=True)
class PlanGroup:
    """Equal layers of a run on one rank.

    ``run`` has their role, indices, request and shapes, and the selection that reads the cache; its label is the layers
    in words. ``label`` has their heads and features. ``prompts`` is the selection for prompts, if another question asks
    about them. ``cache`` is their KV cache on a rank. ``block`` is the block in tokens that the kernel reads, with its
    line and the data's remark; None if it is not known. ``stops`` is a failure in pages of the run's size. ``layouts``
    are the cache layouts that the backend reads, ``graphs`` is what it allows of CUDA graphs; None if the registry has
    no rules for them.
    """

    run: RunGroup
    label: str
    cache: CacheOfLayers
    prompts: Selection | None = None
    block: int | None = None
    block_where: Location | None = None
    block_remark: str = ""
    stops: Following | None = None
    layouts: Stated | None = None
    graphs: Stated | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        run, selection = self.run, self.run.selection
        shapes = None if run.shapes is None else [shape._asdict() for shape in run.shapes]
        return {
            "label": self.label,
            "role": run.role,
            "kind": run.kind,
            "layers": list(run.layers),
            "words": run.label,
            "request": run.request.to_dict() if run.request is not None else None,
            "backend": selection and _backend(selection),
            "prompts": self.prompts and _backend(self.prompts),
            "kernel_block": {
                "tokens": self.block,
                "where": str(self.block_where) if self.block_where else None,
                "remark": self.block_remark or None,
            },
            "shapes": shapes,
            "bytes_per_token": None if self.cache.first is None else self.cache.first * len(run.layers),
            "keeps_tokens": self.cache.keeps,
            "layouts": self.layouts and self.layouts.to_dict(),
            "graphs": self.graphs and self.graphs.to_dict(),
        }


def layers_of(groups: Iterable[PlanGroup]) -> str:
    """The layers of several groups of one model in words: ``36 layers (0–35)``."""
    first, *others = groups
    if not others:
        return first.run.label
    indices = sorted({index for group in (first, *others) for index in group.run.layers})
    prefix = first.run.label.partition(" · ")[0] + " · " if first.run.role != "target" else ""
    return f"{prefix}{len(indices)} layer{'s' * (len(indices) != 1)} ({describe_indices(indices)})"


def _backend(selection: Selection) -> dict[str, Any]:
    chosen = selection.chosen
    return {
        "title": selection.title,
        "name": chosen.name if chosen else None,
        "variant": chosen.variant if chosen else None,
        "known": not selection.unknown,
        "where": str(chosen.where) if chosen else None,
        "runs": [follows.text for follows in selection.consequences if follows.kind == "runs"],
    }


class RunChange(NamedTuple):
    """Options of the command, and their new values, with which the run starts; None for one that is left out."""

    options: tuple[tuple[str, str | None], ...]

    @property
    def sentence(self) -> str:
        """``starts with --kv-dtype auto``."""
        put = " ".join(f"{name} {value}" for name, value in self.options if value is not None)
        out = " ".join(name for name, value in self.options if value is None)
        return "starts " + " and ".join(filter(None, (put and f"with {put}", out and f"without {out}")))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {"text": self.sentence, "options": dict(self.options)}


@dataclass(frozen=True)
class Plan:
    """What an engine decides for a whole run, on one rank of each pipeline stage; plain data.

    ``conflicts`` say why the run does not start, each with the smallest set of facts that exclude each other.
    ``changes`` are changes of options that were evaluated, and after which it starts. ``unknown`` says what is not
    known. ``page`` is the block size of the KV cache, ``layout`` the order of its axes, ``graphs`` the CUDA-graph mode:
    None if the registry has no rules for them. ``workspaces`` is what backends take beside the cache, in bytes.
    ``stages`` are the pipeline stages, empty if it is not known which layers they have. ``fit`` is None without the
    memory of a GPU, and if it cannot be known.
    """

    registry: Registry = field(repr=False)
    platform: Platform
    title: str
    groups: tuple[PlanGroup, ...]
    page: BlockSize | None = None
    layout: Agreed | None = None
    graphs: Agreed | None = None
    workspaces: tuple[tuple[str, int, Location], ...] = ()
    ranks: int = 1
    dcp: int = 1
    stages: tuple[PipelineStage, ...] = ()
    stages_where: Location | None = None
    fit: MemoryFit | None = None
    conflicts: tuple[Conflict, ...] = ()
    changes: tuple[RunChange, ...] = ()
    unknown: tuple[Stated, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def starts(self) -> bool | None:
        """Whether the run starts; None if that is not known."""
        return False if self.conflicts else None if self.unknown else True

    @property
    def workspace_bytes(self) -> int:
        """The bytes of all workspaces together."""
        return sum(size for _, size, _ in self.workspaces)

    def __str__(self) -> str:
        """The title and the verdict, then the conflicts, the changes, and what is not known."""
        lines = [f"{self.title}: {verdict(self)}"]
        lines += [f"  ✗ {conflict.sentence}" for conflict in self.conflicts]
        lines += [f"  {change.sentence}" for change in self.changes]
        return "\n".join([*lines, *(f"  ? {said.line}" for said in self.unknown)])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values. A number that is not known is null."""
        page, layout, graphs = self.page, self.layout, self.graphs
        return {
            "registry": self.registry.title,
            "platform": self.platform.to_dict(),
            "title": self.title,
            "starts": self.starts,
            "conflicts": [conflict.to_dict() for conflict in self.conflicts],
            "changes": [change.to_dict() for change in self.changes],
            "unknown": [said.to_dict() for said in self.unknown],
            "groups": [group.to_dict() for group in self.groups],
            "page": page and page.to_dict(),
            "layout": layout and layout.to_dict(),
            "graphs": graphs and graphs.to_dict(),
            "workspaces": [{"backend": b, "bytes": size, "where": str(at)} for b, size, at in self.workspaces],
            "ranks": self.ranks,
            "dcp": self.dcp,
            "stages": [stage.to_dict() for stage in self.stages],
            "stages_where": str(self.stages_where) if self.stages_where else None,
            "fit": self.fit and self.fit.to_dict(),
            "notes": list(self.notes),
        }


def verdict(plan: Plan) -> str:
    """``starts``, ``does not start`` or ``partly not known``."""
    return {True: "starts", False: "does not start", None: "partly not known"}[plan.starts]
