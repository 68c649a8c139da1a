"""What the tests of the AITER rows share: a fake aiter, and kernel modules that are imported anew."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

import pytest
from support.stand_ins import fake_aiter

from attnreg import Platform, Registry
from attnreg.kernels import upstream
from attnreg.kernels.aiter import record
from attnreg.kernels.triton import cache
from attnreg.runtime import arguments

_KEPT = (record.__name__, upstream.__name__)
_ADAPTERS = ("attnreg.kernels.aiter.", "attnreg.kernels.rocm_aiter_")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The adapters have not been imported, and whatever a test imports of them is forgotten."""
    _forget()
    monkeypatch.setattr(cache, "_write", fake_aiter.write)
    # a fake package stands for the GPU too
    monkeypatch.setattr(arguments, "validate_device", lambda platform: None)
    yield
    _forget()


@pytest.fixture
def fake(fresh: None, monkeypatch: pytest.MonkeyPatch) -> fake_aiter.Fake:
    """The fake package, installed."""
    made = fake_aiter.Fake()
    made.install(monkeypatch)
    return made


@pytest.fixture
def registry(default: Registry) -> Registry:
    """The default registry, with a memory of its own: what loads here differs from test to test."""
    return dataclasses.replace(default)


@pytest.fixture
def mi350() -> Platform:
    return Platform(platform="rocm", arch="gfx950", flags=frozenset({"aiter", "aiter_mha", "aiter_mla"}))


def _forget() -> None:
    for name in [m for m in sys.modules if m.startswith(_ADAPTERS) and m not in _KEPT]:
        del sys.modules[name]
        package, _, short = name.rpartition(".")
        if hasattr(sys.modules[package], short):
            delattr(sys.modules[package], short)
