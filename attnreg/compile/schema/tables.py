"""The shape of the YAML files of a registry and of overlays, as pydantic models.

The compiler checks the words in them. tools/gen_docs.py writes the same models to docs/schema/ as JSON Schemas for
editors.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    RootModel,
    StrictInt,
    WithJsonSchema,
)

from attnreg.compile.schema.block_size import Blocks
from attnreg.compile.schema.hardware import ArchitectureData as ArchitectureData
from attnreg.compile.schema.hardware import UnreadData
from attnreg.compile.schema.runs import RowGraphs, RowLayouts
from attnreg.compile.schema.skip_layers import SkipLayersData
from attnreg.compile.schema.values import (
    FAILURE_ID,
    WORDS_SCHEMA,
    Capabilities,
    CapabilityPatch,
    CaseData,
    Condition,
    Count,
    DataModel,
    FacetValue,
    MeasuredData,
    Name,
    Options,
    PackedFormat,
    Pin,
    Release,
    Sentence,
    Size,
    SourceData,
    Words,
)


def _legend_only(value: Any) -> Any:
    if not isinstance(value, str | dict):
        raise ValueError("expected a sentence, or a mapping with a `legend`")
    return {"legend": value} if isinstance(value, str) else value


_LEGEND = "What it means: a sentence for the docs."
_SOURCE = "Where its facts can be checked: SOURCE:PATH#SYMBOL."
_WHEN = "Facet -> values: the requests that it is about."
_ALIASES = "Other names for it; a message about an unknown word says which word is meant."


class WordData(BaseModel):
    """A word: its meaning, a sentence, and any other properties."""

    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)
    legend: Sentence = Field(description=_LEGEND)
    skip_layers: list[SkipLayersData] | None = Field(
        default=None, description="Layers that keep another KV cache in a run with it; the first rule that fits counts."
    )
    packed: PackedFormat | None = None
    aliases: list[str] = Field(default=[], description=_ALIASES)


class PackageData(DataModel):
    legend: Sentence = Field(description=_LEGEND)
    aliases: list[str] = Field(default=[], description=_ALIASES)
    import_: str | None = Field(default=None, alias="import", description="The module that Python imports.")
    distributions: list[str] = Field(default=[], description="The names under which an installer knows it.")
    executable: str | None = Field(default=None, description="For a program instead of a module: its name on the path.")
    homes: list[str] = Field(default=[], description="Variables that name a directory with the program in its bin.")
    brings: dict[Release, list[Pin]] = Field(
        default={}, description="The packages that it pins, by its version: 2.14 stands for 2.14.0 and 2.14.1."
    )


class FlagData(DataModel):
    legend: Sentence = Field(description=_LEGEND)
    aliases: list[str] = Field(default=[], description="Engines' own names for it.")
    platforms: list[str] = Field(
        default=[], min_length=1, description="Where the flag means something; everywhere, if left out."
    )


class RetiredData(DataModel):
    engine: Sentence = Field(description="The engine that read it.")
    use: Sentence = Field(description="What to use instead.")


_ROWS_BELOW = "In an overlay: what the rows of the registry below accept, which do not know the claim."

_LIKE = 'Pattern of such a field -> value; the first counts. "null" is a field that is null, "" one that is absent.'

_OF_RUN = "It tells runs with a draft apart: what is proved for all configurations is proved for those without it."


class FacetData(DataModel):
    of: Literal["request", "platform", "selection", "start"] = Field(
        description="Who has it; start: steps alone set it."
    )
    kind: Literal["word", "arch", "integer", "text", "words", "packages", "boolean", "backend"] = Field(
        description="What its values are."
    )
    legend: Sentence = Field(description=_LEGEND)
    words: str | None = Field(default=None, description="The set of words that are its values.")
    claim: str | None = Field(default=None, description="The capability key that constrains it; every row states it.")
    rows_below: Literal["any"] | None = Field(default=None, description=_ROWS_BELOW)
    config: Words = Field(default=[], description="Fields of a model's config that hold it; the first one counts.")
    like: dict[str, FacetValue] = Field(default={}, description=_LIKE)
    unless: str | None = Field(default=None, description="A facet; where a user gives it, the config is not read.")
    of_run: Literal[True] | None = Field(default=None, description=_OF_RUN)


class DerivedData(DataModel):
    legend: Sentence = Field(description=_LEGEND)
    cases: list[CaseData] = Field(min_length=1, description="The first whose `when` holds gives the value.")
    claim: str | None = None
    rows_below: Literal["any"] | None = Field(default=None, description=_ROWS_BELOW)
    source: str | None = None


LegendWord = Annotated[WordData, BeforeValidator(_legend_only)]


class VocabularyFile(DataModel):
    """vocabulary.yaml: the closed set of words."""

    extends: str | None = Field(default=None, description="A bundled registry whose vocabulary this one adds to.")
    facets: dict[Name, FacetData] = {}
    features: dict[Name, LegendWord] = {}
    words: dict[Name, dict[Name, LegendWord]] = {}
    drops: dict[str, list[str]] = Field(
        default={},
        description="Words of the vocabulary below that do not exist here: set -> names. * stands for any text.",
    )
    flags: dict[Name, Annotated[FlagData, BeforeValidator(_legend_only)]] = {}
    packages: dict[Name, Annotated[PackageData, BeforeValidator(_legend_only)]] = {}
    architectures: dict[str, dict[Name, ArchitectureData]] = {}
    unread: dict[str, dict[Name, UnreadData]] = Field(
        default={},
        description="Architectures that exist and that no table was read for: platform -> name. Answers are not known.",
    )
    derived: dict[Name, DerivedData] = {}
    retired_environment: dict[str, RetiredData] = {}


class RuleData(DataModel):
    when: Condition = Field(description=_WHEN)
    reject: Sentence = Field(description="The sentence that a user reads.")
    facets: list[str] = Field(default=[], description="What the refusal is about; by default what `when` names.")
    source: str | None = None


_KERNEL_BLOCKS = "The blocks that the kernel reads, where they are not the pages: the largest that divides the page."
_STORES = "The KV dtype in which the layers store their cache, where it is another than was asked for."
_LAYOUTS = "The layouts of the KV cache that the kernels read: a list, or entries. The first entry that holds counts."
_GRAPHS = "The batches whose attention a CUDA graph can hold: a level, or entries. The first entry that holds counts."
_PER_ELEMENT = "Bytes for each element of a step's queries; the workspace is this, where it is more."


class ConsequenceData(DataModel):
    """A consequence of choosing the backend; it does not affect the choice.

    It has exactly one of `fails`, `drops`, `runs`, `unknown`, `workspace`, `kernel_blocks` and `stores`.
    """

    when: Condition | None = None
    fails: Sentence | None = Field(default=None, description="The sentence that a user reads: why the engine stops.")
    id: Name | None = Field(default=None, description=FAILURE_ID)
    drops: Sentence | None = Field(default=None, description="What of the layer the engine leaves out, in silence.")
    runs: Sentence | None = Field(default=None, description="Which of the backend's kernels runs, and why.")
    unknown: Sentence | None = Field(default=None, description="What this table does not know of such a layer.")
    workspace: Size | None = Field(default=None, description="Memory on each GPU beside the KV cache, as 394 MiB.")
    per_query_element: Count | None = Field(default=None, description=_PER_ELEMENT)
    kernel_blocks: Blocks | None = Field(default=None, description=_KERNEL_BLOCKS)
    stores: str | None = Field(default=None, description=_STORES)
    prefers: Count | None = Field(default=None, description="The page that the backend asks for where it may choose.")
    says: Sentence | None = Field(default=None, description="A remark on the workspace, the blocks or what is stored.")
    source: str | None = None


_CONTRACT = "The version of attnreg's contract that the module is made for; a module outside attnreg states it."


_RUN_ON_REQUEST = "Why an engine runs its module only where a user or an order names the variant."
_WAS = "Names that tables of other releases give the same kernel; null for the row, if it has no variants there."


class VariantData(DataModel):
    name: Name = Field(description="What follows the backend in BACKEND/VARIANT.")
    was: list[Name | None] = Field(default=[], description=_WAS)
    module: str | None = Field(default=None, description="A kernel module of its own; the row's, if left out.")
    contract: StrictInt | None = Field(default=None, description=_CONTRACT)
    run_on_request: Sentence | None = Field(default=None, description=_RUN_ON_REQUEST)
    when: Condition | None = None
    requires: Condition | None = None
    capabilities: CapabilityPatch = {}
    emulated: dict[str, Sentence] = {}
    unchecked: list[str] = []
    rules: list[RuleData] = []
    consequences: list[ConsequenceData] = []
    notes: list[str] = []
    source: str | None = None


class BackendPatch(DataModel):
    """An overlay's changes to a backend."""

    summary: Sentence | None = None
    module: str | None = None
    contract: StrictInt | None = Field(default=None, description=_CONTRACT)
    options: Options = Field(default={}, description="New values of options that the module has.")
    status: Literal["stable", "experimental", "deprecated"] | None = None
    requires: Condition | None = None
    capabilities: CapabilityPatch = {}
    emulated: dict[str, Sentence] = {}
    unchecked: list[str] = []
    variants: list[VariantData] = []
    rules: list[RuleData] = []
    consequences: list[ConsequenceData] = []
    layouts: RowLayouts | None = Field(default=None, description=_LAYOUTS)
    graphs: RowGraphs | None = Field(default=None, description=_GRAPHS)
    notes: list[str] = []
    source: str | None = None


class BackendData(DataModel):
    """One backend: its description, its requirements, its capabilities."""

    summary: Sentence = Field(description="One sentence.")
    module: str | None = Field(default=None, description="The kernel module; without one the row is knowledge only.")
    contract: StrictInt | None = Field(default=None, description=_CONTRACT)
    options: Options = Field(default={}, description="The module's own settings, with their defaults.")
    status: Literal["stable", "experimental", "deprecated"] = "stable"
    platforms: Words = Field(description="Where it runs: cuda, rocm, xpu, cpu.")
    attention: Words = Field(description="The kinds of attention that it serves: mha, mla, mla_sparse.")
    phase: Words | None = Field(default=None, description="The phases it serves; every one, if left out.")
    requires: Condition | None = None
    capabilities: Capabilities = Field(description="What it accepts; every row states every claim.")
    emulated: dict[str, Sentence] = Field(
        default={}, description="Features that are correct but slow, with the reason."
    )
    unchecked: list[str] = Field(default=[], description="Features and facets that are accepted without a look.")
    variants: list[VariantData] = []
    rules: list[RuleData] = []
    consequences: list[ConsequenceData] = []
    layouts: RowLayouts | None = Field(default=None, description=_LAYOUTS)
    graphs: RowGraphs | None = Field(default=None, description=_GRAPHS)
    notes: list[str] = []
    only_on_request: Sentence | None = Field(default=None, description="Why no order names it.")
    source: str = Field(description=_SOURCE)
    since: str | None = None


_UNCHECKED = "Features and facets that no row of this file looks at; a row that claims one does."


class FallbackData(DataModel):
    """Requests for a named backend that an engine answers with another: where it refuses, or without a look at it."""

    name: str | None = Field(default=None, description="By which another release changes or removes it.")
    when: Condition = Field(description=_WHEN)
    only: list[str] | None = Field(
        default=None, min_length=1, description="Facets; everything against the backend is about these."
    )
    takes: str | None = Field(default=None, description="The backend in its place; the order's choice, if left out.")
    unless: list[str] = Field(default=[], description="Named backends that are not replaced.")
    because: Sentence = Field(description="Why the engine does so.")
    source: str | None = None


class WaiverData(DataModel):
    """Requests for which some claims of every row are not checked, as in some engines for named backends."""

    when: Condition = Field(description=_WHEN)
    unchecked: list[str] = Field(min_length=1, description="Facets; no row's claim on one of them is looked at.")
    because: Sentence = Field(description="The sentence that a user reads of a backend that is chosen so.")
    source: str | None = None


class BackendsFile(DataModel):
    """backends.yaml: one entry per backend."""

    imports: Literal["never"] | None = Field(default=None, description="Modules are another engine's: knowledge only.")
    unchecked: list[str] = Field(default=[], description=_UNCHECKED)
    fallbacks: list[FallbackData] = []
    waivers: list[WaiverData] = []
    sources: dict[Name, SourceData] = {}
    backends: dict[Name, BackendData] = Field(description="Name -> entry.")


class EntryData(DataModel):
    backend: str = Field(description="A backend, or one variant of it: FLASH_ATTN/FA3.")
    if_: Condition = Field(alias="if", description="When the automatic order considers it.")


def _entry(value: Any) -> Any:
    if not isinstance(value, str | dict):
        raise ValueError("expected a backend's name, or {backend: ..., if: ...}")
    return {"backend": value, "if": {}} if isinstance(value, str) else value


_ENTRY = {"anyOf": [{"$ref": "#/$defs/backend_or_variant"}, {"$ref": "#/$defs/entry"}]}


class OrderData(DataModel):
    name: Name = Field(description="What follows the platform in its title: cuda/mha.")
    when: Condition | None = None
    order: list[Annotated[EntryData, BeforeValidator(_entry), WithJsonSchema(_ENTRY)]] = Field(
        min_length=1, description="The backends, in the order in which they are tried."
    )
    because: Sentence | None = None
    source: str | None = None
    measured: MeasuredData | None = Field(default=None, description="The evidence; without it an order is a judgement.")


class PrioritiesFile(RootModel[dict[str, list[OrderData]]]):
    """priorities.yaml: per platform, the orders in which backends are tried; the first whose `when` holds is used."""


class InvariantData(DataModel):
    name: Name = Field(description="A short name, by which messages cite it.")
    says: Sentence = Field(description="The statement in words.")
    when: Condition = {}
    chosen: list[str | None] | None = Field(
        default=None, min_length=1, description="The chosen backend is one of these; null: none."
    )
    never: list[str] | None = Field(default=None, min_length=1, description="The chosen backend is none of these.")
    finds: Literal[True] | None = Field(default=None, description="Some backend is found.")
    while_: Literal["native"] | None = Field(
        default=None, alias="while", description="Only where some candidate serves the request natively."
    )


class KnownData(DataModel):
    """Findings of `attnreg check` that stay as they are, and why; one that is found no longer is a finding itself."""

    code: Name = Field(description="The finding's code: `attnreg check --explain` lists them.")
    of: Words = Field(default=[], description="The finding's subject, as it is printed: one name, or a list of names.")
    each: list[Words] = Field(default=[], description="In place of `of`: the subjects of several findings.")
    because: Sentence = Field(description="Why it stays.")
    example: dict[str, Any] | None = Field(default=None, description="Facet -> value: a configuration that shows it.")


class InvariantsFile(DataModel):
    """invariants.yaml: what must hold of every selection, and what is known not to."""

    invariants: list[InvariantData] = []
    known: list[KnownData] = []


class ChoiceData(DataModel):
    """A user's choice: exactly one of `require`, `prefer` and `deny`, for the requests that `when` describes.

    Each names backends, or one variant of a backend: `FLASH_ATTN/FA3`.
    """

    when: Condition = {}
    require: str | None = Field(default=None, description="This backend, or an error.")
    prefer: str | None = Field(default=None, description="This backend if it is valid, else the order.")
    deny: Annotated[Words | None, WithJsonSchema(WORDS_SCHEMA)] = Field(default=None, description="Never these.")
    because: Sentence | None = None


class PlaceData(DataModel):
    """The place at which a backend joins existing orders."""

    backend: str = Field(description="The backend that joins.")
    before: str | None = None
    after: str | None = None
    orders: list[str] = Field(
        default=[], min_length=1, description="platform/name of the orders; every one that has the neighbour."
    )
    if_: Condition = Field(default={}, alias="if")


_EXTENDS = "The registry that it changes; in the file of a plugin a bundled one, or several."


class OverlayFile(DataModel):
    """A small file that changes another registry without a copy of it."""

    extends: Annotated[Words, WithJsonSchema(WORDS_SCHEMA)] = Field(default=["default"], description=_EXTENDS)
    vocabulary: VocabularyFile = VocabularyFile()
    sources: dict[Name, SourceData] = {}
    backends: dict[Name, dict[str, Any]] = {}
    orders: dict[str, list[OrderData]] = {}
    place: list[PlaceData] = []
    choices: list[ChoiceData] = []
    invariants: list[InvariantData] = []
    known: list[KnownData] = []
