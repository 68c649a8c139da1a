"""Compiles every kernel of the suite for every target, and writes what the compiler made of them (compiled.py).

    PYTHONPATH=.:tests python -m support.record_compiled

Kernels that the record has are taken from it: what is compiled is what has changed. With ATTNREG_FULL=1 all are, in
about eight minutes of a processor.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from support.compiled import Facts, record_file, write_record
from support.compiler import ENVIRONMENT
from support.compiling import CAUSAL_TARGETS, TARGETS


def facts_of(target: str, causal_only: bool) -> dict[str, Facts]:
    """Key -> facts of each kernel of a target, or of those that `causal_only` cuts."""
    os.environ |= ENVIRONMENT
    from support import causal_only as cutting
    from support.compiling import every_kernel

    if causal_only:
        cutting.cut()
    kernels = cutting.causal_kernels(target) if causal_only else every_kernel(target)
    return {kernel.key: kernel.facts for kernel in kernels}


def main() -> int:
    """Write the record of the Triton that is installed."""
    parts = [(target, False) for target in TARGETS] + [(target, True) for target in CAUSAL_TARGETS]
    facts: dict[str, Facts] = {}
    # a process for each part: what is cut out stays cut out
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), max_tasks_per_child=1) as pool:
        for found in pool.map(facts_of, *zip(*parts, strict=True)):
            facts |= found
    write_record(facts)
    sys.stdout.write(f"wrote {len(facts)} kernels to {record_file()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
