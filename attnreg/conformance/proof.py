"""Proof of a case: the output is within its bounds, and no other memory is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnreg.conformance import prompts
from attnreg.conformance.bounds import ROUNDOFF, bounds
from attnreg.conformance.prompts import CachedPrompts
from attnreg.conformance.trial import UNUSED, Case, Trial, poison, prepare
from attnreg.kernels import reference
from attnreg.runtime import latents
from attnreg.runtime.interface import BatchMetadata, KVCache
from attnreg.runtime.turboquant import codec
from attnreg.runtime.turboquant.cache_bytes import packed_blocks

if TYPE_CHECKING:
    from attnreg.language.packed import Packed
    from attnreg.selection.trace import Selection


Call = Callable[[Trial, BatchMetadata, Tensor], tuple[Tensor, Tensor]]


class CaseOutcome(NamedTuple):
    """The result of a case: the worst absolute error of an output, the worst error / bound, and the problem or None."""

    error: float
    share: float
    problem: str | None = None


def prove(case: Case, selection: Selection, device: torch.device | str = "cpu") -> CaseOutcome:
    """Runs a case, and verifies its numbers and all memory that it could write to.

    A decoder layer that may be non-causal runs both ways, because causality belongs to the batch. A layer with
    causality by request runs with requests of both kinds.
    """
    features = case.request.features
    kinds: list[bool | None] = [case.request.attn_type == "decoder"]
    kinds += [False] if "non_causal" in features else []
    kinds += [None] if "causal_by_request" in features else []
    made = prompts.prepare if case.storage == "latents" else prepare
    outcomes = [examine(made(case, selection, torch.device(device), causal=kind)) for kind in kinds]
    return CaseOutcome(
        max(o.error for o in outcomes),
        max(o.share for o in outcomes),
        next((o.problem for o in outcomes if o.problem), None),
    )


def examine(trial: Trial, call: Call | None = None) -> CaseOutcome:
    """Writes the new keys and values, attends, and verifies the numbers and that no other memory was written.

    call: the function that attends, with the arguments of `attend`, which is the default.
    """
    layer, batch, spec = trial.layer, trial.batch, trial.layer.spec
    if trial.cache is not None and spec.attn_type != "encoder_decoder":
        layer.write_kv(trial.key, trial.value, trial.cache, batch)
    inputs = [trial.query, trial.key, trial.value, *(trial.cache or ())]
    inputs += [] if trial.indices is None else [trial.indices]
    inputs += [layer.latents] if isinstance(layer, CachedPrompts) else []
    before = [x.clone() for x in inputs]
    output, lse = (call or attend)(trial, batch, trial.query)
    problems = [*_cache_problems(trial)]
    if not all(_same_bits(a, b) for a, b in zip(inputs, before, strict=True)):
        problems.append("an input was written to")
    error, share, wrong = compare(trial, output, lse)
    problems += [wrong] if wrong else []
    if call is not None:
        # the comparisons of bits below need the output of `attend` itself
        output, lse = attend(trial, batch, trial.query)
    if "batch_invariant" in spec.features:
        problems += _invariance_problems(trial, output, lse)
    if "kv_connector" in spec.features:
        problems += _moved_problems(trial, output)
    return CaseOutcome(error, share, problems[0] if problems else None)


def compare(trial: Trial, output: Tensor, lse: Tensor) -> CaseOutcome:
    """Compares the output and LSE of a call with the reference; the padding must still have its poison."""
    spec, batch = trial.layer.spec, trial.batch
    (output, padding), (lse, lse_padding) = ((x[: batch.num_tokens], x[batch.num_tokens :]) for x in (output, lse.mT))
    problems = []
    if not (padding.float().isnan().all() and lse_padding.isnan().all()):
        problems.append("padding of the output was written to")
    key, value = (trial.key, trial.value) if trial.cache is None else (None, None)
    exact = reference.attention(
        spec, batch, trial.query, trial.cache, key=key, value=value, params=trial.layer.params, indices=trial.indices
    )
    largest = max((float(v.abs().max()) for _, v in trial.tokens if v.numel()), default=0.0)
    out_scale = trial.layer.params.out_scale
    unit = 1.0 if out_scale is None else float(out_scale)
    allowed, allowed_lse = bounds(spec, batch, exact, largest, unit, trial.merges)
    compared = [("output", output, exact.output, allowed)]
    if "lse" in spec.features:
        compared.append(("lse", lse.mT, exact.lse, allowed_lse))
    error, share = 0.0, 0.0
    for name, computed, expected, bound in compared:
        result = computed.double()
        result = result * unit if name == "output" else result
        # the difference of equal infinities is NaN
        errors = (result - expected).masked_fill(result == expected, 0.0).abs()
        if not errors.numel():
            continue
        shares = (errors / bound).nan_to_num(nan=torch.inf)
        worst = float(shares.max())
        share, error = max(share, worst), max(error, float(errors.max()) if name == "output" else 0.0)
        if worst > 1:
            at = tuple(int(i) for i in torch.unravel_index(shares.argmax(), shares.shape))
            numbers = f"is {float(result[at]):.6g}, exactly {float(expected[at]):.6g}"
            problems.append(f"{name}{list(at)} {numbers}; {worst:.3g} times what rounding explains")
    return CaseOutcome(error, share, problems[0] if problems else None)


def attend(trial: Trial, batch: BatchMetadata, query: Tensor, cache: KVCache | None = None) -> tuple[Tensor, Tensor]:
    """The output and LSE that a call wrote over poison; the LSE stays poison if the layer does not return it."""
    spec = trial.layer.spec
    sizes = query.shape[0], spec.num_heads, spec.head_size_v
    output = poison(*sizes, dtype=spec.output_dtype, device=query.device)
    lse = torch.full((spec.num_heads, query.shape[0]), torch.nan, dtype=torch.float32, device=query.device)
    key, value = (trial.key, trial.value) if trial.cache is None else (None, None)
    trial.layer.attend(
        query,
        cache or trial.cache,
        batch,
        output,
        key=key,
        value=value,
        lse=lse if "lse" in spec.features else None,
        indices=trial.indices,
    )
    return output, lse


def _cache_problems(trial: Trial) -> Iterator[str]:
    """Problems of the cache: a used slot must have its key and value, rounded once; any other slot its poison."""
    cache, batch, spec = trial.cache, trial.batch, trial.layer.spec
    if cache is None:
        return
    if spec.packed is not None:
        yield from _page_problems(trial, spec.packed, cache)
        return
    params = trial.layer.params
    for i, tokens in enumerate(trial.tokens):
        stored = reference.request_kv(spec, batch, i, cache, None, None, params)
        for name, original, cached, scale in zip(
            ("key", "value"), tokens, stored, (params.k_scale, params.v_scale), strict=True
        ):
            unit = original.new_ones(1, 1).double() if scale is None else scale.double()[:, None]
            expected = original.double() / unit
            if spec.kv_dtype == "fp8_ds_mla":
                allowed = _rounding_of_tiles(expected)
            else:
                kind = torch.finfo(spec.cache_dtype)
                u = 0.0 if spec.cache_dtype == spec.dtype else ROUNDOFF[spec.cache_dtype]
                expected = expected.clamp(-kind.max, kind.max)
                # a division in float32 comes before the rounding
                allowed = u * expected.abs() * (1 + 2**-20) + (kind.smallest_normal * u if u else 0)
            if not ((cached.transpose(0, 1) / unit - expected).abs() <= allowed).all():
                yield f"the {name}s of request {i} are not stored as they were given"
    in_use = sum(k.numel() for k, _ in trial.tokens)
    used = cache.key.float().isfinite()
    if spec.kv_dtype == "fp8_ds_mla":
        used, in_use = (cache.key != UNUSED).any(-1), sum(len(k) for k, _ in trial.tokens)
    if int(used.sum()) != in_use:
        yield "slots of the cache were written that no row belongs to"


def _page_problems(trial: Trial, packed: Packed, cache: KVCache) -> Iterator[str]:
    """Problems of a packed cache: a used row must be as near to its key or value as the reference's codes are."""
    spec, batch = trial.layer.spec, trial.batch
    # a packed cache is read through a block table
    assert spec.block_size is not None
    assert batch.block_table is not None
    pages = packed_blocks(packed, spec.head_size, spec.head_size_v, spec.block_size)
    in_use = sum(k.shape[0] * k.shape[1] for k, _ in trial.tokens)
    for name, page, stored, originals in zip(
        ("key", "value"), pages, cache, zip(*trial.tokens, strict=True), strict=True
    ):
        rows = page.rows(stored)  # [blocks, heads, block_size, bytes]
        for i, original in enumerate(originals):
            blocks = batch.block_table[i, : -(-len(original) // spec.block_size)].long()
            # [keys, heads, bytes]
            found = codec.decode(page, rows[blocks].transpose(1, 2).flatten(0, 1)[: len(original)])
            best = codec.decode(page, codec.encode(page, original))
            exact = codec.rotated(original, best.shape[-1]) if page.side.code == "levels" else original.double()
            # a scale is rounded to float16
            size = exact.abs().amax(-1) + 2**-20
            errors, least = ((x - exact).square().sum(-1) for x in (found, best))
            allowed = least * 1.01 + (2**-9 * size).square() * exact.shape[-1]
            if page.side.code == "levels":
                allowed += codec.undecided(page.side, original)
            if not (errors <= allowed).all():
                yield f"the {name}s of request {i} are not stored as they were given"
        if int((rows != UNUSED).any(-1).sum()) != in_use:
            yield f"slots of the cache of {name}s were written that no row belongs to"


def _rounding_of_tiles(expected: Tensor) -> Tensor:
    """The largest errors of numbers [..., 512 or 576] that are stored as fp8_ds_mla; its rotary part is exact."""
    tiles = expected[..., : latents.RANK].unflatten(-1, (latents.RANK // latents.TILE, latents.TILE)).abs()  # type: ignore[no-untyped-call]
    scales = tiles.amax(-1, keepdim=True) / latents.LARGEST
    u, smallest = ROUNDOFF[torch.float8_e4m3fn], torch.finfo(torch.float8_e4m3fn).smallest_normal
    allowed = (u * tiles + u * smallest * scales) * (1 + 2**-20) + torch.finfo(torch.float32).tiny
    return torch.cat([allowed.flatten(-2), torch.zeros_like(expected[..., latents.RANK :])], -1)


def _invariance_problems(trial: Trial, output: Tensor, lse: Tensor) -> Iterator[str]:
    """Problems of batch invariance: each request must get the same bits alone as in the batch."""
    batch = trial.batch
    starts, keys = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    for i, length in enumerate(keys):
        rows = slice(starts[i], starts[i + 1])
        if batch.block_table is None:
            first = sum(keys[:i])
            keys_of = slice(first, first + length)
            single = replace(trial, key=trial.key[keys_of], value=trial.value[keys_of])
        else:
            single = trial if trial.indices is None else replace(trial, indices=trial.indices[rows])
        alone = BatchMetadata.build(
            [rows.stop - rows.start],
            [length],
            device=trial.query.device,
            block_table=None if batch.block_table is None else batch.block_table[i : i + 1],
            causal=_causality(batch.causal, i, trial.layer.spec.features),
            mm_prefix=None if batch.mm_prefix is None else batch.mm_prefix[i : i + 1],
            tree_mask=None if batch.tree_mask is None else batch.tree_mask[rows],
        )
        # the length on the host may be an upper bound
        known = batch.seq_lens_cpu[i : i + 1]
        alone = replace(alone, seq_lens_cpu=known, max_seq_len=int(known))
        results = attend(single, alone, trial.query[rows])
        if not all(_same_bits(a, b) for a, b in zip(results, (output[rows], lse[:, rows]), strict=True)):
            yield f"request {i} alone gets other bits than in its batch"


def _causality(causal: bool | Tensor, request: int, features: Set[str]) -> bool | Tensor:
    """The causality of a request alone: a bool if the layer accepts one, else a tensor with one element."""
    if not isinstance(causal, Tensor):
        return causal
    alike = bool(causal[request])
    return alike if alike or "non_causal" in features else causal[request : request + 1]


def _moved_problems(trial: Trial, output: Tensor) -> Iterator[str]:
    """Problems after the blocks of the cache are moved: the output must be equal, because only blocks hold state."""
    if isinstance(trial.layer, CachedPrompts):
        other = replace(trial, layer=trial.layer.moved())
        yield from _other_problems(trial, output, *attend(other, trial.batch, trial.query))
        return
    if trial.cache is None:
        return
    assert trial.batch.block_table is not None
    count = trial.cache.key.shape[0]
    # block b moves to new_ids[b], copied as bytes
    new_ids = torch.arange(count).roll(1).to(trial.query.device)
    moved = KVCache(*(memory_like(x) for x in trial.cache))
    if trial.layer.spec.latent:
        moved = moved._replace(value=moved.key[..., : trial.layer.spec.head_size_v])
    for target, source in zip(moved, trial.cache, strict=True):
        target.view(torch.uint8)[new_ids] = source.view(torch.uint8)
    table = trial.batch.block_table
    # entries after a request's last block may have any value
    exists = (table >= 0) & (table < count)
    batch = replace(trial.batch, block_table=torch.where(exists, new_ids[table.where(exists, 0).long()].int(), table))
    yield from _other_problems(trial, output, *attend(trial, batch, trial.query, moved))


def _other_problems(trial: Trial, output: Tensor, moved: Tensor, lse: Tensor) -> Iterator[str]:
    """Problems of the output with the moved cache.

    The bits must be equal. For a module with ``REPEATABLE = False`` on a GPU it is enough that the output is right
    again.
    """
    if _same_bits(moved, output):
        return
    module = getattr(trial.layer, "module", None)
    if output.is_cpu or getattr(module, "REPEATABLE", True):
        yield "after its blocks were moved, the same cache gives other bits"
    elif wrong := compare(trial, moved, lse).problem:
        yield f"after its blocks were moved: {wrong}"


def memory_like(tensor: Tensor) -> Tensor:
    """Other memory with the strides and the alignment of a tensor; code for other strides may round differently."""
    words = torch.empty(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=tensor.dtype, device=tensor.device)
    return words.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
