"""Which installed versions the log says not to be proven, once in a process."""

from __future__ import annotations

import logging

import pytest

import attnreg
from attnreg import Attention, AttentionRequest, Platform
from attnreg.packages import proven


@pytest.mark.parametrize(("torch", "said"), [("2.1.0", False), ("99.0", True), ("", False)])
def test_the_log_says_it_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, torch: str, said: bool
) -> None:
    monkeypatch.setattr(proven, "_logged", set())
    platform = Platform(platform="cpu", arch="x86_64_avx512", packages={"torch": torch})  # type: ignore[arg-type]
    request = AttentionRequest(head_size=64, num_heads=2, num_kv_heads=2, dtype="float32")
    selection = attnreg.select(request, platform)
    with caplog.at_level(logging.INFO, logger="attnreg.runtime"):
        for _ in range(2):
            Attention.from_selection(selection)
    texts = [record.message for record in caplog.records if "proven" in record.message]
    assert len(texts) == said
    assert all(text.startswith(f"{selection.title}: not proven with torch 99.0; newest proven 2.") for text in texts)
