"""What reaches a kernel, a lock, a hash or a record is the same in every environment.

It depends on no processor, number of threads, locale, order of a directory or of a hash table: two processes that
differ in all of these compute a digest of each thing (support/suite/digests.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from support import ROOT

# nothing is taken from what another process has kept
HERE = {"XDG_CACHE_HOME": "none", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "PYTHONUTF8": "1"}
HERE |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "1"}
THERE = HERE | {
    # a processor without AVX2 and fused products, for PyTorch, MKL and the C library
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA,-FMA4,-AVX2,-AVX512F",
    "OMP_NUM_THREADS": "2",
    "PYTHONHASHSEED": "2",
    # ASCII
    "LC_ALL": "C",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "TZ": "Asia/Kathmandu",
}


@pytest.mark.slow(reason="two processes make the kernels of three targets")
def test_what_reaches_kernels_and_records_is_the_same_in_another_environment() -> None:
    here, there = _found(_begun(HERE), _begun(THERE, "--backwards"))
    differ = [name for name in here["digests"] | there["digests"] if _digest(here, name) != _digest(there, name)]
    assert not differ, f"{len(differ)} depend on the processor or the environment, such as {'; '.join(differ[:10])}"
    assert len(here["digests"]) > 300
    # the environments are unlike
    assert there["environment"]["capability"] in ("DEFAULT", "NO AVX")
    for name in ("threads", "encoding", "hash", "directory"):
        assert here["environment"][name] != there["environment"][name], name


def _begun(variables: dict[str, str], *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "support.suite.digests", *options]
    environment = os.environ | variables
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _found(*processes: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    ended = [(process, *process.communicate()) for process in processes]
    for process, _, errors in ended:
        assert process.returncode == 0, errors.decode(errors="replace")
    return [json.loads(out) for _, out, _ in ended]


def _digest(found: dict[str, Any], name: str) -> Any:
    return found["digests"].get(name)
