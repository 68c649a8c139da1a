"""An input that is dropped is found."""

from __future__ import annotations

import pytest

from attnreg.conformance.claims import Claims
from attnreg.conformance.refusals import refusals


def test_an_input_that_is_dropped_is_found(claims: Claims, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {problem for _, problem in refusals(claims)} == {None}
    assert {name for name, _ in refusals(claims)} >= {
        "sinks",
        "softcap",
        "alibi_slopes",
        "sliding_window",
        "lse",
        "mm_prefix",
        "non_causal",
        "dcp=True",
    }
    monkeypatch.setattr("attnreg.runtime.layer.refuse_unasked", lambda *_: None)
    found = dict(refusals(claims))
    assert found["lse"] == "lse reached the kernels of CPU_ATTN, which was not selected for it"
    assert found["mm_prefix"] is not None
    assert found["non_causal"] is not None
