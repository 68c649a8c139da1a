"""The shape of layouts on rows, and of the rules of a whole run in steps.yaml: `layout` and `graphs`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler

from attnreg.compile.schema.block_size import LayerKind
from attnreg.compile.schema.values import Condition, Count, DataModel, Sentence
from attnreg.language.engine.runs import GraphLevel, GraphMode, LayoutAgree, Pieces

# an order of the axes layers, blocks, heads, tokens and content, or the older names of two of them
LAYOUT = r"^(NHD|HND|[LBHN]{4}C)$"
Layout = Annotated[str, Field(pattern=LAYOUT)]
_ANY = BeforeValidator(lambda value: [] if value == "any" else value if isinstance(value, list) else [value])


class _Shorter:
    """A value that may also be written in a shorter form. ``schema``: that of the form."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema = schema

    def __get_pydantic_json_schema__(self, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [self.schema, handler(core)]}


_NAMED = {"type": "string", "pattern": r"^(any|NHD|HND|[LBHN]{4}C)$"}
# `any` is kept as an empty list
Layouts = Annotated[list[Layout], _ANY, _Shorter(_NAMED)]
_SOME = "What must hold of some layer of the run."


class RowLayoutsData(DataModel):
    """The layouts that a row's kernels read, where `when` holds."""

    when: Condition | None = None
    layouts: Layouts = Field(description="The preferred first; `any` is every layout, without a preference.")
    slots: Count | None = Field(default=None, description="Slots for heads in a block, if not one for each KV head.")
    source: str | None = None


class RowGraphsData(DataModel):
    """The batches whose attention a CUDA graph of a row can hold, where `when` holds."""

    when: Condition | None = None
    some: Condition | None = Field(default=None, description="What must also hold of some layer of the run.")
    level: GraphLevel
    undivided: GraphLevel | None = Field(
        default=None, description="The level if the KV heads do not divide the query heads of the target model."
    )
    source: str | None = None


def _layout_entries(value: Any) -> Any:
    return value if isinstance(value, list) and all(isinstance(v, dict) for v in value) else [{"layouts": value}]


def _graph_entries(value: Any) -> Any:
    return value if isinstance(value, list) else [{"level": value}]


_SHORT_LAYOUTS = {"anyOf": [_NAMED, {"type": "array", "items": _NAMED, "minItems": 1}]}
_SHORT_LEVEL = {"enum": list(get_args(GraphLevel))}
RowLayouts = Annotated[
    list[RowLayoutsData], BeforeValidator(_layout_entries), Field(min_length=1), _Shorter(_SHORT_LAYOUTS)
]
RowGraphs = Annotated[list[RowGraphsData], BeforeValidator(_graph_entries), Field(min_length=1), _Shorter(_SHORT_LEVEL)]


class UnknownRunData(DataModel):
    """Runs whose value is not known: `when` holds for a layer, and with `mixers` a layer has no softmax attention."""

    name: str | None = Field(default=None, description="By which another release changes or removes it.")
    when: Condition | None = Field(default=None, description=_SOME)
    mixers: Literal[True] | None = Field(default=None, description="The model also has layers without softmax.")
    because: Sentence
    source: str | None = None


class CacheBesideData(DataModel):
    """A second cache beside the keys and values of some layers, whose blocks have another shape."""

    when: Condition = Field(description="The layers that have it.")
    name: str = Field(description="Its backend, as the engine has it.")
    layouts: Layouts | None = Field(default=None, description="The layouts that its kernels read, the preferred first.")
    graphs: GraphLevel | None = Field(default=None, description="The batches whose attention a graph can hold.")
    source: str | None = None


class ConnectorWishData(DataModel):
    """The layout that a KV connector wishes: `layout`, or with `unknown` the reason why it is not known; else none."""

    name: str | None = Field(default=None, description="By which another release changes or removes it.")
    when: Condition = Field(description="What must hold of the target's first layer.")
    layout: Layout | None = None
    unknown: Sentence | None = None
    source: str | None = None


class LayoutData(DataModel):
    """The rules by which the engine settles one layout of the KV cache for all layers of a run."""

    agree: LayoutAgree = Field(description="One that all backends read, or the one that a backend requires.")
    layouts: list[Layout] = Field(
        min_length=1, description="All layouts; of several with equal votes the first counts."
    )
    default: list[Layout] = Field(min_length=1, description="The order of preference if no backend states one.")
    block_compact: list[Layout] = Field(default=[], description="Those in which a layer's block is one run of bytes.")
    block_outermost: list[Layout] = Field(default=[], description="Those in which a block of all layers is together.")
    aliases: dict[str, Layout] = Field(default={}, description="Other names of layouts.")
    variable: str = Field(default="", description="The environment variable by which a user asks for a layout.")
    apart: list[LayerKind] = Field(default=[], description="Kinds of layers whose backend counts as a separate one.")
    beside: list[CacheBesideData] = []
    unknown: list[UnknownRunData] = []
    wishes: list[ConnectorWishData] = Field(default=[], description="The first that holds counts.")
    source: str | None = None


class AskedModeData(DataModel):
    """The graph mode that the engine asks for by default."""

    when: Condition | None = Field(default=None, description=_SOME)
    mode: GraphMode
    because: Sentence | None = None
    source: str | None = None


class ModeLimitData(DataModel):
    """A mode that the engine takes instead of another one in some runs, whatever the user asks for."""

    when: Condition = Field(description=_SOME)
    mode: GraphMode
    keeps: list[GraphMode] = Field(default=["none"], description="The modes that it leaves as they are.")
    because: Sentence
    source: str | None = None


class PiecesData(DataModel):
    """How the engine makes graphs of the pieces of a model between its attention."""

    when: Condition | None = Field(default=None, description=_SOME)
    pieces: Pieces
    because: Sentence | None = None
    source: str | None = None


class MixerLevelData(DataModel):
    """The graph level of layers without softmax attention."""

    kinds: list[str] = Field(min_length=1, description="The kinds of these layers, as a family's file names them.")
    when: Condition | None = Field(default=None, description=_SOME)
    level: GraphLevel
    source: str | None = None


class WrappedLevelData(DataModel):
    """The graph level of layers that the engine wraps, whatever their backend states."""

    kinds: list[LayerKind] = Field(min_length=1, description="The kinds of layers that are wrapped.")
    when: Condition | None = Field(default=None, description="What must hold of such a layer.")
    level: GraphLevel
    because: Sentence
    source: str | None = None


class GraphsData(DataModel):
    """The rules by which the engine settles the CUDA-graph mode of a run."""

    asked: list[AskedModeData] = Field(min_length=1, description="The mode by default; the first that holds counts.")
    limits: list[ModeLimitData] = Field(default=[], description="All that hold count, in this order.")
    pieces: list[PiecesData] = Field(default=[], description="How graphs of pieces are made; the first counts.")
    wrapped: list[WrappedLevelData] = []
    mixers: list[MixerLevelData] = []
    beside: list[CacheBesideData] = []
    unknown: list[UnknownRunData] = []
    source: str | None = None
