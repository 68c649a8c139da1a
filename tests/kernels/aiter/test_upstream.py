"""The record of what aiter offers: what it may say, and how an installed package that differs becomes a reason."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.fake_aiter import Fake

import attnreg
from attnreg import AttentionRequest, Platform, Registry, RegistryError
from attnreg.compile.bundled import registry_root
from attnreg.kernels.aiter import upstream
from attnreg.kernels.aiter.upstream import load_record
from attnreg.loader import load_kernel
from attnreg.selection.selector import evaluate

PLAIN = AttentionRequest(head_size=128, num_heads=32, num_kv_heads=8, block_size=16)
MLA = AttentionRequest(attention="mla", head_size=576, num_heads=16, num_kv_heads=1, block_size=16)
ROWS = ("ROCM_AITER_FA", "ROCM_AITER_MLA", "ROCM_AITER_UNIFIED_ATTN")
# line of the record by what it says
LINES = (registry_root() / upstream.FILE).read_text().splitlines()


def line(*words: str) -> int:
    """The line that says the last word, after those that say the others."""
    at = 0
    for word in words:
        at = next(i for i in range(at, len(LINES)) if re.search(rf"^\s*(- )?{{?{re.escape(word)}\b", LINES[i])) + 1
    return at


def says(sentence: str, *words: str) -> str:
    """A sentence that cites the line of the record."""
    return f"{sentence} (upstream.yaml:{line(*words)})"


# the record ----------------------------------------------------------------------------------------------------------


def test_every_row_that_needs_aiter_and_runs_has_its_functions_on_record(default: Registry) -> None:
    rows = {r.name for r in default.backends.values() if (r.module or "").startswith("attnreg.kernels.rocm_aiter_")}
    assert rows == set(ROWS)
    used = {
        row for n in (*upstream.record().functions.values(), *upstream.record().values.values()) for row in n.used_by
    }
    assert used == rows
    for row in rows:
        # what must be there: the package that the row requires
        packages = {n.package for n in upstream.record().of(row)}
        wanted = {r.package for c in default.backends[row].variants[0].requires.clauses for r in c.matcher.mentions
                  if c.facet == "packages"}  # fmt: skip
        assert packages == wanted == {"aiter"}


def test_the_record_names_its_revisions(default: Registry) -> None:
    for needed in (*upstream.record().functions.values(), *upstream.record().values.values()):
        assert re.fullmatch("[0-9a-f]{40}", needed.revision)
        assert needed.source.partition("#")[2] == needed.name
        assert needed.where.file == "registry/upstream.yaml"
        assert needed.where.line == line(needed.name)


def test_the_record_is_read_without_torch() -> None:
    import subprocess

    code = "import sys, attnreg.kernels.aiter.upstream as u; u.record(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


BROKEN = """\
sources:
  pkg: {url: "https://example.org", read: 2026-11-21}
functions:
  f:
    module: pkg
    source: "pgk:pkg/f.py#f"
    revision: 0123
    used_by: [A]
    passes: [x, z]
    parameters: [x, y, x, {w: 1}, v, {a: 1, b: 2}]
  g:
    module: pkg
    source: "pkg:pkg/g.py"
    revision: "0123456789012345678901234567890123456789"
    used_by: []
    passes: [x]
    parameters: [x]
    oops: 1
"""


def test_a_record_that_is_wrong_says_so_at_once(tmp_path: Path) -> None:
    file = tmp_path / "upstream.yaml"
    file.write_text(BROKEN.replace("0123\n", '"0123456789012345678901234567890123456789"\n').replace("[]", "[A]"))
    with pytest.raises(RegistryError) as caught:
        load_record(file, "upstream.yaml")
    assert [f"{p.where.line}: {p.message}" for p in caught.value.problems] == [
        "6: `pgk:pkg/f.py#f` is not <name>:<path>#<symbol>",
        "9: `y` must be passed",
        "9: no parameter `z`",
        "10: the parameter x is given twice",
        "10: v has no default, and one before it has",
        "10: a parameter is a name, or one name with its default",
        "13: `pkg:pkg/g.py` is not <name>:<path>#<symbol>",
        "18: functions.g: unknown key `oops`",
    ]
    file.write_text(BROKEN)
    with pytest.raises(RegistryError) as caught:
        load_record(file, "upstream.yaml")
    assert {p.where.line for p in caught.value.problems} >= {7, 15}


# what is installed ---------------------------------------------------------------------------------------------------


def reasons(registry: Registry, platform: Platform, row: str) -> list[str]:
    """What speaks against running a row that would be chosen."""
    request = MLA if "MLA" in row else PLAIN
    assert evaluate(request, platform, registry, row).backend is not None
    selection = evaluate(request, platform, registry, row, to_run=True)
    assert (selection.backend is None) == bool(selection.candidates[0].reasons)
    return [r.text for r in selection.candidates[0].reasons]


@pytest.mark.parametrize("row", ROWS)
def test_what_fits_the_record_loads(fake: Fake, registry: Registry, mi350: Platform, row: str) -> None:
    assert reasons(registry, mi350, row) == []
    module = load_kernel(registry, row)
    assert [callable(getattr(module, c)) for c in ("kv_cache_shape", "plan", "write_kv", "forward")] == [True] * 4


def changed(name: str, change: Callable[[inspect.Signature], inspect.Signature]) -> Callable[[Fake], None]:
    """A change of one function's signature."""

    def apply(fake: Fake) -> None:
        needed = upstream.record().functions[name]
        fake.set(needed.modules[0], name, fake.function(needed, change(needed.signature)))

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
        changed("mla_decode_fwd", without("sm_scale")),
        says("aiter's mla_decode_fwd has no parameter `sm_scale` any more", "mla_decode_fwd", "parameters", "sm_scale"),
    ),
    (
        "one that is not passed is gone",
        "ROCM_AITER_MLA",
        changed("mla_decode_fwd", without("cp_rank", "causal")),
        None,
    ),
    (
        "a new one must be given",
        "ROCM_AITER_UNIFIED_ATTN",
        changed("unified_attention", with_first(parameter("layout"))),
        says("aiter's unified_attention now requires `layout`, which the record does not know", "unified_attention"),
    ),
    (
        "a new one has a default",
        "ROCM_AITER_UNIFIED_ATTN",
        changed("unified_attention", with_last(parameter("layout", default="NHD"), parameter("rest", "VAR_KEYWORD"))),
        None,
    ),
    (
        "one that is not passed has lost its default",
        "ROCM_AITER_FA",
        changed(
            "paged_attention_v1",
            lambda s: s.replace(
                parameters=[
                    p.replace(default=p.empty) if p.name == "fp8_out_scale" else p for p in s.parameters.values()
                ]
            ),
        ),
        says(
            "aiter's paged_attention_v1 now requires `fp8_out_scale`",
            "paged_attention_v1",
            "parameters",
            "fp8_out_scale",
        ),
    ),
    (
        "a default that adapters rely on has changed",
        "ROCM_AITER_FA",
        changed("paged_attention_v1", with_default("partition_size", 512)),
        says(
            "aiter's paged_attention_v1 has 512 as default of `partition_size`, formerly 256",
            "paged_attention_v1",
            "parameters",
            "partition_size",
        ),
    ),
    (
        "false is no zero",
        "ROCM_AITER_FA",
        changed("mha_batch_prefill_func", with_default("sink_size", False)),
        says(
            "aiter's mha_batch_prefill_func has False as default of `sink_size`, formerly 0",
            "mha_batch_prefill_func",
            "parameters",
            "sink_size",
        ),
    ),
    (
        "a default of one that is passed",
        "ROCM_AITER_FA",
        changed("flash_attn_varlen_func", with_default("window_size", (-1, -1))),
        None,
    ),
    (
        "the same default written otherwise",
        "ROCM_AITER_MLA",
        changed("mla_decode_fwd", with_default("logit_cap", 0)),
        None,
    ),
    (
        "only by position",
        "ROCM_AITER_FA",
        changed("flash_attn_varlen_func", only_by_position),
        says("aiter's flash_attn_varlen_func takes `q` by position only", "flash_attn_varlen_func", "parameters", "q"),
    ),
    (
        "the function is gone",
        "ROCM_AITER_FA",
        gone("aiter", "paged_attention_v1"),
        says("aiter has no aiter.paged_attention_v1 any more", "paged_attention_v1"),
    ),
    (
        "it is no function any more",
        "ROCM_AITER_FA",
        put("aiter", "paged_attention_v1", "see pa_decode"),
        says("aiter has no aiter.paged_attention_v1 any more", "paged_attention_v1"),
    ),
    (
        "a value is gone",
        "ROCM_AITER_UNIFIED_ATTN",
        gone("aiter.utility.dtypes", "fp8"),
        says("aiter has no aiter.utility.dtypes.fp8 any more", "values", "fp8"),
    ),
    (
        "a signature that cannot be read",
        "ROCM_AITER_FA",
        put("aiter", "paged_attention_v1", UNREADABLE),
        says("aiter's paged_attention_v1 has no signature to compare with the record", "paged_attention_v1"),
    ),
    (
        "two changes are two reasons in one",
        "ROCM_AITER_MLA",
        changed("mla_prefill_fwd", without("o", "q")),
        "; ".join(
            says(f"aiter's mla_prefill_fwd has no parameter `{p}` any more", "mla_prefill_fwd", "parameters", p)
            for p in ("q", "o")
        ),
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
    refused = evaluate(MLA, mi350, registry, to_run=True).candidates[0]
    (reason,) = refused.reasons
    assert (reason.kind, reason.where) == ("module", registry.backends["ROCM_AITER_MLA"].module_at)
    with pytest.raises(upstream.UpstreamError):
        selection.backend.load()


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
        says("aiter has no module aiter.mla any more", "mla_decode_fwd"),
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
    needed = upstream.record().functions["unified_attention"]
    now, formerly = needed.modules
    monkeypatch.delitem(sys.modules, now)
    monkeypatch.delitem(sys.modules, now.rpartition(".")[0])
    monkeypatch.setattr(fake, "modules", {})
    older = ModuleType(formerly)
    # the signature of aiter 80ecc7784a618f1261dafcdaff3657cc64ec04f4, before queries had scales of their own
    shorter = without("q_scales", "shuffled_kv_cache", "skip_reduce", "backend")(needed.signature)
    older.unified_attention = fake.function(needed, shorter)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, formerly, older)
    assert reasons(registry, mi350, "ROCM_AITER_UNIFIED_ATTN") == []


def test_another_package_of_that_name(
    fresh: None, registry: Registry, mi350: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ModuleType("aiter")
    monkeypatch.setitem(sys.modules, "aiter", other)
    assert reasons(registry, mi350, "ROCM_AITER_FA") == [
        says("cannot be run: UpstreamError: aiter has no module aiter.utility any more", "values", "fp8")
    ]


def test_signatures_are_read_as_python_reads_them(fake: Fake) -> None:
    needed = upstream.record().functions["mla_prefill_fwd"]

    assert list(needed.changes(UNREADABLE)) == [
        says("aiter's mla_prefill_fwd has no signature to compare with the record", "mla_prefill_fwd")
    ]
    hidden = list(needed.changes(lambda *args, **kwargs: None))
    assert len(hidden) == sum(p.passed for p in needed.parameters)
    assert replace(needed, parameters=()).signature == inspect.Signature()
