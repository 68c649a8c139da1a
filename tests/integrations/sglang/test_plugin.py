"""The plug-in for SGLang: what switches it on, whose place it takes, and when it steps aside."""

from __future__ import annotations

import logging
import tomllib
from typing import Any

import pytest
from support import ROOT
from support.layers.sglang_world import Facts, World
from support.stand_ins.sglang_modules import Context

import attnreg
from attnreg.integrations.sglang import plugin, record
from attnreg.integrations.sglang.plugin import register
from attnreg.integrations.sglang.registries import NAME, OVERLAY, SglangError, registry
from attnreg.selection.selector import evaluate

UNIFIED = "attnreg (attnreg) does not serve this run: the KV pool is unified: its slots are virtual"


@pytest.fixture(autouse=True)
def no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins lack most names of SGLang's."""
    monkeypatch.setattr(record, "moved_interfaces", list)


def switch_on(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ATTNREG_SGLANG", value)
    register()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="sglang.attnreg")
    return caplog


def refused_world() -> World:
    world = World(Facts())
    world.runner.kv_index_translator.is_translating = True
    return world


def test_sglang_finds_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {"attnreg": f"{plugin.__name__}:{register.__name__}"}


@pytest.mark.parametrize("value", ["", "0", None])
def test_it_is_off_until_switched_on(sglang: Context, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is not None:
        monkeypatch.setenv("ATTNREG_SGLANG", value)
    register()
    assert [*sglang.backends] == ["triton"]
    assert not sglang.choices


def test_1_adds_a_name_that_users_require(
    sglang: Context, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    own = sglang.backends["triton"]
    switch_on(monkeypatch, "1")
    # a second call, as in each process
    register()
    assert sglang.choices == [NAME]
    assert sglang.backends["triton"] is own
    backend = sglang.backends[NAME](World(Facts(page=1)).runner)
    assert type(backend).__name__ == "SglangBackend"
    assert [r.message for r in said.records][-2:] == [
        "attnreg: its kernels serve the layers of this run, over pages of 1",
        "attnreg: pages of 16 or 64 tokens are faster on NVIDIA GPUs: give --page-size 64",
    ]
    with pytest.raises(SglangError) as e:
        sglang.backends[NAME](refused_world().runner)
    assert str(e.value) == UNIFIED


def test_triton_is_taken_and_its_own_serves_the_rest(
    sglang: Context, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    switch_on(monkeypatch, "triton")
    assert type(sglang.backends["triton"](World(Facts()).runner)).__name__ == "SglangBackend"
    assert sglang.backends["triton"](refused_world().runner) == "SGLang's own"
    assert said.records[-1].message == f"{UNIFIED}. SGLang's own backend serves it"
    assert said.records[-1].levelname == "WARNING"


def test_a_crash_leaves_the_place_to_sglangs_own(
    sglang: Context, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    switch_on(monkeypatch, "triton")
    world = World(Facts())
    # a release whose runner has no such attribute, which no record of names shows
    del world.runner.attention_chunk_size
    assert sglang.backends["triton"](world.runner) == "SGLang's own"
    assert said.records[-1].message == "attnreg: failed to build its backend. SGLang's own serves this run"
    assert said.records[-1].exc_info is not None
    with pytest.raises(AttributeError):
        sglang.backends[NAME](world.runner)


def test_require_is_the_place_of_triton_without_a_way_back(sglang: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    switch_on(monkeypatch, "require")
    assert type(sglang.backends["triton"](World(Facts()).runner)).__name__ == "SglangBackend"
    with pytest.raises(SglangError, match="does not serve this run"):
        sglang.backends["triton"](refused_world().runner)


def test_a_value_that_nobody_knows_is_an_error_where_it_matters(
    sglang: Context, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    switch_on(monkeypatch, "tritn")
    message = "attnreg: $ATTNREG_SGLANG is 'tritn'; expected 0, 1, triton or require; did you mean `triton`?"
    assert said.records[-1].message.startswith(message)
    for name in ("triton", NAME):
        with pytest.raises(SglangError) as e:
            sglang.backends[name](World(Facts()).runner)
        assert str(e.value).startswith(message)


@pytest.mark.parametrize(("value", "refused"), [("1", [NAME]), ("triton", [NAME]), ("require", [NAME, "triton"])])
def test_it_steps_aside_in_a_release_that_moved(
    sglang: Context, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture, value: str, refused: list[str]
) -> None:
    monkeypatch.setattr(record, "moved_interfaces", lambda: ["ForwardBatch now has lanes", "KVWriteLoc has no loc"])
    switch_on(monkeypatch, value)
    (line,) = (r.message for r in said.records)
    assert line == (
        "attnreg: steps aside, and SGLang 0.5.23 runs as without it: it was written for SGLang 0.5.23, since when "
        "ForwardBatch now has lanes; KVWriteLoc has no loc"
    )
    for name in (NAME, "triton"):
        runner: Any = World(Facts()).runner
        if name in refused:
            with pytest.raises(SglangError, match="steps aside"):
                sglang.backends[name](runner)
        else:
            assert sglang.backends[name](runner) == "SGLang's own"


# the registry's row --------------------------------------------------------------------------------------------------


def test_the_bundled_overlay_names_the_backend() -> None:
    layers = attnreg.AttentionRequest(head_size=128, num_heads=32, num_kv_heads=8, dtype="bfloat16")
    gpu = attnreg.Platform(platform="cuda", arch="sm90", packages=(("torch", "2.13.0"),))
    chosen = attnreg.select(layers, gpu, attnreg.load_registry(OVERLAY), NAME)
    assert chosen.backend is not None
    assert chosen.backend.name == NAME
    assert registry().steps == ()


def test_every_claim_is_one_of_the_rows_that_compute() -> None:
    """The backend claims no more than attnreg's own kernels, on any of its platforms."""
    variants = {variant.name: variant for variant in registry().backends[NAME].variants}
    computing = {
        "heads": ("TRITON_ATTN", "CPU_ATTN"),
        "latents": ("TRITON_MLA",),
        "latents on processors": ("TORCH_MLA",),
        "prompts": ("TRITON_PREFILL", "TORCH_PREFILL"),
    }
    own = attnreg.load_registry("default").backends
    assert variants.keys() == computing.keys()
    for variant, names in computing.items():
        for name in names:
            assert variants[variant].served <= own[name].variants[0].served, (variant, name)


@pytest.mark.parametrize(
    ("platform", "arch", "row", "rank", "rope", "dtype", "page", "served"),
    [
        ("cuda", "sm90", "TRITON_MLA", 512, 64, "bfloat16", 64, True),
        ("rocm", "gfx942", "TRITON_MLA", 512, 64, "float16", 16, True),
        # latents narrower than the heads that attnreg's other kernels serve
        ("cuda", "sm80", "TRITON_MLA", 256, 32, "float16", 16, True),
        ("cuda", "sm80", "TRITON_MLA", 256, 32, "float32", 16, False),
        ("cuda", "sm80", "TRITON_MLA", 256, 32, "float16", 1, False),
        ("cuda", "sm90", "TRITON_MLA", 768, 64, "bfloat16", 64, False),
        ("cpu", "x86_64", "TORCH_MLA", 64, 16, "float32", 1, True),
        ("cpu", "x86_64", "TORCH_MLA", 2048, 64, "float32", 1, False),
    ],
)
def test_latents_are_served_where_a_row_computes_them(
    platform: str, arch: str, row: str, rank: int, rope: int, dtype: str, page: int, served: bool
) -> None:
    layers = attnreg.AttentionRequest(
        attention="mla", head_size=rank + rope, head_size_v=rank, num_heads=16, num_kv_heads=1, dtype=dtype,
        block_size=page,
    )  # fmt: skip
    packages = (("torch", "2.13.0"), ("triton", "3.7.0"))
    machine = attnreg.Platform(platform=platform, arch=arch, packages=packages)
    for answers, name in ((registry(), NAME), (attnreg.load_registry("default"), row)):
        assert (not evaluate(layers, machine, answers, name).against(name)) is served
