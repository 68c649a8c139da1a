"""The record of what aiter offers: what it may say, and how an installed package that differs becomes a reason."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from support.stand_ins.aiter_layers import FUNCTIONS
from support.stand_ins.fake_aiter import Fake, signature_of

import attnreg
from attnreg import AttentionRequest, Platform, Registry
from attnreg.kernels import upstream
from attnreg.kernels.aiter import record
from attnreg.kernels.upstream import Function, UpstreamValue
from attnreg.loader import load_kernel, unloadable
from attnreg.selection.selector import evaluate

PLAIN = AttentionRequest(head_size=128, num_heads=32, num_kv_heads=8, block_size=16)
MLA = AttentionRequest(attention="mla", head_size=576, num_heads=16, num_kv_heads=1, block_size=16)
ROWS = ("ROCM_AITER_FA", "ROCM_AITER_MLA", "ROCM_AITER_UNIFIED_ATTN")


def says(function: UpstreamValue, *changes: str) -> str:
    """What is said of a function that has changed."""
    return f"aiter's {function.name} {', and '.join(changes)} {written_for(function)}"


def written_for(value: UpstreamValue) -> str:
    return f"(the adapter was written for {value.source.split('/')[6][:12]})"


# the record ----------------------------------------------------------------------------------------------------------


def test_every_row_that_calls_aiter_requires_it(default: Registry) -> None:
    rows = {r.name for r in default.backends.values() if (r.module or "").startswith("attnreg.kernels.rocm_aiter_")}
    assert rows == set(ROWS) == FUNCTIONS.keys()
    for row in rows:
        clauses = default.backends[row].variants[0].requires.clauses
        wanted = {r.package for c in clauses for r in c.matcher.mentions if c.facet == "packages"}
        assert wanted == {function.package for function in FUNCTIONS[row]} == {"aiter"}


def test_the_record_names_the_commits_that_were_read() -> None:
    for value in (*record.FUNCTIONS, record.FP8):
        assert re.fullmatch(r"https://github\.com/\w+/aiter/blob/[0-9a-f]{40}/aiter/[\w/]+\.py", value.source)


def test_no_parameter_is_both_passed_and_counted_on() -> None:
    for function in record.FUNCTIONS:
        assert len(set(function.passes)) == len(function.passes)
        assert function.defaults.keys().isdisjoint(function.passes)


# what is installed ---------------------------------------------------------------------------------------------------


def reasons(registry: Registry, platform: Platform, row: str) -> list[str]:
    """What speaks against running a row that would be chosen."""
    request = MLA if "MLA" in row else PLAIN
    assert evaluate(request, platform, registry, row).backend is not None
    selection = evaluate(request, platform, registry, row, unloadable=unloadable)
    assert (selection.backend is None) == bool(selection.candidates[0].reasons)
    return [r.text for r in selection.candidates[0].reasons]


@pytest.mark.parametrize("row", ROWS)
def test_what_fits_the_record_loads(fake: Fake, registry: Registry, mi350: Platform, row: str) -> None:
    assert reasons(registry, mi350, row) == []
    module = load_kernel(registry, row)
    assert [callable(getattr(module, c)) for c in ("kv_cache_shape", "plan", "write_kv", "forward")] == [True] * 4


def changed(function: Function, change: Callable[[inspect.Signature], inspect.Signature]) -> Callable[[Fake], None]:
    """A change of one function's signature."""

    def apply(fake: Fake) -> None:
        fake.set(function.modules[0], function.name, fake.function(function, change(signature_of(function))))

    return apply


def without(*words: str) -> Callable[[inspect.Signature], inspect.Signature]:
    return lambda s: s.replace(parameters=[p for p in s.parameters.values() if p.name not in words])


def with_default(word: str, default: Any) -> Callable[[inspect.Signature], inspect.Signature]:
    return lambda s: s.replace(
        parameters=[p.replace(default=default) if p.name == word else p for p in s.parameters.values()]
    )


def with_first(*more: inspect.Parameter) -> Callable[[inspect.Signature], inspect.Signature]:
    return lambda s: s.replace(parameters=[*more, *s.parameters.values()])


def with_last(*more: inspect.Parameter) -> Callable[[inspect.Signature], inspect.Signature]:
    return lambda s: s.replace(parameters=[*s.parameters.values(), *more])


def parameter(name: str, kind: str = "POSITIONAL_OR_KEYWORD", **default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, getattr(inspect.Parameter, kind), **default)


def gone(module: str, name: str) -> Callable[[Fake], None]:
    return lambda fake: delattr(fake.modules[module], name)


def put(module: str, name: str, value: Any) -> Callable[[Fake], None]:
    return lambda fake: fake.set(module, name, value)


def only_by_position(s: inspect.Signature) -> inspect.Signature:
    first, *rest = s.parameters.values()
    return s.replace(parameters=[first.replace(kind=inspect.Parameter.POSITIONAL_ONLY), *rest])


class _Unreadable:
    __signature__ = "none"

    def __call__(self) -> None: ...


UNREADABLE = _Unreadable()


# the row, what changed in aiter, and the reason (without `cannot be run: UpstreamError: `); None: it still runs
CHANGES: list[tuple[str, str, Callable[[Fake], None], str | None]] = [
    (
        "a parameter that is passed is gone",
        "ROCM_AITER_MLA",
        changed(record.MLA_DECODE, without("sm_scale")),
        says(record.MLA_DECODE, "has no parameter `sm_scale` any more"),
    ),
    (
        "one that is not passed is gone",
        "ROCM_AITER_MLA",
        changed(record.MLA_DECODE, without("cp_rank", "causal")),
        None,
    ),
    (
        "a new one must be given",
        "ROCM_AITER_UNIFIED_ATTN",
        changed(record.UNIFIED_ATTENTION, with_first(parameter("layout"))),
        says(record.UNIFIED_ATTENTION, "now requires `layout`"),
    ),
    (
        "a new one has a default",
        "ROCM_AITER_UNIFIED_ATTN",
        changed(
            record.UNIFIED_ATTENTION, with_last(parameter("layout", default="NHD"), parameter("rest", "VAR_KEYWORD"))
        ),
        None,
    ),
    (
        "one that is not passed has lost its default",
        "ROCM_AITER_FA",
        changed(
            record.PAGED_ATTENTION_V1,
            lambda s: s.replace(
                parameters=[
                    p.replace(default=p.empty) if p.name == "fp8_out_scale" else p for p in s.parameters.values()
                ]
            ),
        ),
        says(record.PAGED_ATTENTION_V1, "now requires `fp8_out_scale`"),
    ),
    (
        "a default that adapters rely on has changed",
        "ROCM_AITER_FA",
        changed(record.PAGED_ATTENTION_V1, with_default("partition_size", 512)),
        says(record.PAGED_ATTENTION_V1, "has 512 as default of `partition_size`, formerly 256"),
    ),
    (
        "false is no zero",
        "ROCM_AITER_FA",
        changed(record.MHA_BATCH_PREFILL, with_default("sink_size", False)),
        says(record.MHA_BATCH_PREFILL, "has False as default of `sink_size`, formerly 0"),
    ),
    (
        "a default of one that is passed",
        "ROCM_AITER_FA",
        changed(
            record.FLASH_ATTN_VARLEN,
            lambda s: with_last(parameter("window_size", default=(-1, -1)))(without("window_size")(s)),
        ),
        None,
    ),
    (
        "the same default written otherwise",
        "ROCM_AITER_MLA",
        changed(record.MLA_DECODE, with_default("logit_cap", 0)),
        None,
    ),
    (
        "only by position",
        "ROCM_AITER_FA",
        changed(record.FLASH_ATTN_VARLEN, only_by_position),
        says(record.FLASH_ATTN_VARLEN, "takes `q` by position only"),
    ),
    (
        "the function is gone",
        "ROCM_AITER_FA",
        gone("aiter", "paged_attention_v1"),
        f"aiter has no aiter.paged_attention_v1 any more {written_for(record.PAGED_ATTENTION_V1)}",
    ),
    (
        "it is no function any more",
        "ROCM_AITER_FA",
        put("aiter", "paged_attention_v1", "see pa_decode"),
        says(record.PAGED_ATTENTION_V1, "is no function any more"),
    ),
    (
        "a value is gone",
        "ROCM_AITER_UNIFIED_ATTN",
        gone("aiter.utility.dtypes", "fp8"),
        f"aiter has no aiter.utility.dtypes.fp8 any more {written_for(record.FP8)}",
    ),
    (
        "a signature that cannot be read",
        "ROCM_AITER_FA",
        put("aiter", "paged_attention_v1", UNREADABLE),
        says(record.PAGED_ATTENTION_V1, "has no signature to compare with the adapter's call"),
    ),
    (
        "two changes are two reasons in one",
        "ROCM_AITER_MLA",
        changed(record.MLA_PREFILL, without("o", "q")),
        says(record.MLA_PREFILL, "has no parameter `q` any more", "has no parameter `o` any more"),
    ),
    ("another row's function is gone", "ROCM_AITER_UNIFIED_ATTN", gone("aiter", "paged_attention_v1"), None),
]


@pytest.mark.parametrize(("row", "change", "reason"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_a_changed_aiter_is_a_reason(
    fake: Fake, registry: Registry, mi350: Platform, row: str, change: Callable[[Fake], None], reason: str | None
) -> None:
    change(fake)
    expected = [] if reason is None else [f"cannot be run: UpstreamError: {reason}"]
    assert reasons(registry, mi350, row) == expected


def test_the_reason_leads_to_the_row_and_the_order_goes_on(fake: Fake, registry: Registry, mi350: Platform) -> None:
    gone("aiter.mla", "mla_decode_fwd")(fake)
    selection = attnreg.select(MLA, mi350, registry)
    assert selection.backend is not None
    assert selection.backend.name == "ROCM_AITER_MLA"
    refused = evaluate(MLA, mi350, registry, unloadable=unloadable).candidates[0]
    (reason,) = refused.reasons
    assert (reason.kind, reason.where) == ("module", registry.backends["ROCM_AITER_MLA"].variants[0].module_at)
    with pytest.raises(upstream.UpstreamError):
        load_kernel(selection.registry, selection.backend.title)


def fails(name: str, error: Exception) -> Callable[[Fake], ModuleType]:
    """An import hook under which a module of aiter fails to import."""

    class Finder:
        def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
            if fullname == name:
                raise error

    return Finder()  # type: ignore[return-value]


IMPORTS: list[tuple[str, str, Exception, str]] = [
    (
        "a library of the driver is missing",
        "aiter.mla",
        OSError("libamdhip64.so: cannot open shared object file"),
        "aiter.mla cannot be imported: OSError: libamdhip64.so: cannot open shared object file",
    ),
    (
        "a package that aiter needs is missing",
        "aiter.mla",
        ModuleNotFoundError("No module named 'flydsl'", name="flydsl"),
        "aiter.mla cannot be imported: No module named 'flydsl'",
    ),
    (
        "the module is gone",
        "aiter.mla",
        ModuleNotFoundError("No module named 'aiter.mla'", name="aiter.mla"),
        f"aiter has no module aiter.mla any more {written_for(record.MLA_DECODE)}",
    ),
    (
        "the GPU is not known to it",
        "aiter.utility.dtypes",
        KeyError("gfx000"),
        "aiter.utility.dtypes cannot be imported: KeyError: 'gfx000'",
    ),
]


@pytest.mark.parametrize(("module", "error", "reason"), [i[1:] for i in IMPORTS], ids=[i[0] for i in IMPORTS])
def test_an_aiter_that_cannot_be_imported_is_a_reason(
    fake: Fake,
    registry: Registry,
    mi350: Platform,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    error: Exception,
    reason: str,
) -> None:
    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [fails(module, error), *sys.meta_path])
    assert reasons(registry, mi350, "ROCM_AITER_MLA") == [f"cannot be run: UpstreamError: {reason}"]


def test_a_function_is_found_where_it_was_formerly(
    fake: Fake, registry: Registry, mi350: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = record.UNIFIED_ATTENTION
    now, formerly = function.modules
    monkeypatch.delitem(sys.modules, now)
    monkeypatch.delitem(sys.modules, now.rpartition(".")[0])
    monkeypatch.setattr(fake, "modules", {})
    older = ModuleType(formerly)
    # the signature of aiter 80ecc7784a618f1261dafcdaff3657cc64ec04f4, before queries had scales of their own
    shorter = without("q_scales", "shuffled_kv_cache", "skip_reduce", "backend")(signature_of(function))
    older.unified_attention = fake.function(function, shorter)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, formerly, older)
    assert reasons(registry, mi350, "ROCM_AITER_UNIFIED_ATTN") == []


def test_another_package_of_that_name(
    fresh: None, registry: Registry, mi350: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ModuleType("aiter")
    monkeypatch.setitem(sys.modules, "aiter", other)
    assert reasons(registry, mi350, "ROCM_AITER_FA") == [
        f"cannot be run: UpstreamError: aiter has no module aiter.utility any more {written_for(record.FP8)}"
    ]


def test_a_signature_that_tells_nothing_is_refused() -> None:
    assert list(record.MLA_PREFILL.changes(UNREADABLE)) == ["has no signature to compare with the adapter's call"]
    hidden = list(record.MLA_PREFILL.changes(lambda *args, **kwargs: None))
    assert hidden == [f"has no parameter `{name}` any more" for name in record.MLA_PREFILL.passes]
