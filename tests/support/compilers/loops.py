"""What the assembler makes of loops over keys. It is imported by a process that compiles alone (compiler.py)."""

from __future__ import annotations

import re

from support.compilers.compiled import PRODUCT, disassembled
from support.compilers.compiling import cases_of, kernels_of

LABEL, BACK = re.compile(r"^\s*(\.L\w+):"), re.compile(r"\bBRA\b.*`\((\.L\w+)\)")


def moves_to_uniform_registers(name: str) -> list[int]:
    """How often each loop with matrix products, of a case for SM 9.0, moves a register to one that threads share."""
    (case,) = (case for case in cases_of("sm90") if case.name == name)
    found = []
    for launched in kernels_of(case, "sm90"):
        places: dict[str, int] = {}
        lines = disassembled(launched.kernel.compiled).splitlines()
        for i, line in enumerate(lines):
            if label := LABEL.match(line):
                places[label[1]] = i
            back = BACK.search(line)
            if back and back[1] in places:
                loop = "\n".join(lines[places[back[1]] : i])
                found += [len(re.findall(r"\bR2UR\b", loop))] if PRODUCT in loop else []
    return found
