"""The facets that every request and every platform has: the kind of each, who sets it, and the links between them.

The type, the default and the least value of a facet are read from the fields of `AttentionRequest` and `Platform`. The
words, the legend and the claim of a facet are in a registry's vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from attnreg.platforms import Platform
from attnreg.request import AttentionRequest, field_types

DecidedBy = Literal["model", "user", "platform"]


@dataclass(frozen=True, slots=True)
class CoreFacet:
    """One facet of a request or a platform.


    kinds: the kinds that a vocabulary may declare for it. least: the least value of an integer. required: whether it
    always has a value. ordinary: its value in an ordinary configuration. decided_by: who sets it; remedies phrase a
    change of a model's fact (``for head_size 64``) unlike one of an option. help: the text of the command's option, ""
    for a facet without one.
    """

    name: str
    of: Literal["request", "platform"]
    kinds: tuple[str, ...]
    least: int
    required: bool
    ordinary: Any
    decided_by: DecidedBy
    help: str

    @property
    def is_set(self) -> bool:
        """Whether its value is a set: of words, or of packages with their versions."""
        return self.kinds in (("words",), ("packages",))


_KINDS: dict[type, tuple[str, ...]] = {
    int: ("integer",),
    str: ("word", "text"),
    frozenset: ("words",),
    tuple: ("packages",),
}
# facets that a vocabulary may leave out: requests then leave them at their defaults. Without `device` all devices of an
# architecture are equal
OPTIONAL = frozenset({
    "device", "attn_type", "kv_dtype", "block_size", "num_heads", "num_kv_heads", "head_size_v", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_topk", "model",
})  # fmt: skip
# facets that accept fewer kinds than their Python type allows
_NARROWER = {"platform": ("word",), "arch": ("arch",), "device": ("word",)}
# ordinary values of fields that have no default
_ORDINARY = {"platform": "cuda", "arch": "sm90", "head_size": 128}
# `attnreg verify` runs every value that a row claims for one of these
PROVEN = ("dtype", "kv_dtype", "attn_type", "head_size", "head_size_v", "block_size")
_ABOUT: dict[str, tuple[DecidedBy, str]] = {
    "platform": ("platform", "cuda, rocm, xpu or cpu. Without it, explain and lock take this machine's."),
    "arch": ("platform", "Architecture or product, as sm90 or h100; repeatable."),
    "device": ("platform", "The exact device, as H20, where several share an architecture; repeatable."),
    "flags": ("user", "A flag that is on; repeatable."),
    "packages": ("platform", "An installed package; repeatable. Without any, every package is assumed."),
    "head_size": ("model", f"Elements per head; {_ORDINARY['head_size']}, if neither it nor a model is given."),
    "num_heads": ("model", "Query heads per rank."),
    "num_kv_heads": ("model", "KV heads per rank."),
    "dtype": ("user", "What the model computes in: bfloat16, float16, float32."),
    "kv_dtype": ("user", "How the KV cache is stored: auto, fp8, ...; none: not given."),
    "block_size": ("user", "Tokens per KV-cache block."),
    "attention": ("model", "mha, mla or mla_sparse."),
    "attn_type": ("model", "decoder, encoder, encoder_only or encoder_decoder."),
    "role": ("model", "target, draft, encoder or vision."),
    "phase": ("model", "any, prefill or decode."),
    "features": ("model", "A feature that the layer asks for; repeatable."),
    "head_size_v": ("model", "Elements per value head, where it differs."),
    # also facts of the model, but a request may omit them, and then the remedy is to give them
    "kv_lora_rank": ("user", "MLA: the latent without its rotary part."),
    "qk_nope_head_dim": ("user", "MLA: elements of a query head without position."),
    "qk_rope_head_dim": ("user", "MLA: elements of a query head with position."),
    "v_head_dim": ("user", "MLA: elements of an expanded value head."),
    "index_topk": ("user", "Sparse MLA: tokens kept for each query."),
    # no option of its own: it is read from the config that `--model` names
    "model": ("model", ""),
}


def _core(cls: type[Any], of: Literal["request", "platform"]) -> dict[str, CoreFacet]:
    defaults = {f.name: None if f.default is MISSING else f.default for f in fields(cls)}
    return {
        name: CoreFacet(
            name,
            of,
            kinds=_NARROWER.get(name, _KINDS[field_type.type]),
            least=field_type.least,
            required=not field_type.optional,
            ordinary=_ORDINARY.get(name, defaults[name]),
            decided_by=_ABOUT[name][0],
            help=_ABOUT[name][1],
        )
        for name, field_type in field_types(cls).items()
    }


CORE: Mapping[str, CoreFacet] = _core(Platform, "platform") | _core(AttentionRequest, "request")
# facet -> the facet whose value it takes if it is not given; a claim on it may be `same`
SAME_AS: Mapping[str, str] = {"head_size_v": "head_size"}
# pairs of facets that restrict each other, and the test that the two values of a request pass
LINKED: tuple[tuple[str, str, Callable[[int, int], bool]], ...] = (
    *((other, facet, operator.ne) for facet, other in SAME_AS.items()),
    ("num_heads", "num_kv_heads", lambda heads, kv_heads: heads % kv_heads == 0),
)
# facets that matter most to the reader of a difference: a box of configurations spans few of their values
MAIN_FACETS = ("arch", "device", "attention", "role", "phase", "kv_dtype")


def undeclared(facets: Collection[str]) -> tuple[str, ...]:
    """The facets of every request and platform that a vocabulary with these facets leaves out."""
    return tuple(name for name in CORE if name not in facets)


def partner_of(facet: str) -> str | None:
    """The facet that a facet is linked to, else None."""
    return next((b if facet == a else a for a, b, _ in LINKED if facet in (a, b)), None)


def ordinary(facet: str) -> Any:
    """The value of a facet in an ordinary configuration; None for a facet that a registry declares."""
    return CORE[facet].ordinary if facet in CORE else None


def options(kind: str) -> tuple[CoreFacet, ...]:
    """The facets of a request of one kind (``word`` or ``integer``) that are options of the command."""
    return tuple(f for f in CORE.values() if f.of == "request" and f.kinds[0] == kind and f.help)
