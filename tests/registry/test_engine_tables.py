"""What tables of other engines may say: what is unchecked, what changes by name, which faults are known."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

import attnreg
from attnreg import AttentionRequest, NoBackendError, Platform
from attnreg.analysis.check.findings import check
from attnreg.loader import load_kernel
from attnreg.request import with_extra
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import Selection

ROW = """\
sources: {s: {url: u, version: "1"}}
imports: never
unchecked: [softcap, cache_layout, head_size_v, num_heads, num_kv_heads]
fallbacks:
  - {when: {kv_dtype: "turboquant_*"}, only: [kv_dtype], because: layers at the border keep the usual cache}
waivers:
  - {when: {asked: by_name, platform: [cuda, rocm]}, unchecked: [platform], because: the engine does not ask where}
backends:
  CAREFUL:
    summary: It checks.
    module: engine.careful.Backend
    platforms: [cuda]
    attention: mha
    requires: {packages: [torch]}
    capabilities:
      {dtypes: bfloat16, kv_dtypes: auto, head_sizes: 128, block_sizes: any, attn_types: decoder, features: [alibi]}
    source: "s:path#symbol"
  CARELESS:
    summary: It does not.
    platforms: [cuda]
    attention: mha
    requires: {packages: [torch]}
    capabilities:
      {dtypes: bfloat16, kv_dtypes: any, head_sizes: any, block_sizes: any, attn_types: decoder, features: []}
    unchecked: [head_size, sinks]
    source: "s:path#symbol"
"""
WORDS = """\
extends: default
facets: {asked: {of: selection, kind: word, words: asked, legend: Who asks.}}
words: {asked: {automatic: An order., by_name: A user.}}
"""
ORDERS = "cuda:\n  - {name: all, order: [CAREFUL, CARELESS]}\n"
GPU = Platform(platform="cuda", arch="sm90")


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    (tmp_path / "vocabulary.yaml").write_text(WORDS)
    (tmp_path / "backends.yaml").write_text(ROW)
    (tmp_path / "priorities.yaml").write_text(ORDERS)
    return tmp_path


def ask(registry: attnreg.Registry, backend: str | None = None, **fields: object) -> attnreg.Selection:
    return attnreg.select(AttentionRequest(**{"head_size": 128, **fields}), GPU, registry, backend)  # type: ignore[arg-type]


def test_what_no_row_looks_at_is_let_through_and_said(engine: Path) -> None:
    selection = ask(attnreg.load_registry(engine), features={"softcap"})
    assert selection.chosen is not None
    assert selection.chosen.title == "CAREFUL"
    assert selection.warnings == (
        "The engine does not test whether CAREFUL supports softcap before it chooses it (backends.yaml:3)",
    )


def test_only_what_was_asked_for_is_said(engine: Path) -> None:
    registry = attnreg.load_registry(engine)
    assert ask(registry, features={"alibi"}).warnings == ()
    careless = ask(registry, "CARELESS", features={"sinks"}, head_size=65)
    assert careless.warnings == (
        "The engine does not test whether CARELESS supports head_size, sinks before it chooses it (backends.yaml:25)",
    )


def test_a_feature_that_is_neither_claimed_nor_unchecked_is_refused(engine: Path) -> None:
    with pytest.raises(NoBackendError) as e:
        ask(attnreg.load_registry(engine), features={"mm_prefix"})
    assert [r.text for c in e.value.selection.candidates for r in c.reasons] == ["mm_prefix is not supported"] * 2


def test_a_request_by_name_gives_way_only_as_the_data_says(engine: Path) -> None:
    registry = attnreg.load_registry(engine)
    selection = ask(registry, "CAREFUL", kv_dtype="turboquant_k8v4")
    assert selection.backend is not None
    assert selection.backend.name == "CARELESS"
    assert selection.warnings[0] == (
        "CAREFUL was asked for (kv_dtype is turboquant_k8v4; supported: auto), but layers at the border keep the usual "
        "cache (backends.yaml:5)"
    )
    # whose reasons they are is not told by the place among the candidates, which are those of the order
    assert selection.against("CAREFUL") == ("kv_dtype is turboquant_k8v4; supported: auto",)
    assert selection.against("CARELESS") == ()
    for fields in ({"kv_dtype": "fp8"}, {"kv_dtype": "turboquant_k8v4", "dtype": "float32"}):
        with pytest.raises(NoBackendError):
            ask(registry, "CAREFUL", **fields)


LAYERS = [
    AttentionRequest(head_size=64),
    AttentionRequest(head_size=128, kv_dtype="turboquant_k8v4"),
    AttentionRequest(head_size=576, head_size_v=512, attention="mla", kv_lora_rank=512, kv_dtype="fp8"),
]


@pytest.mark.parametrize("name", ["vllm-0.20.0", "vllm-0.33.0", "sglang-0.5.23"])
def test_what_is_said_against_a_backend_is_of_that_backend(name: str) -> None:
    """Where a start refuses the run there is no candidate, and where the order decides it is not the first."""
    registry = attnreg.load_registry(name)
    known, gave_way = registry.vocabulary.words["kv_dtypes"], 0
    for request in (layer for layer in LAYERS if layer.kv_dtype in known):
        for where in (GPU, Platform(platform="cuda", arch="sm75"), Platform(platform="rocm", arch="gfx942")):
            for row in registry.backends:
                selection = evaluate(request, where, registry, row)
                against = selection.against(row)
                assert bool(against) == (selection.chosen is None or selection.chosen.name != row)
                start = selection.start
                if start is not None and start.refusal is not None:
                    assert against == (start.refusal.text,)
                elif selection.gave_way is not None:
                    gave_way += 1
                    assert against == tuple(reason.text for reason in selection.gave_way.reasons)
                    assert selection.gave_way.name == row
    assert bool(gave_way) == (name == "vllm-0.33.0")


def test_a_claim_is_waived_only_as_the_data_says(engine: Path) -> None:
    registry = attnreg.load_registry(engine)
    amd, intel = Platform(platform="rocm", arch="gfx942"), Platform(platform="xpu", arch="xe2")
    request = AttentionRequest(head_size=128)
    selection = attnreg.select(request, amd, registry, "CAREFUL")
    assert selection.warnings == (
        "platform is rocm, and CAREFUL is for cuda: the engine does not ask where (backends.yaml:7)",
    )
    assert attnreg.select(request, GPU, registry, "CAREFUL").warnings == ()
    # everything else is looked at
    with pytest.raises(NoBackendError) as e:
        attnreg.select(AttentionRequest(head_size=64), amd, registry, "CAREFUL")
    # and nobody is sent to another platform's backend
    assert str(e.value).splitlines()[1:] == [
        "  CAREFUL  head_size is 64; supported: 128  [backends.yaml:16]",
        "  help: no other backend serves it either",
    ]
    with pytest.raises(NoBackendError, match="platform is xpu; supported: cuda"):
        attnreg.select(request, intel, registry, "CAREFUL")
    with pytest.raises(NoBackendError, match=r"not known on rocm gfx942: .* says nothing of rocm"):
        attnreg.select(request, amd, registry)


def test_a_waiver_that_never_holds_is_a_finding(engine: Path) -> None:
    registry = attnreg.load_registry(engine)
    assert not [f for f in check(registry) if f.code == "vacuous-waiver"]
    file = engine / "backends.yaml"
    file.write_text(file.read_text().replace("platform: [cuda, rocm]", "platform: cuda, arch: gfx942"))
    (finding,) = [f for f in check(attnreg.load_registry(engine)) if f.code == "vacuous-waiver"]
    assert finding.subject == ("platform",)
    assert finding.where.short == "backends.yaml:7"


def test_its_modules_are_knowledge(engine: Path) -> None:
    selection = ask(attnreg.load_registry(engine))
    assert selection.backend is not None
    with pytest.raises(ImportError, match=r"is served by engine\.careful\.Backend of another engine"):
        load_kernel(selection.registry, selection.backend.title)


def test_known_findings_are_left_out_and_must_stay_necessary(engine: Path) -> None:
    (engine / "priorities.yaml").write_text("cuda:\n  - {name: all, order: [CARELESS, CAREFUL]}\n")
    finding = "unreachable-entry [CAREFUL, cuda/all]"
    found = [f.title for f in check(attnreg.load_registry(engine))]
    assert finding not in found  # alibi is served by CAREFUL alone
    (engine / "priorities.yaml").write_text(
        "cuda:\n"
        "  - {name: all, when: {without: [alibi]}, order: [CARELESS, CAREFUL]}\n"
        "  - {name: rest, order: [CAREFUL]}\n"
    )
    assert finding in [f.title for f in check(attnreg.load_registry(engine))]
    known = "known: [{code: unreachable-entry, each: [[CAREFUL, cuda/all], [CAREFUL, cuda/rest]], because: it is so}]\n"
    (engine / "invariants.yaml").write_text(known)
    left = [f.title for f in check(attnreg.load_registry(engine))]
    assert finding not in left
    assert [t for t in left if t.startswith("stale")] == ["stale-exception [unreachable-entry, CAREFUL, cuda/rest]"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("unchecked: [softcap,", "unchecked: [sofcap,"), "unchecked: unknown feature or facet `sofcap`"),
        (("only: [kv_dtype]", "only: [kv_dtyp]"), "fallbacks.only: unknown facet `kv_dtyp`"),
        (
            ("unchecked: [platform]", "unchecked: []"),
            "waivers.unchecked: expected at least one item, got an empty list",
        ),
        (("unchecked: [platform]", "unchecked: [role]"), "waivers.unchecked: unknown facet with a claim `role`"),
        (("asked: by_name,", "asked: named,"), "waivers.when.asked: unknown asked 'named'"),
        (
            ('{kv_dtype: "turboquant_*"}', "{asked: by_name}"),
            "fallbacks.when.asked: `asked` cannot be used here: its value differs from backend to backend",
        ),
        (("requires: {packages: [torch]}", "notes: []"), None),
    ],
)
def test_mistakes_in_such_tables(engine: Path, change: tuple[str, str], message: str | None) -> None:
    file = engine / "backends.yaml"
    file.write_text(file.read_text().replace(*change, 1))
    if message is None:
        unguarded = [f.subject for f in check(attnreg.load_registry(engine)) if f.code == "unguarded-row"]
        assert unguarded == [("CAREFUL",)]
        return
    with pytest.raises(attnreg.RegistryError) as e:
        attnreg.load_registry(engine)
    assert [p.message for p in e.value.problems] == [message]


@pytest.mark.parametrize("name", sorted(attnreg.bundled_registries(releases=False).keys() - {"default"}))
def test_a_known_refusal_has_a_configuration_that_shows_it(name: str) -> None:
    registry = attnreg.load_registry(name, plugins=())
    refused = [known for known in registry.known if known.code in CODES]
    assert refused
    for known in refused:
        facets = dict(known.example or {})
        arch = registry.vocabulary.architectures[facets.pop("arch")]
        flags = facets.pop("flags", ())
        request = AttentionRequest(**with_extra({"head_size": 128, **facets}))
        # a fault may need a package to be missing
        machines = [Platform(platform=arch.platform, arch=arch.name, flags=flags, packages=p) for p in (None, ())]
        shown = {key for machine in machines for key in faults(evaluate(request, machine, registry))}
        assert known.key in shown, (known, shown)


CODES = ("failing-choice", "refused-start", "refused-row", "wrong-choice")


def faults(selection: Selection) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The code and the subject of what is wrong with a run, as `attnreg check` finds it."""
    start, chosen = selection.start, selection.backend
    if start is not None and start.refusal is not None:
        yield "refused-start", start.refusal.step.subject(start.refusal.effect)
    elif chosen is None:
        assert start is not None
        yield "refused-row", (str(start.facts.get("named")),)
    else:
        variant = next(v for v in chosen.row.variants if v.name == chosen.variant)
        ids = {consequence.where: consequence.id for consequence in variant.consequences}
        for failure in selection.consequences:
            if failure.kind in ("fails", "drops"):
                code = "failing-choice" if failure.kind == "fails" else "wrong-choice"
                yield code, tuple(filter(None, (chosen.title, ids[failure.where])))


DROPS = ROW.replace(
    '    source: "s:path#symbol"\n  CARELESS:',
    "    consequences:\n"
    "      - {when: {features: [alibi]}, id: slopes, drops: the engine computes without slopes}\n"
    '    source: "s:path#symbol"\n  CARELESS:',
)


def test_what_an_engine_drops_is_warned_of_and_found(engine: Path) -> None:
    (engine / "backends.yaml").write_text(DROPS)
    registry = attnreg.load_registry(engine)
    plain = AttentionRequest(head_size=128, dtype="bfloat16")
    gpu = Platform(platform="cuda", arch="sm90", packages=(("torch", "2.13.0"),))
    with_slopes = evaluate(AttentionRequest(head_size=128, features={"alibi"}), gpu, registry)  # type: ignore[arg-type]
    assert "CAREFUL is chosen, and results are wrong: the engine computes without slopes" in with_slopes.warnings[-1]
    # it runs all the same, and its warning is no fact of the choice
    assert not with_slopes.fails
    assert not with_slopes.facts
    assert not any("wrong" in warning for warning in evaluate(plain, gpu, registry).warnings)
    found = [finding for finding in check(registry) if finding.code == "wrong-choice"]
    assert [finding.subject for finding in found] == [("CAREFUL", "slopes")]


def test_sglang_takes_a_backend_for_gemma_2_that_never_reads_its_softcap() -> None:
    registry = attnreg.load_registry("sglang-0.5.23")
    gemma = AttentionRequest(
        head_size=256, num_heads=16, num_kv_heads=8, features={"softcap"},  # type: ignore[arg-type]
        extra=(("architecture", "Gemma2ForCausalLM"),),
    )  # fmt: skip
    chosen = evaluate(gemma, Platform(platform="cuda", arch="sm100"), registry)
    assert chosen.backend is not None
    assert chosen.backend.name == "trtllm_mha"
    assert any("results are wrong: SGLang computes without the softcap" in warning for warning in chosen.warnings)


@pytest.mark.parametrize(
    ("release", "stops"), [("0.20.0", True), ("0.21.0", True), ("0.22.0", True), ("0.23.0", False)]
)
def test_a_float_cache_that_is_named_stopped_the_kernel_of_triton_until_0_23(release: str, stops: bool) -> None:
    registry = attnreg.load_registry(f"vllm-{release}")
    for kv_dtype in ("auto", "bfloat16"):
        layer = AttentionRequest(head_size=128, dtype="bfloat16", kv_dtype=kv_dtype)
        assert evaluate(layer, GPU, registry, "TRITON_ATTN").fails == (stops and kv_dtype != "auto")
        wide = evaluate(
            dataclasses.replace(layer, block_size=64), Platform(platform="rocm", arch="gfx942"), registry, "ROCM_ATTN"
        )
        assert wide.fails == (stops and kv_dtype != "auto")
