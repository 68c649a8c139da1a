"""Compiles every kernel of the suite for every target, and writes what the compiler made of them (compiled.py).

    PYTHONPATH=.:tests python -m support.compilers.record_compiled [TARGET …]

or `make record-compiled`, with PYTHON_WITH=PATH by a python that has another Triton. Kernels that the record has are
taken from it: what is compiled is what has changed. With ATTNREG_FULL=1 all are, in about eight minutes of a processor.
Of some targets alone, it only tries whether they compile.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from attnreg.errors import in_a_line
from support.compilers.compiled import Facts, record_file, write_record
from support.compilers.compiler import prepare_environment
from support.compilers.compiling import CAUSAL_TARGETS, TARGETS


def facts_of(target: str, causal_only: bool) -> tuple[dict[str, Facts], list[str]]:
    """Key -> facts of each kernel of a target, or of those that `causal_only` cuts; why others do not compile."""
    prepare_environment()
    from support.compilers import causal_only as cutting
    from support.compilers.compiling import every_kernel

    if causal_only:
        cutting.cut()
    kernels = cutting.causal_kernels(target) if causal_only else every_kernel(target)
    facts: dict[str, Facts] = {}
    problems = []
    for kernel in kernels:
        try:
            facts[kernel.key] = kernel.facts
        # a compiler may fail in any way
        except Exception as e:
            problems.append(f"{target}: {kernel.name} does not compile: {in_a_line(e)}")
    return facts, problems


def main(targets: list[str]) -> int:
    """Write the record of the Triton that is installed, or try some targets alone."""
    parts = [(target, False) for target in targets or TARGETS]
    parts += [(target, True) for target in CAUSAL_TARGETS if target in (targets or TARGETS)]
    facts: dict[str, Facts] = {}
    problems: list[str] = []
    # a process for each part: what is cut out stays cut out
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), max_tasks_per_child=1) as pool:
        for found, failed in pool.map(facts_of, *zip(*parts, strict=True)):
            facts |= found
            problems += failed
    if problems:
        sys.stderr.write("".join(f"{problem}\n" for problem in dict.fromkeys(problems)) + "nothing is written\n")
        return 1
    if targets:
        sys.stdout.write(f"{len(facts)} kernels of {', '.join(targets)} compile; only a record of all is written\n")
        return 0
    write_record(facts)
    sys.stdout.write(f"wrote {len(facts)} kernels to {record_file()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
