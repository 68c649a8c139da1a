"""Every tensor of every public call of MLA, in every odd form: right numbers, or a typed error before a write."""

from __future__ import annotations

import re

import pytest
import torch
from support.layers import walk, walk_mla

from attnreg import Registry

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="where there is a GPU, Triton compiles, and the CPU's memory is refused"
    ),
]
KINDS = [
    (rows, kind, quantised)
    for rows in walk_mla.ROWS
    for kind in walk_mla.CALLS
    for quantised in (False, True)
    # the indexer has one form, of no cache of latents
    if kind != "indexer" or (rows, quantised) == ("torch", False)
]
# in Triton's interpreter those calls that reach its kernels without another's validation before
WALKS = [one for one in KINDS if one[0] == "torch" or one[1] in ("attend", "sparse", "write")]
REFUSAL = re.compile(
    r"[\w.]+( of request \d+|\[\d+(, \d+)?\])? (is|has|have|names|writes) .*[;,:(] ?.+"
    r"|the (batch|request|tensors of a call) (has|asks|are) .*[:;] .+"
)
# the dispatcher's own refusals of what is no tensor, and its fallback for negated views
OF_PYTORCH = ("a list", "a word", "a negated view")


@pytest.mark.parametrize(("rows", "kind", "quantised"), KINDS)
def test_the_call_itself_is_right(default: Registry, rows: str, kind: str, quantised: bool) -> None:
    made = walk_mla.call(rows, kind, default, walk_mla.tensors(kind, quantised=quantised), quantised=quantised)
    assert made.refusal is None
    assert close(made)


@pytest.mark.parametrize(("rows", "kind", "quantised"), WALKS)
def test_odd_tensors_are_read_right_or_refused(default: Registry, rows: str, kind: str, quantised: bool) -> None:
    tensors = walk_mla.tensors(kind, quantised=quantised)
    for name in [n for n in tensors if not quantised or n in ("kv_cache", "kv_scale")]:
        served = 0
        for oddity, odd in walk.oddities(tensors[name]):
            if kind == "op" and oddity in OF_PYTORCH:
                continue
            given = walk_mla.tensors(kind, quantised=quantised) | {name: odd}
            made = walk_mla.call(rows, kind, default, given, quantised=quantised)
            if made.refusal is not None:
                assert not made.written, f"{name} {oddity}: {made.refusal}, after something was written"
                said = str(made.refusal)
                assert any(word in said for word in words_of(kind, name)), (name, oddity, said)
                assert all(REFUSAL.fullmatch(line) for line in said.splitlines()), (oddity, said)
                continue
            assert close(made), f"{name} {oddity} is read wrongly"
            served += 1
        # memory that begins anywhere is served
        assert served >= 2, name


def words_of(kind: str, name: str) -> tuple[str, ...]:
    """One of these is in the refusal of a tensor of this name."""
    if name in walk.LENGTHS:
        return ("",)
    if kind == "indexer":
        # sizes of one are compared with those of another
        return (name, "query", "weights", "keys", "block_table")
    if kind == "write":
        name = {"latent": "key", "rope": "value"}.get(name, name)
    return {"kv_cache": ("cache",), "kv_scale": ("scale",)}.get(name, (name,)) + ("several devices",) * (kind == "op")


def close(made: walk.Made) -> bool:
    """Whether the numbers are right, within the rounding of float16."""
    assert made.output is not None
    assert made.exact is not None
    n = len(made.exact)
    return torch.allclose(made.output[:n].double(), made.exact, atol=4e-3, rtol=4e-3)
