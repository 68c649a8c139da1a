"""The claims of a registry row as cases: every claimed value at least once, and every pair that the row accepts.

The selector decides what a backend claims, so variants and rules need no second implementation: a rule makes the
selector refuse a pair. Cases are equal in every run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from attnreg.conformance.bounds import ROUNDOFF
from attnreg.conformance.prompts import FORMATS
from attnreg.conformance.trial import LENGTHS, STORAGES, Case
from attnreg.language.packed import packed_formats
from attnreg.request import AttentionRequest
from attnreg.runtime.interface import DTYPES
from attnreg.runtime.latents import ROPE
from attnreg.selection.selector import evaluate

if TYPE_CHECKING:
    from attnreg.platforms import Platform
    from attnreg.registry import Backend, Registry
    from attnreg.selection.trace import Selection

# the features that a run on one device can prove or refute; claims of other features stay unproven
PROVABLE = frozenset(
    {
        "alibi", "asymmetric_window", "batch_invariant", "causal_by_request", "chunk", "fp8_output", "fp8_query",
        "kv_connector", "lse", "mm_prefix", "mm_prefix_in_window", "non_causal", "per_head_quant_scales", "sinks",
        "sliding_window", "softcap", "tree_mask",
    }
)  # fmt: skip
# the most common size first; `Claims` adds the numbers in the row's claims
BLOCK_SIZES = (16, 32, 48, 64, 1, 8, 128)
LARGEST = 512


class Form(NamedTuple):
    """A form of attention, as fields of a request, and the usual sizes of its layers, the most common first.

    head_sizes_v: None means equal to head_size. heads: query heads and KV heads. latent: MLA in its latent form, dense
    or sparse. largest: the largest size that is used from a row's claims.
    """

    attention: str
    phase: str
    head_sizes: tuple[int, ...]
    head_sizes_v: tuple[int | None, ...]
    heads: tuple[tuple[int, int], ...]
    latent: bool = False
    largest: int = LARGEST


ORDINARY = Form(
    "mha", "any", (64, 128, 80, 96, 112, 32, 256, 16, 192, 40, 512), (None, 64, 128, 32),
    ((4, 2), (1, 1), (6, 1), (3, 3), (16, 2)),
)  # fmt: skip
LATENT = Form(
    "mla",
    "decode",
    (576, 288, 80, 512),
    (512, 256, 64, 48),
    ((4, 1), (1, 1), (16, 1), (6, 1), (40, 1)),
    latent=True,
    largest=640,
)
SPARSE = LATENT._replace(attention="mla_sparse")
EXPANDED = Form("mla", "prefill", (192, 96, 128, 256), (128, 64, None, 256), ((4, 4), (1, 1), (3, 3), (16, 16)))


def form_of(row: Backend) -> Form | None:
    """The form of attention in which a row's claims are verified; None for a form without a contract."""
    if "mha" in row.attention:
        return ORDINARY
    if row.attention & {"mla", "mla_sparse"} and row.phases == frozenset({"prefill"}):
        return EXPANDED
    return LATENT if "mla" in row.attention else SPARSE if "mla_sparse" in row.attention else None


def _has_latents(settings: Mapping[str, Any], kv_dtype: str, features: frozenset[str]) -> bool:
    """Whether a case of prompts can have its context in a cache of latents."""
    heads, kv_heads = settings["heads"]
    # the chunks of context depend on the batch, so no kernel is batch-invariant
    invariant = "batch_invariant" in features
    # fp8_ds_mla stores rotary parts in bfloat16
    held = kv_dtype in FORMATS and (kv_dtype != "fp8_ds_mla" or settings["dtype"] == "bfloat16")
    return held and settings["head_size"] > ROPE and heads == kv_heads and not invariant


Size = Literal["claims", "pairs"]
Setting = tuple[str, Any]


@dataclass(frozen=True)
class Claims:
    """The claims of a backend on a platform: the accepted values of each facet, the most common first.

    lengths: the patterns of its batches.
    """

    backend: str
    platform: Platform
    registry: Registry
    lengths: tuple[str, ...] = LENGTHS

    @cached_property
    def row(self) -> Backend:
        """The row; for ``FLASH_ATTN/FA3`` it has this variant alone."""
        row = self.registry.row(self.backend)
        assert row is not None, self.backend
        return row

    @cached_property
    def form(self) -> Form:
        """The form of attention to verify. Raises LookupError if the row's form has no cases."""
        form = form_of(self.row)
        if form is None:
            raise LookupError("no cases are made of its form of attention")
        return form

    def accepts(self, request: AttentionRequest) -> bool:
        """Whether the backend accepts the request if a user names it."""
        return self.select(request).backend is not None

    def select(self, request: AttentionRequest) -> Selection:
        return evaluate(request, self.platform, self.registry, self.backend)

    @cached_property
    def dimensions(self) -> Mapping[str, tuple[Any, ...]]:
        """Facet -> the values to prove; each feature is a facet of its own, off or on."""
        words = self.registry.vocabulary.words
        row = self.row
        candidates: dict[str, tuple[Any, ...]] = {
            "attention": tuple(sorted(row.attention)) if self.form is EXPANDED else (self.form.attention,),
            "attn_type": tuple(words["attn_types"]),
            "dtype": self._dtypes,
            "kv_dtype": tuple(words["kv_dtypes"]),
            "block_size": self._block_sizes,
            "head_size": self._sizes("head_size", self.form.head_sizes),
            "heads": self._heads,
            "head_size_v": self._sizes("head_size_v", self.form.head_sizes_v),
        }

        def possible(facet: str, value: Any) -> bool:
            """Whether some case has this value: the plain case, or one with one more facet changed, or two.

            The two are the dtype and the attention type, because a variant may be for prompts of one dtype alone.
            """
            settings = {**self._base, facet: value}
            others = ({other: x} for other, values in candidates.items() if other != facet for x in values)
            kinds = product(candidates["dtype"], candidates["attn_type"])
            both = ({"dtype": d, "attn_type": t, facet: value} for d, t in kinds)
            return any(self._case({**settings, **more}) is not None for more in ({}, *others, *both))

        accepted: dict[str, tuple[Any, ...]] = {}
        for facet, values in candidates.items():
            accepted[facet] = tuple(v for v in values if possible(facet, v))
        accepted["lengths"] = self.lengths
        accepted["storage"] = tuple(s for s in STORAGES if self._case({**self._base, "storage": s}) is not None)
        for feature in sorted(PROVABLE & self.registry.vocabulary.features.keys()):
            # a feature may be claimed with one dtype alone, or with some sizes
            if possible(feature, True):
                accepted[feature] = (False, True)
        return accepted

    @cached_property
    def unproven(self) -> frozenset[str]:
        """The claims that no run on one device can prove: features, and for prompts KV dtypes without latents."""
        rest = self.registry.vocabulary.features.keys() - PROVABLE
        unproven = {f for f in rest if self._case({**self._base, f: True}) is not None}
        if self.form is EXPANDED:
            others = self.registry.vocabulary.words["kv_dtypes"].keys() - {*self.dimensions["kv_dtype"]}
            if any(self.accepts(replace(self.plain.request, kv_dtype=word)) for word in others):
                unproven.add("kv_dtype")
        return frozenset(unproven)

    @cached_property
    def _base(self) -> dict[str, Any]:
        """A plain configuration that the backend accepts. Raises LookupError if it accepts none."""
        attn_types = self.registry.vocabulary.words["attn_types"]
        widths = self._sizes("head_size_v", self.form.head_sizes_v) if self.form.latent else self.form.head_sizes_v
        sizes = product(self._sizes("head_size", self.form.head_sizes), widths, self._block_sizes)
        # a row may claim packed caches alone
        caches = ({}, *({"kv_dtype": name} for name in self._packed))
        # a decoder of any size comes before an encoder: some features are a decoder's alone
        for cache, heads, attn_type, (head, width, block), dtype in (
            product(caches, self._heads, attn_types, tuple(sizes), self._dtypes) if self._for_this_platform else ()
        ):
            base = {
                "attn_type": attn_type, "dtype": dtype, "block_size": block, "head_size": head, "head_size_v": width,
                "heads": heads, **cache,
            }  # fmt: skip
            if self._case(base) is not None:
                return base
        usual = [
            AttentionRequest(
                attention=self.form.attention, phase=self.form.phase, head_size=self.form.head_sizes[0],
                block_size=BLOCK_SIZES[0], dtype=d,
            )
            for d in self._dtypes
        ]  # fmt: skip
        reasons = min(([r.text for c in self.select(u).candidates for r in c.reasons] for u in usual), key=len)
        where = f"{self.platform.platform} {self.platform.arch}"
        raise LookupError(f"it accepts no plain request on {where}: {'; '.join(reasons)}")

    @property
    def _for_this_platform(self) -> bool:
        """Whether some variant can accept any request on this platform."""
        facts = {name: getattr(self.platform, name) for name in ("platform", "arch", "packages")}
        here = {name: value for name, value in facts.items() if value is not None}
        conditions = ((v.when.decided(here), v.requires.decided(here)) for v in self.row.variants)
        return any(False not in decided for decided in conditions)

    @property
    def _packed(self) -> tuple[str, ...]:
        """The packed formats of the KV cache."""
        return tuple(packed_formats(self.registry.vocabulary.words.get("kv_dtypes", {})))

    @property
    def _dtypes(self) -> tuple[str, ...]:
        """The names of dtypes, the most exact first, so that plain cases show the smallest faults."""
        words = [word for word in self.registry.vocabulary.words["dtypes"] if word in DTYPES]
        return tuple(sorted(words, key=lambda w: ROUNDOFF[DTYPES[w]]))

    @property
    def _heads(self) -> tuple[tuple[int, int], ...]:
        """Pairs of query heads and KV heads: the usual ones, and the bounds in the row's claims."""
        edges = [(n, 1) for n in self._sizes("num_heads", ())] + [(n, n) for n in self._sizes("num_kv_heads", ())]
        return tuple(dict.fromkeys((*self.form.heads, *edges)))

    def _sizes(self, facet: str, usual: tuple[Any, ...]) -> tuple[Any, ...]:
        """The usual sizes, and the bounds in the row's claims."""
        variants = self.row.variants
        matchers = [c.matcher for v in variants for c in v.claims if c.facet == facet]
        edges = {e for m in matchers for e in (*m.constants, *m.moduli, *m.mentions) if isinstance(e, int)}
        return (*usual, *sorted(e for e in edges if 0 < e <= self.form.largest and e not in usual))

    @cached_property
    def _block_sizes(self) -> tuple[int | None, ...]:
        """The sizes of blocks; also None (no cache) if the backend accepts no decoder with a cache."""
        sizes = self._sizes("block_size", BLOCK_SIZES)
        heads, form = self._sizes("head_size", self.form.head_sizes), self.form
        decoders = (
            AttentionRequest(attention=form.attention, phase=form.phase, head_size=h, dtype=d, kv_dtype=c, block_size=b)
            for h, d, c, b in product(heads, self._dtypes, ("auto", *self._packed), sizes)
        )
        return sizes if any(map(self.accepts, decoders)) else (*sizes, None)

    def _case(self, settings: Mapping[str, Any]) -> Case | None:
        """The case with these settings and plain values for all others; None if the backend refuses it."""
        form = self.form
        s = {"lengths": self.lengths[0], "heads": form.heads[0], "head_size_v": None, **settings}
        features = frozenset(name for name in self.registry.vocabulary.features if s.get(name))
        if "mm_prefix_in_window" in features:
            # the feature needs a layer with prefix ranges and a window
            features |= {"mm_prefix"} if "asymmetric_window" in features else {"mm_prefix", "sliding_window"}
        cacheless = s["attn_type"] in ("encoder", "encoder_only") or form is EXPANDED
        kv_dtype = s.get("kv_dtype", "fp8" if "per_head_quant_scales" in features else "auto")
        storage = s.get("storage", "packed" if cacheless or s["block_size"] is None else "NHD")
        if form is EXPANDED and "storage" not in s and (kv_dtype != "auto" or "kv_connector" in features):
            storage = "latents"
        # the context is merged by its LSE
        features |= {"lse"} if storage == "latents" else set()
        lengths = s["lengths"]
        if "batch_invariant" in features and lengths != "decode":
            # the bits are compared with those of each request alone; different lengths show the most differences
            lengths = "long" if "long" in self.lengths else "mixed"
        if not all(
            (
                # encoders have no cache; cross-attention has one
                storage == "packed" or not cacheless or storage == "latents",
                storage != "latents" or (form is EXPANDED and _has_latents(s, kv_dtype, features)),
                storage != "packed" or s["attn_type"] != "encoder_decoder",
                storage == "packed" or s["block_size"] is not None,
                storage != "packed" or (kv_dtype == "auto" and "kv_connector" not in features),
                # keys and values of a fused cache have the same width
                storage != "fused" or s["head_size_v"] is None,
                s["head_size_v"] != s["head_size"] or form.latent,
                # a latent's value is a part of its key, in one cache
                not form.latent or (storage in ("NHD", "HND") and s["head_size_v"] <= s["head_size"]),
                form.attention == "mha" or s["attn_type"] == "decoder",
                kv_dtype != "fp8_ds_mla" or form is EXPANDED or (s["head_size"], s["head_size_v"]) == (576, 512),
                "per_head_quant_scales" not in features or kv_dtype.startswith("fp8"),
                "non_causal" not in features or s["attn_type"] == "decoder",
            )
        ):
            return None
        request = AttentionRequest(
            attention=s.get("attention", form.attention),
            phase=form.phase,
            head_size=s["head_size"],
            head_size_v=s["head_size_v"],
            kv_lora_rank=s["head_size_v"] if form.latent else None,
            num_heads=s["heads"][0],
            num_kv_heads=s["heads"][1],
            block_size=s["block_size"],
            dtype=s["dtype"],
            kv_dtype=kv_dtype,
            attn_type=s["attn_type"],
            features=features,
        )
        case = Case(request=request, lengths=lengths, storage=storage)
        declared = "cache_layout" in self.registry.vocabulary.facets
        if case.layout == "SPLIT" and not declared:
            return None
        if case.layout != "NHD" and declared:
            request = replace(request, extra={"cache_layout": case.layout})  # type: ignore[arg-type]
        return case if self.accepts(request) else None

    @cached_property
    def plain(self) -> Case:
        """An ordinary case without any feature."""
        case = self._case(self._base)
        assert case is not None
        return case

    def case(self, settings: Mapping[str, Any]) -> Case | None:
        """The case with these settings; None if there is none that the backend accepts. A feature maps to True."""
        return self._case(settings)

    def cases(self, size: Size = "pairs") -> list[Case]:
        """Cases that together cover every group of settings that the backend accepts.

        size: ``claims`` covers each value of each facet and each pair of features, ``pairs`` each pair of values.
        """
        uncovered = dict.fromkeys(self._groups(size))
        cases: dict[Case, None] = {}
        while uncovered:
            target = next(iter(uncovered))
            del uncovered[target]
            settings = self._filled(dict(target), uncovered)
            case = self._case({**self._base, **settings})
            if case is None and len(target) == 1:
                settings = self._filled(self._of_some_kind(dict(target)), uncovered)
                case = self._case({**self._base, **settings})
            if case is not None:
                cases[case] = None
                for group in (*combinations(settings.items(), 1), *combinations(settings.items(), 2)):
                    uncovered.pop(group, None)
        return list(cases)

    def _of_some_kind(self, target: dict[str, Any]) -> dict[str, Any]:
        """A target with the first dtype and attention type that make it acceptable; unchanged if none does."""
        kinds = product(self.dimensions["dtype"], self.dimensions["attn_type"])
        wider = ({"dtype": d, "attn_type": t, **target} for d, t in kinds)
        return next((one for one in wider if self._case({**self._base, **one}) is not None), target)

    def _groups(self, size: Size) -> Iterator[tuple[Setting, ...]]:
        """The groups of settings to cover: values and pairs of values, in the order of the dimensions."""
        dimensions = self.dimensions
        for name, values in dimensions.items():
            yield from (((name, value),) for value in values)
        for (a, left), (b, right) in combinations(dimensions.items(), 2):
            features = a in PROVABLE and b in PROVABLE
            for x, y in product(left, right):
                if size == "pairs" or (features and x and y):
                    yield (a, x), (b, y)

    def _filled(self, target: dict[str, Any], uncovered: Mapping[tuple[Setting, ...], None]) -> dict[str, Any]:
        """A target, completed for each other facet with the accepted value that covers the most groups."""
        settings = {**self._base, **target}
        chosen = dict(target)
        for name, values in self.dimensions.items():
            if name in chosen:
                continue

            def gain(value: Any, name: str = name) -> int:
                # groups are in the order of the dimensions
                pairs = (((n, v), (name, value)) for n, v in chosen.items())
                return (((name, value),) in uncovered) + sum(p in uncovered or p[::-1] in uncovered for p in pairs)

            for value in sorted(values, key=gain, reverse=True):
                if self._case({**settings, name: value}) is not None:
                    chosen[name] = settings[name] = value
                    break
        return {name: chosen[name] for name in self.dimensions if name in chosen}
