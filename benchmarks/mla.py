"""Measure the MLA family on a GPU: merging of states, decode, prefill; each case beside its mark and its peers.

python benchmarks/mla.py                 print a table
python benchmarks/mla.py --case merge    only the cases with this word in their names
python benchmarks/mla.py --record        write benchmarks/results/mla.json too
python benchmarks/mla.py --dry-run       run every case at small sizes, on a processor with TRITON_INTERPRET=1

A sample is taken as in benchmarks/attention.py: a CUDA graph's replay of one call, with a cold L2 cache. Peers are
measured in the same run where they can be imported: vLLM's and FlashInfer's kernels, FlashMLA, and torch's attention.
Each kind of case is a module beside this, with a function `cases`.
"""

from __future__ import annotations

from collections.abc import Iterator

import mla_decode
import mla_merge
import mla_prefill
from kernel_case import Case, Place, run

KINDS = (mla_merge, mla_decode, mla_prefill)


def cases(place: Place, word: str) -> Iterator[Case]:
    """The cases of all kinds with a word in their names."""
    return (case for kind in KINDS for case in kind.cases(place) if word in case.name)


if __name__ == "__main__":
    run("mla", __doc__, cases)
