"""FlashInfer as a test installs it: a stand-in with the recorded signatures, and adapters that are imported anew."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from support.stand_ins import fake_aiter
from support.stand_ins.fake_flashinfer import MODULES, Fake

from attnreg.kernels.triton import cache


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    fake = Fake()
    fake.install(monkeypatch)
    monkeypatch.setattr(cache, "_write", fake_aiter.write)
    yield fake
    for module in MODULES:
        sys.modules.pop(module, None)
