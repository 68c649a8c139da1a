"""Random layers and batches under the conditions of an engine, each against the float64 reference.

A case is drawn from a seed: a request that a row accepts, the numbers and places of its tensors, and some steps with
other lengths. What can be asked for comes from the row's claims, as in `attnreg verify`: a new claim is tried without
a change here. Every choice has a name; a choice that is named as plain takes its plain value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from attnreg.conformance.claims import LARGEST, PROVABLE, Claims
from attnreg.conformance.proof import compare, examine
from attnreg.conformance.trial import Case, Draw, Trial, fill, make_layer, poison
from attnreg.loader import default_registry
from attnreg.machine.detect import detect_all
from attnreg.platforms import Platform
from attnreg.runtime.interface import BatchMetadata, KVCache
from attnreg.runtime.layer import Attention
from support.layers.placing import Memory, Place, halved, spread
from support.layers.replaying import Replayed, bits

# entries of block tables past a request's last block
NOWHERE = (2**30, -1, 2**31 - 1, -(2**31))
# on a processor, those whose kernels Triton's interpreter runs
INTERPRETED = ("TRITON_ATTN", "ROCM_ATTN", "TURBOQUANT")
# platforms whose rows are tried where this machine has none
ELSEWHERE = (("cuda", "sm89"), ("rocm", "gfx942"), ("cpu", "x86_64"))
Call = Callable[[Trial, Any, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Scale:
    """The sizes of what is drawn. steps: batches of a case."""

    steps: int
    requests: int
    keys: int
    queries: int
    rows: int
    heads: int
    head_size: int
    elements: int

    def fits(self, name: str, value: Any) -> bool:
        """Whether a value of a facet is small enough."""
        limits = {"head_size": self.head_size, "head_size_v": self.head_size, "block_size": 2 * self.head_size}
        if name == "heads":
            return bool(value[0] <= self.heads)
        return value is None or name not in limits or value <= limits[name]


GPU = Scale(steps=16, requests=40, keys=6000, queries=700, rows=2500, heads=128, head_size=512, elements=2**26)
PROCESSOR = Scale(steps=2, requests=4, keys=50, queries=20, rows=30, heads=6, head_size=32, elements=2**16)


@dataclass
class Choices:
    """The choices of one case. plain: the names of those that take their plain value."""

    seed: str
    plain: frozenset[str] = frozenset()
    made: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)

    def __call__(self, name: str, value: Any, plain: Any) -> Any:
        """A value, or the plain one if that is asked for."""
        if name in self.plain:
            return plain
        if value != plain:
            self.made[name] = value
        return value

    def some(self, likely: float) -> bool:
        """True so often."""
        return self.random.random() < likely


@cache
def claims_of(backend: str, device: str) -> Claims:
    """The claims of a backend on this machine's GPU, or where it lacks them on one that has them."""
    registry = default_registry()
    platforms = detect_all(registry.vocabulary) if device == "cuda" else []
    known = [*platforms, *(Platform(platform=p, arch=a) for p, a in ELSEWHERE)]
    platform = next(p for p in known if p.platform in registry.backends[backend].platforms)
    return Claims(backend, platform, registry)


class Numbers(Draw):
    """The random numbers of a case, made on the device, as large as the case says."""

    def __init__(self, seed: str, device: torch.device, size: float = 1.0) -> None:
        super().__init__(seed, device)
        self.size = size
        self.there = torch.Generator(device).manual_seed(self.generator.initial_seed())

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return (self.size * torch.randn(*shape, generator=self.there, device=self.device)).to(dtype)


def draw_case(choices: Choices, claims: Claims, scale: Scale, *, interpreted: bool) -> Case:
    """A request that the backend accepts, and how its cache is stored."""
    settings: dict[str, Any] = dict(claims._base)
    dimensions = {name: values for name, values in claims.dimensions.items() if name != "lengths"}
    random = choices.random
    heads = random.choice((1, 2, 3, 4, 5, 8)), random.choice((1, 2, 3, 4, 6, 7, 8, 12, 16))
    more = {
        "heads": [(heads[0] * heads[1], heads[0])],
        "block_size": [random.randrange(1, 40) * 16, random.choice((2, 4, 12, 24))],
        "head_size": [8 * random.randrange(1, LARGEST // 8 + 1)],
        "head_size_v": [8 * random.randrange(1, LARGEST // 8 + 1)],
    }
    # plain values that are small enough come first
    for name, usual in (("heads", (2, 1)), ("head_size", 32), ("block_size", 16)):
        if not scale.fits(name, settings[name]) and claims._case({**settings, name: usual}) is not None:
            settings[name] = usual
    names = list(dimensions)
    random.shuffle(names)
    for name in names:
        options = [v for v in (*dimensions[name], *more.get(name, [])) if scale.fits(name, v)]
        if interpreted:
            options = [v for v in options if v != "bfloat16"]
        value = random.random() < 0.25 if name in PROVABLE else random.choice(options)
        value = choices(name, value, settings.get(name, False if name in PROVABLE else None))
        if value is not None and claims._case({**settings, name: value}) is not None:
            settings[name] = value
    case = claims._case(settings)
    assert case is not None
    return case


def draw_layer(choices: Choices, case: Case, claims: Claims, draw: Draw, scale: Scale) -> Attention:
    """The layer of a case, with any numbers and strides."""
    layer, random = make_layer(case, claims.select(case.request), draw.device, draw=draw), choices.random
    spec = replace(
        layer.spec, softmax_scale=choices("softmax_scale", random.choice((0.05, 0.3)), layer.spec.softmax_scale)
    )
    numbers = {
        "sliding_window": random.choice((3, 64, 100, 700, 10**6)),
        "asymmetric_window": random.choice(((0, 0), (64, 64), (700, 0), (100, -1), (-1, 30), (10**6, 3))),
        "chunk": random.choice((3, 64, 100, 2048)),
        "softcap": random.choice((0.7, 5.0, 50.0)),
    }
    for name, value in numbers.items():
        if getattr(spec, name) is not None:
            spec = replace(spec, **{name: choices(name, value, getattr(spec, name))})
    params = layer.params
    for name in ("sinks", "alibi_slopes", "k_scale", "v_scale"):
        tensor = getattr(params, name)
        if tensor is not None and choices(f"{name} spread", choices.some(0.5), False):
            params = replace(params, **{name: spread(tensor, random)})
    return Attention(layer.selection, spec, params)


def draw_lengths(
    random: Random, attn_type: str, block: int, scale: Scale, elements: int, most: int
) -> list[tuple[int, int]]:
    """Queries and keys of each request. elements: of a key and a value; most: queries of a request."""
    pattern = random.choice(("decode", "decode", "draft", "mixed", "mixed", "prompts", "chunks", "short"))
    same = random.randrange(1, min(17, most) + 1)
    lengths = []
    rows, keys = scale.rows, scale.elements // elements
    for _ in range(1 + int(scale.requests * random.random() ** 2)):
        edge = random.choice((block, 16, 32, 64, 128, 256)) * random.randrange(1, 9) + random.choice((-1, 0, 1))
        k = random.choice((edge, int(scale.keys ** random.random()), random.randrange(scale.keys)))
        q = {"decode": 1, "draft": same, "short": random.randrange(0, 17)}.get(pattern)
        if q is None:
            q = random.choice((0, 1, 1, random.randrange(2, 33), int(scale.queries ** random.random())))
        if pattern == "prompts":
            k = q = random.choice((q, min(k, scale.queries)))
        q = min(q, most, rows)
        if attn_type in ("encoder", "encoder_only"):
            k = q
        elif attn_type == "decoder":
            # a query without a key is the padding of a graph
            k = 0 if q == 1 and random.random() < 0.05 else max(k, q)
        k = min(k, keys) if attn_type == "encoder_decoder" else min(k, max(keys, q))
        rows, keys = rows - q, max(keys - k, 0)
        lengths.append((q, k))
    return lengths


def share_pages(random: Random, trial: Trial, lengths: list[tuple[int, int]]) -> None:
    """Lets some requests have the first blocks of others, as a prefix cache does."""
    table, block = trial.batch.block_table, trial.layer.spec.block_size
    assert table is not None
    assert block is not None
    for j in range(1, len(lengths)):
        i = random.randrange(j)
        whole = min(max(k - q, 0) // block for q, k in (lengths[i], lengths[j]))
        shared = random.randrange(whole + 1)
        if shared:
            table[j, :shared] = table[i, :shared]
            trial.tokens[j] = tuple(
                torch.cat([mine[: shared * block], own[shared * block :]])
                for mine, own in zip(trial.tokens[i], trial.tokens[j], strict=True)
            )


@dataclass
class Stage:
    """One case with its layers, whose steps are run by `step`."""

    choices: Choices
    case: Case
    layer: Attention
    other: Attention
    causal: bool
    scale: Scale
    device: torch.device
    places: dict[str, Place]
    replayed: Replayed | None = None

    @property
    def by_request(self) -> bool:
        """Whether the requests of a batch may differ in causality."""
        return "causal_by_request" in self.layer.spec.features

    @property
    def blocks(self) -> int:
        """The blocks of the largest cache."""
        spec = self.layer.spec
        elements = spec.num_kv_heads * (spec.head_size + spec.head_size_v)
        tokens = self.scale.elements // elements + self.scale.rows
        return tokens // (spec.block_size or 1) + self.scale.requests + 9

    def placed(self, memory: Memory, name: str, tensor: Tensor) -> Tensor:
        """A tensor at the place of its name."""
        if name not in self.places:
            # packed keys are as many as there are elements for
            spec = self.layer.spec
            keys = self.scale.elements // (spec.num_kv_heads * (spec.head_size + spec.head_size_v))
            rows = self.scale.rows + 8 + (keys if name in ("key", "value") else 0)
            room = (max(tensor.shape[0], rows), *tensor.shape[1:])
            room = (max(tensor.shape[0], self.blocks), *room[1:]) if name.startswith("cache") else room
            shuffle = not name.startswith(("table", "ranges"))
            place = Place.draw(self.choices.random, room, shuffle=shuffle)
            if name.startswith("cache") and spec.packed is not None:
                # pages of codes begin at words
                place = place.by(4)
            plain = Place(tuple(range(tensor.ndim - 1)), (0,) * (tensor.ndim - 1), 0, room)
            self.places[name] = self.choices(f"{name} placed", place, plain)
        place = self.places[name]
        # tables are as wide as their longest request; a fixed room would be too narrow
        if name in ("table", "ranges"):
            place = replace(place, room=tuple(tensor.shape))
        return memory.place(name, tensor, place)

    def trial(self, draw: Draw, lengths: list[tuple[int, int]], memory: Memory) -> Trial:
        """The trial of one batch, its tensors placed."""
        random = self.choices.random
        causal: bool | list[bool] = self.causal
        if self.by_request and self.choices("causal by request", self.choices.some(0.6), False):
            causal = [random.random() < 0.5 for _ in lengths]
        made = fill(self.layer, lengths, draw, storage=self.case.storage, causal=causal, unused_block=2**30)
        batch = made.batch
        if batch.block_table is not None:
            table = batch.block_table
            unused = torch.tensor(random.choices(NOWHERE, k=table.numel()), dtype=torch.int32, device=table.device)
            table.copy_(torch.where(table == 2**30, unused.view(table.shape), table))
            if self.choices("shared pages", self.choices.some(0.3), False):
                share_pages(random, made, lengths)
            batch = replace(batch, block_table=self.placed(memory, "table", table))
        if batch.mm_prefix is not None:
            batch = replace(batch, mm_prefix=self.placed(memory, "ranges", batch.mm_prefix))
        query, key, value = (
            self.placed(memory, n, x) for n, x in (("query", made.query), ("key", made.key), ("value", made.value))
        )
        cache = made.cache
        if cache is not None and self.case.storage != "fused":
            cache = KVCache(
                self.placed(memory, "cache key", cache.key), self.placed(memory, "cache value", cache.value)
            )
        return replace(made, batch=batch, query=query, key=key, value=value, cache=cache)

    def bounded(self, batch: BatchMetadata) -> BatchMetadata:
        """A batch of which the host knows bounds alone."""
        random, block = self.choices.random, self.layer.spec.block_size
        more = torch.tensor([random.choice((0, 1, 37, 900)) for _ in range(batch.num_reqs)], dtype=torch.int32)
        known = batch.seq_lens_cpu + more
        most = int(max(known.tolist(), default=0)) + random.choice((0, 5000))
        if batch.block_table is not None and block is not None:
            limit = batch.block_table.shape[1] * block
            known, most = known.clamp(max=limit), min(most, limit)
        longest = batch.max_query_len + random.choice((0, 3, 40))
        # a tree is as wide as its longest request
        longest = longest if batch.tree_mask is None else min(longest, batch.tree_mask.shape[1])
        return replace(batch, seq_lens_cpu=known, max_seq_len=most, max_query_len=longest)

    def attend(self, memory: Memory, trial: Trial, batch: Any, query: Tensor) -> tuple[Tensor, Tensor]:
        """Output and LSE of a call, over poison, in guarded memory."""
        spec = trial.layer.spec
        sizes = query.shape[0], spec.num_heads, spec.head_size_v
        output = self.placed(memory, "output", poison(*sizes, dtype=spec.output_dtype, device=query.device))
        lse = torch.full((spec.num_heads, query.shape[0]), torch.nan, device=query.device)
        packed = {"key": trial.key, "value": trial.value} if trial.cache is None else {}
        trial.layer.attend(query, trial.cache, batch, output, lse=lse if "lse" in spec.features else None, **packed)
        return output, lse

    def calls(self, memory: Memory) -> dict[str, Call]:
        """The ways in which a batch may be computed, by name; only those that this layer and device have."""

        def plain(trial: Trial, batch: Any, query: Tensor) -> tuple[Tensor, Tensor]:
            return self.attend(memory, trial, batch, query)

        def changed(trial: Trial, batch: Any, query: Tensor) -> tuple[Tensor, Tensor]:
            # the batch's lengths are others at first
            lens, host = batch.seq_lens.clone(), batch.seq_lens_cpu.clone()
            now = replace(batch, seq_lens=lens, seq_lens_cpu=host)
            fewer = torch.minimum(batch.query_start_loc_cpu.diff(), host)
            lens.copy_(fewer), host.copy_(fewer)
            plain(trial, now, query)
            lens.copy_(batch.seq_lens), host.copy_(batch.seq_lens_cpu)
            return plain(trial, now, query)

        def captured(trial: Trial, batch: Any, query: Tensor) -> tuple[Tensor, Tensor]:
            # the launches that a graph would hold, without one: for any lengths
            with patch("attnreg.kernels.triton.planned.batches.is_captured", lambda query: True):
                return plain(trial, batch, query)

        def layers(trial: Trial, batch: Any, query: Tensor) -> tuple[Tensor, Tensor]:
            # another layer of the same spec shares the plan; its result is verified too
            beside = replace(trial, layer=self.other)
            found = plain(beside, batch, query)
            output, lse = plain(trial, batch, query)
            problem = compare(beside, *found).problem
            assert problem is None, f"the other layer: {problem}"
            return output, lse

        def streams(trial: Trial, batch: Any, query: Tensor) -> tuple[Tensor, Tensor]:
            # the same numbers for other heads
            flipped = replace(trial, query=self.placed(memory, "query", bits(query).flip(1).view(query.dtype)))
            sides = torch.cuda.Stream(), torch.cuda.Stream()
            trial.layer.plan(batch)
            torch.cuda.synchronize()
            results = []
            for side, one in zip(sides * 3, (trial, flipped) * 3, strict=True):
                with torch.cuda.stream(side):
                    results.append(plain(one, batch, one.query))
            torch.cuda.synchronize()
            for one, found in zip((trial, flipped) * 2, results, strict=False):
                problem = compare(one, *found).problem
                assert problem is None, f"on two streams: {problem}"
            return results[-2]

        def graph(trial: Trial, batch: Any, query: Tensor) -> tuple[Tensor, Tensor]:
            assert self.replayed is not None
            return self.replayed(trial, batch, query)

        decoder, paged = self.layer.spec.attn_type == "decoder", self.case.storage != "packed"
        known: dict[str, Call] = {"call": plain, "layers": layers, "captured": captured}
        if paged:
            known |= {"bounds": plain}
            known |= {"changed": changed} if decoder else {}
        if self.device.type == "cuda":
            known |= {"streams": streams}
            known |= {"graph": graph} if self.replayed is not None else {}
        return known

    def alike(self, name: str, call: Call, memory: Memory, exact: BatchMetadata) -> Call:
        """A call whose bits must be those of a plain call of the batch with its exact lengths."""

        def alike(trial: Trial, batch: Any, query: Tensor) -> tuple[Tensor, Tensor]:
            found = call(trial, batch, query)
            if name == "graph" and self.replayed is not None:
                # bits are those of tensors with the same strides, and a replay's are its own
                plain = self.replayed.plainly(exact, len(query))
            else:
                plain, _ = self.attend(memory, trial, exact, query)
            rows = batch.num_tokens
            assert torch.equal(bits(found[0][:rows]), bits(plain[:rows])), "other bits than those of a plain call"
            return found

        return alike

    def step(self, number: int) -> str | None:
        """The problem of one batch, None where there is none."""
        choices, spec, memory = self.choices, self.layer.spec, Memory()
        elements = spec.num_kv_heads * (spec.head_size + spec.head_size_v)
        most = self.scale.queries if self.replayed is None else self.replayed.max_query_len
        lengths = draw_lengths(choices.random, spec.attn_type, spec.block_size or 16, self.scale, elements, most)
        kept = choices(f"step {number}", choices.random.sample(range(len(lengths)), len(lengths)), [])
        size = choices("large queries", choices.random.choice((1.0, 1.0, 1.0, 8.0)), 1.0)
        draw = Numbers(f"{choices.seed} {number}", self.device, size)
        trial = self.trial(draw, [lengths[i] for i in kept], memory)
        calls = self.calls(memory)
        name = choices(f"call {number}", choices.random.choice(sorted(calls)), "call")
        call, exact = calls[name], trial.batch
        if "batch_invariant" in spec.features and getattr(self.layer.module, "CAPTURABLE", False):
            call = self.alike(name, call, memory, exact)
        if name == "bounds":
            trial = replace(trial, batch=self.bounded(exact))
        if self.replayed is not None and name == "graph":
            self.replayed.before(trial)
        try:
            problem = examine(trial, call).problem
        # whatever it raises, a call of a request that was accepted has a problem
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        problem = problem or next(memory.problems(), None)
        return None if problem is None else f"step {number}, by {name}, {[lengths[i] for i in kept]}: {problem}"


def stage(choices: Choices, backend: str, device: str, scale: Scale) -> Stage:
    """The case of some choices, ready to run."""
    claims = claims_of(backend, device)
    case = draw_case(choices, claims, scale, interpreted=device == "cpu" and backend in INTERPRETED)
    where, random = torch.device(device), choices.random
    layer = draw_layer(choices, case, claims, Numbers(choices.seed, where), scale)
    halves = {name: halved(x) for name in ("sinks", "alibi_slopes") if (x := getattr(layer.params, name)) is not None}
    own = replace(layer.params, **halves)
    decoder = layer.spec.attn_type == "decoder"
    both = decoder and "non_causal" in layer.spec.features
    causal = decoder and not (both and choices("not causal", choices.some(0.5), False))
    made = Stage(choices, case, layer, Attention(layer.selection, layer.spec, own), causal, scale, where, {})
    captures = getattr(layer.module, "CAPTURABLE", False) and device == "cuda" and decoder and case.storage != "packed"
    if captures and choices("graph", choices.some(0.4), False):
        made.replayed = Replayed(
            layer,
            random,
            causal=causal,
            requests=scale.requests + 1,
            rows=scale.rows + 8,
            max_keys=2 * scale.keys,
            blocks=made.blocks,
        )
    return made


def problems(
    seed: str, backend: str, device: str, scale: Scale, plain: frozenset[str] = frozenset()
) -> Iterator[str | None]:
    """The problem of each step of a case, or None."""
    made = stage(Choices(seed, plain), backend, device, scale)
    for number in range(scale.steps):
        yield made.step(number)
