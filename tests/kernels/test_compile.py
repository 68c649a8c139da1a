"""Every kernel compiles for every target without a GPU, in its default configurations, within the target's means.

The facts of kernels that have not changed come from a record (support/compilers/compiled.py). With ATTNREG_FULL=1 all
cases are compiled for all targets, which takes long.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import triton
from support.compilers import spills
from support.compilers.compiled import record_file
from support.compilers.compiler import Compiler
from support.compilers.compiling import CAUSAL_TARGETS, TARGETS, cases_of

from attnreg.kernels.triton.inside.releases import READ


@pytest.fixture(scope="session")
def causal_compiler() -> Iterator[Compiler]:
    """One in which the attention kernel has no path but that of causal batches."""
    compiler = Compiler(causal_only=True)
    yield compiler
    compiler.close()


@pytest.mark.parametrize("target", TARGETS)
def test_default_configurations_fit(compiler: Compiler, target: str) -> None:
    full = bool(os.environ.get("ATTNREG_FULL"))
    cases = cases_of(target, full=full)
    found = compiler.usages(cases, target)
    assert {usage.case for usage in found} == {case.name for case in cases}
    for usage in found:
        assert usage.facts.shared <= usage.limit, usage
        assert not usage.facts.serialised, usage
        assert not usage.facts.astray, usage
    default = {case.name for case in cases_of(target)}
    spilled = [((target, x.case, x.kernel), x.facts.spills) for x in found if x.case in default]
    other = spills.problems(spilled, triton.__version__)
    assert not other, "\n".join(["registers spill; mend the kernels, or tests/data/compiled/spills.yaml:", *other])
    # in six rare ones ptxas gives up a register or two, of 128, to keep two programs on a multiprocessor
    assert all(x.facts.spills <= 8 for x in found if x.case not in default)


@pytest.mark.parametrize("target", CAUSAL_TARGETS)
def test_a_causal_batch_pays_nothing_for_the_other_kind(
    compiler: Compiler, causal_compiler: Compiler, target: str
) -> None:
    as_it_is, cut = (process.digests(target) for process in (compiler, causal_compiler))
    assert sum("attention_kernel" in kernel for _, kernel, _ in as_it_is) >= 5
    assert as_it_is == cut


@pytest.mark.parametrize("merges", [True, False])
def test_no_rounding_depends_on_the_code_around_it(compiler: Compiler, merges: bool) -> None:
    """Parts by row and parts by request are merged by other code, and a batch without ranges is computed by other code
    than one with them: a product and a sum that are fused in one of them would give a request other bits."""
    found = compiler.call("fusion", "free", merges)
    assert len(found) >= 3
    assert not any(found.values()), found


def test_parts_are_stored_by_16_bytes(compiler: Compiler) -> None:
    """A part lies at a place that 16 bytes divide, which nothing but its offset tells the compiler."""
    found = compiler.call("parts", "stored")
    assert len(found) == 5
    assert all(0 < needed <= counted for counted, needed in found.values()), found


def test_a_merge_sums_parts_without_waiting(compiler: Compiler) -> None:
    """Each thread has its columns of all parts: only the layout of what is stored may need the others."""
    found = compiler.call("parts", "waits")
    assert len(found) >= 3
    assert max(found.values()) <= 1, found


def test_the_environment_chooses_no_assembler(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    for_ampere, for_blackwell = compiler.call("compiler", "assemblers")
    assert for_ampere != for_blackwell
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", for_ampere)
    other = Compiler()
    try:
        assert other.call("compiler", "assemblers") == [for_ampere, for_blackwell]
    finally:
        other.close()


def test_there_is_a_record_of_each_triton_that_was_read() -> None:
    command = "make record-compiled PYTHON_WITH=PATH, of a python that has it"
    if triton.__version__ in READ:
        assert record_file().is_file(), f"nothing was recorded of Triton {triton.__version__}: {command}"
    # none of another, which nothing would hold against its compiler
    assert {file.name for file in record_file().parent.glob("triton-*")} <= {f"triton-{x}.jsonl.gz" for x in READ}


LISTED = {("sm90", "decode", "attention"): {"3.8.0": 24}, ("sm80", "prefill", "merge"): {"3.9.0": 8}}


def test_what_all_threads_have_alike_is_in_registers_that_they_share(compiler: Compiler) -> None:
    """Triton 3.8 ends a reduction with an exchange between threads, behind which the assembler sees no such number."""
    moves = compiler.call("loops", "moves_to_uniform_registers", "prefill")
    assert len(moves) == 2
    assert max(moves) <= 3


@pytest.mark.parametrize("target", ["gfx90a", "gfx942", "gfx950", "gfx1100"])
def test_llvm_is_told_by_an_intrinsic_what_all_threads_have_alike(compiler: Compiler, target: str) -> None:
    """LLVM inserts the idle cycles that the instruction needs, but not within inline assembly."""
    numbers, convergent, assembly = compiler.call("first_lanes", "told", target, "prefill")["_attention_kernel"]
    assert numbers == 1
    assert convergent
    assert "v_readfirstlane" not in assembly


@pytest.mark.parametrize(
    ("spilled", "version", "expected"),
    [
        ([("sm90", 0), ("sm90", 24)], "3.8.0", []),
        ([("sm90", 0)], "3.9.0", []),
        ([("sm90", 8)], "3.9.0", ['- {target: sm90, case: "decode", kernel: attention, bytes: {3.9.0: 8}}']),
        # mended, and still listed
        ([("sm90", 0)], "3.8.0", ['- {target: sm90, case: "decode", kernel: attention, bytes: {3.8.0: 0}}']),
    ],
)
def test_what_spills_is_what_is_listed(spilled: list[tuple[str, int]], version: str, expected: list[str]) -> None:
    found = [((target, "decode", "attention"), count) for target, count in spilled]
    assert spills.problems(found, version, listed=LISTED) == expected


@pytest.mark.skipif(not record_file().is_file(), reason="nothing was recorded of the Triton that is installed")
@pytest.mark.skipif(bool(os.environ.get("ATTNREG_FULL")), reason="everything is compiled, nothing taken from a record")
@pytest.mark.parametrize("target", TARGETS)
def test_the_record_is_whole_and_what_the_compiler_gives(compiler: Compiler, target: str) -> None:
    found = compiler.recorded_and_measured(target, 25)
    changed = sorted({name for name, recorded, _ in found if recorded is None})
    assert not changed, (
        f"not as they were recorded: {', '.join(changed)}. Run `make record-compiled`, and commit the record together "
        "with the change of the kernels"
    )
    anew = [(name, recorded, measured) for name, recorded, measured in found if measured is not None]
    assert len(anew) >= 3
    for name, recorded, measured in anew:
        assert recorded == measured, f"the compiler gives {name} another machine code than was recorded"
