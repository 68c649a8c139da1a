"""A base request, platforms written in a few words, and random requests and platforms."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from attnreg import AttentionRequest, Platform, Registry, Selection
from attnreg.selection.trace import Candidate

BASE: dict[str, Any] = {"head_size": 128, "num_heads": 32, "num_kv_heads": 8, "block_size": 16}
MLA: dict[str, Any] = {
    "attention": "mla",
    "head_size": 576,
    "num_heads": 128,
    "num_kv_heads": 1,
    "block_size": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def at(where: str, registry: Registry) -> Platform:
    """The platform of a text such as ``gfx942 +aiter -vllm``: an architecture, flags switched on, packages missing."""
    arch, *words = where.split()
    flags = frozenset(w[1:] for w in words if w[0] == "+")
    missing = {w[1:] for w in words if w[0] == "-"}
    packages = [p for p in registry.vocabulary.packages if p not in missing] if missing else None
    platform = registry.vocabulary.architectures[arch].platform
    return Platform(platform=platform, arch=arch, flags=flags, packages=packages)


def named(selection: Selection, candidate: Candidate) -> str:
    """What a candidate is asked for by: the variant of its backend that the order names, or the backend."""
    entries = selection.order.entries if selection.order else ()
    return next((e.backend for e in entries if e.where == candidate.where), candidate.name)


def platforms(registry: Registry) -> st.SearchStrategy[Platform]:
    """Any platform of a registry, with any flags and packages."""
    vocabulary = registry.vocabulary
    versions = st.sampled_from(["", "0.1", "0.6.18", "2.6", "2.7", "2.8.1", "99"])
    installed = st.dictionaries(st.sampled_from(sorted(vocabulary.packages)), versions)
    return st.builds(
        lambda arch, flags, packages: Platform(platform=arch.platform, arch=arch.name, flags=flags, packages=packages),
        st.sampled_from(list(vocabulary.architectures.values())),
        st.sets(st.sampled_from(sorted(vocabulary.flags))) if vocabulary.flags else st.just(set()),
        st.none() | installed,
    )


def requests(registry: Registry) -> st.SearchStrategy[AttentionRequest]:
    """Any request in a registry's words: sizes from its data and others, and few features."""
    vocabulary = registry.vocabulary

    def word(group: str) -> st.SearchStrategy[str]:
        return st.sampled_from(sorted(vocabulary.words[group]))

    def size(*usual: int) -> st.SearchStrategy[int | None]:
        return st.none() | st.sampled_from(usual) | st.integers(1, 1200)

    heads = st.sampled_from([(None, None), (32, 8), (16, 1), (12, 12), (128, 1), (None, 4), (17, 1)])
    return st.builds(
        lambda heads, **fields: AttentionRequest(num_heads=heads[0], num_kv_heads=heads[1], **fields),
        heads=heads,
        head_size=st.sampled_from([32, 64, 80, 128, 192, 256, 512, 576]) | st.integers(1, 1200),
        head_size_v=st.none() | size(64, 128, 512),
        dtype=word("dtypes"),
        kv_dtype=st.none() | word("kv_dtypes"),
        block_size=size(1, 16, 64, 128, 256),
        attention=word("attention"),
        attn_type=word("attn_types"),
        role=word("roles"),
        phase=word("phases"),
        features=st.sets(st.sampled_from(sorted(vocabulary.features)), max_size=3),
        kv_lora_rank=st.sampled_from([None, 0, 512, 256]),
        qk_nope_head_dim=st.sampled_from([None, 0, 64, 96, 128, 192, 256]),
        qk_rope_head_dim=st.sampled_from([None, 0, 32, 64]),
        v_head_dim=st.sampled_from([None, 0, 64, 128, 256]),
        index_topk=st.sampled_from([None, 1, 2048]),
        model=st.sampled_from([None, "deepseek_v3", "other"]),
    )
