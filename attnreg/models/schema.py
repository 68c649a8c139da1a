"""The shape of a model family's file, as pydantic models; docs/schema/models.schema.json is made from them.

`Value`, `LayerPattern` and `FieldCondition` have languages of their own. `attnreg.models.values`,
`attnreg.models.patterns` and `attnreg.compile.conditions` read them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from attnreg.compile.schema.values import DataModel, Sentence, SourceData, StateKind, Words

_CAUSAL = "true, false, or for a multimodal prefix {word: prefix} or, held in the window, {word: prefix_in_window}."
Kind = Literal["full", "sliding", "chunked", "cross", "encoder", "vision", "linear", "mamba", "conv", "none"]
AttnType = Literal["decoder", "encoder", "encoder_only"]
KINDS: tuple[str, ...] = get_args(Kind)
Value = Annotated[Any, WithJsonSchema({"$ref": "#/$defs/value"})]
LayerPattern = Annotated[Any, WithJsonSchema({"$ref": "#/$defs/pattern"})]
FieldCondition = Annotated[Any, WithJsonSchema({"$ref": "#/$defs/field_condition"})]


def _used(value: Any) -> Any:
    if not isinstance(value, bool | dict | None):
        raise ValueError("expected true, false or a mapping")
    return {"used": value} if isinstance(value, bool) else value


def _one_or_many(value: Any) -> Any:
    if not isinstance(value, dict | list):
        raise ValueError("expected a mapping of facts, or a list of them")
    return [value] if isinstance(value, dict) else value


class MlaData(DataModel):
    """Multi-head latent attention; by default a dimension is the config's field of the same name."""

    used: Value = Field(default=True, description="Whether the layers are MLA.")
    kv_lora_rank: Value = "kv_lora_rank"
    q_lora_rank: Value = "q_lora_rank"
    qk_nope_head_dim: Value = "qk_nope_head_dim"
    qk_rope_head_dim: Value = "qk_rope_head_dim"
    v_head_dim: Value = "v_head_dim"


class IndexerData(DataModel):
    """The indexer of sparse MLA; by default a dimension is the config's field of the same name."""

    used: Value = Field(default=True, description="Whether there is an indexer.")
    own: Value = Field(default=True, description="false: the layer uses the tokens that an earlier one chose.")
    index_n_heads: Value = "index_n_heads"
    index_head_dim: Value = "index_head_dim"
    index_topk: Value = "index_topk"


class StateData(DataModel):
    """The state of layers without softmax attention: its kind, and the dimensions that this kind needs."""

    # a value of the families' language, like the others
    kind: Annotated[StateKind, AfterValidator(lambda kind: {"word": kind})]
    heads: Value = Field(default=None, description="Heads, of the values if keys have others.")
    key_heads: Value = Field(default=None, description="Heads of the keys.")
    head_size: Value = Field(default=None, description="Elements per head.")
    key_size: Value = Field(default=None, description="Elements per head of the keys.")
    channels: Value = Field(default=None, description="Channels of the convolution's input.")
    groups: Value = Field(default=None, description="Groups of heads with a B and a C of their own.")
    state_size: Value = Field(default=None, description="Elements of the recurrence per channel.")
    kernel: Value = Field(default=None, description="The length of the convolution's kernel, in tokens.")
    chunk: Value = Field(default=None, description="The tokens that the layer computes at a time.")
    dtype: Value = Field(default=None, description="The dtype of the recurrent array that the config names.")


def _flag_or(model: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": "boolean"}, {"$ref": f"#/$defs/{model}"}]})


class CallData(DataModel):
    """The facts of one attention call of a layer."""

    kind: Kind | None = Field(default=None, description="The kind of the call; `full` by default.")
    attn_type: AttnType | None = Field(default=None, description="Of layers that are not causal.")
    when: FieldCondition = Field(default=None, description="The condition under which the layer makes the call.")
    fields: dict[str, Value] = Field(
        default={}, description="Fields of these layers alone, if the config has no per_layer_config."
    )
    heads: Value = Field(default=None, description="Query heads.")
    kv_heads: Value = Field(default=None, description="KV heads.")
    head_size: Value = Field(default=None, description="Elements per query and key head.")
    head_size_v: Value = Field(default=None, description="Elements per value head, where it differs.")
    window: Value = Field(default=None, description="Keys that a causal query of a sliding layer sees, or either side.")
    chunk: Value = Field(default=None, description="The length of a chunked layer's blocks, in tokens.")
    sinks: Value = Field(default=None, description="Whether sinks are added to the softmax's denominator.")
    softcap: Value = Field(default=None, description="The cap of the scores.")
    alibi: Value = Field(default=None, description="Whether ALiBi slopes are added to the scores.")
    bias: Value = Field(default=None, description="Whether another bias is added to the scores.")
    causal: Value = Field(default=None, description=_CAUSAL)
    scaling: Value = Field(default=None, description="The softmax scale; head_size ** -0.5, if left out.")
    yarn_scale: Value = Field(default=None, description="Whether YaRN's factor multiplies the scale.")
    sparse_blocks: Value = Field(default=None, description="The length of the blocks that an indexer chooses.")
    compress: Value = Field(default=None, description="The number of tokens for which one more key is kept.")
    attention: Value = Field(default=None, description="A word for the kind of attention; mha or mla, if left out.")
    form: Value = Field(default=None, description="A word for a latent that is not DeepSeek-V3's.")
    mla: Annotated[MlaData | None, BeforeValidator(_used), _flag_or("MlaData")] = None
    indexer: Annotated[IndexerData | None, BeforeValidator(_used), _flag_or("IndexerData")] = None
    state: StateData | None = Field(default=None, description="The state of layers without softmax attention.")


_CALLS = {"anyOf": [{"$ref": "#/$defs/CallData"}, {"type": "array", "items": {"$ref": "#/$defs/CallData"}}]}
Calls = Annotated[list[CallData], BeforeValidator(_one_or_many), WithJsonSchema(_CALLS)]


class AlsoData(DataModel):
    """A further pattern, whose words add facts."""

    pattern: LayerPattern = Field(description="The word of each layer.")
    words: dict[str, CallData] = Field(description="Word -> the facts that it adds.")


class KvSharedData(DataModel):
    """The layers that read another layer's keys and values."""

    last: Value = Field(
        default=None, description="The number of last layers that read the last earlier layer of their word."
    )
    list: Value = Field(default=None, description="For each layer the index of the one that it reads.")


class RefusalData(DataModel):
    """Configs that contradict themselves, and the sentence that their user reads."""

    when: FieldCondition = Field(description="Field -> value: the configs that are refused.")
    because: Sentence = Field(description="The sentence that a user reads.")


class FamilyData(CallData):
    """models/<model_type>.yaml: the mapping from the config.json of a model family, or of a part of it, to layers.

    A file whose name begins with `_` is a template for families: it has a summary in place of a model_type. One class
    serves files and parts, because a second class would cost a cold `attnreg explain` more than reading a file.
    """

    model_type: str | None = Field(default=None, description="The family's name, equal to the file's name.")
    summary: Sentence | None = Field(default=None, description="What a template is for.")
    like: str | None = Field(
        default=None, description="The base: a family or a template whose statements this file replaces or keeps."
    )
    source: str | None = Field(default=None, description="Where the rule was read: <source>:<path>#<symbol>.")
    note: str = Field(default="", description="A sentence that is printed with every model of the family.")
    names: dict[str, Words] = Field(default={}, description="Field -> other names under which its files hold it.")
    defaults: dict[str, Any] = Field(default={}, description="Field -> the default of the model's class.")
    layers: Value = Field(default=None, description="The number of layers.")
    pattern: LayerPattern = Field(default=None, description="The word of each layer.")
    words: dict[str, Calls] = Field(default={}, description="Word -> its layers' facts, a list for several calls.")
    also: dict[str, AlsoData] = Field(default={}, description="Further patterns, whose words add facts.")
    kv_shared: KvSharedData | None = None
    mtp: Value = Field(
        default=None, description="The number of MTP layers, which draft: full layers behind the others."
    )
    refuse: list[RefusalData] = Field(default=[], description="Configs that contradict themselves.")
    watch: list[str] = Field(
        default=[],
        description="Fields that mean something in other families and are ignored here; a config with one gets a note.",
    )
    renamed: dict[str, str] = Field(default={}, description="Older words of a pattern -> what they mean now.")
    parts: list[FamilyData] = Field(default=[], description="The stacks of a model that has several, in order.")
    at: Words = Field(default=["."], min_length=1, description="The field of its config, or several; `.`: here.")
    optional: bool = Field(default=False, description="Whether a model without the part's config lacks the part.")
    absent: dict[str, Any] = Field(default={}, description="The part's config if the model's config has none.")
    only: Literal[0, -1] | None = Field(default=None, description="The first or the last stack of that family.")


# keys that only a file has, and keys that only a part has
OF_FILE = ("model_type", "summary", "source")
OF_PART = ("at", "optional", "absent", "only")


class SourcesFile(DataModel):
    """models/_sources.yaml: the sources that the families' files cite."""

    sources: dict[str, SourceData]
