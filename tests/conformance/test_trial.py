"""A case's lengths hold what breaks kernels."""

from __future__ import annotations

import pytest

from attnreg.conformance.trial import lengths_of


@pytest.mark.parametrize("attn_type", ["decoder", "encoder", "encoder_decoder"])
def test_lengths_hold_the_cases_that_break_kernels(attn_type: str) -> None:
    every = [pair for name in ("mixed", "decode", "prefill") for pair in lengths_of(name, 16, attn_type)]
    assert (0, 0) in every
    assert (1, 1) in every
    assert any(k % 16 == 1 and k > 1 for _, k in every)
    if attn_type == "decoder":
        assert any(q == 0 < k for q, k in every)
        assert any(1 < q < k for q, k in every)


@pytest.mark.parametrize("attn_type", ["decoder", "encoder", "encoder_decoder"])
def test_long_requests_are_several_steps_of_any_loop(attn_type: str) -> None:
    """The largest tile of any kernel has 128 queries or keys; the last one of a walk is not full."""
    lengths = lengths_of("long", 16, attn_type)
    assert any(q > 128 and q % 128 for q, _ in lengths)
    assert any(k > 256 and k % 128 for q, k in lengths if q)
    assert any(q == 1 for q, _ in lengths)
