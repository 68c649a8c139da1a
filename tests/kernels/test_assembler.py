"""Kernels for SM 9.0 are assembled by the ptxas for older GPUs, where Triton takes another and the user chose none."""

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from triton import knobs
from triton.backends.nvidia import compiler

from attnreg.kernels.triton.inside import assembler

CHOICE = "TRITON_PTXAS_BLACKWELL_PATH"


@pytest.fixture(autouse=True)
def another_ptxas(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Triton that takes another ptxas for SM 9.0, as 3.9 does."""
    monkeypatch.delenv(CHOICE, raising=False)
    monkeypatch.setattr(compiler, "get_ptxas", lambda arch: SimpleNamespace(path="ptxas-13"))
    assembler._instead.cache_clear()
    yield
    assembler._instead.cache_clear()


def taken(backend: str, arch: int | str) -> str | None:
    """The ptxas that Triton is told to take while a kernel is compiled for a GPU; what was told before is restored."""
    before = dict(os.environ), dict(knobs.nvidia.__dict__)
    with assembler.assembler_of(backend, arch), assembler.assembler_of(backend, arch):
        found = knobs.nvidia.__dict__.get("ptxas_blackwell")
    assert (dict(os.environ), dict(knobs.nvidia.__dict__)) == before
    return found


def test_the_older_one_is_taken_for_hopper_alone() -> None:
    assert taken("cuda", 90) == knobs.nvidia.ptxas.path
    assert taken("cuda", 100) is None
    assert taken("hip", "gfx942") is None


def test_a_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHOICE, "/opt/ptxas")
    assert taken("cuda", 90) is None


def test_where_triton_takes_it_anyway_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "get_ptxas", lambda arch: knobs.nvidia.ptxas)
    assert taken("cuda", 90) is None
