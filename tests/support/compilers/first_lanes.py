"""How LLVM is told what all threads have alike. It is imported by a process that compiles alone (compiler.py)."""

from __future__ import annotations

import re

from support.compilers.compiling import cases_of, kernels_of

NAME = "llvm.amdgcn.readfirstlane.i32"


def told(target: str, name: str) -> dict[str, tuple[int, bool, str]]:
    """Of each kernel of a case for one of AMD's: how many numbers, whether convergently, and all inline assembly."""
    (case,) = (case for case in cases_of(target) if case.name == name)
    found = {}
    for launched in kernels_of(case, target):
        texts = launched.kernel.compiled.asm
        group = re.search(rf"^declare .*@{re.escape(NAME)}\(.*(#\d+)$", texts["llir"], re.MULTILINE)
        attributes = re.search(rf"^attributes {group[1]} = .*$", texts["llir"], re.MULTILINE) if group else None
        assembly = re.findall(r"#ASMSTART(.*?)#ASMEND", texts["amdgcn"], re.DOTALL)
        found[launched.kernel.name] = (
            texts["ttgir"].count(f'symbol = "{NAME}"'),
            bool(attributes and "convergent" in attributes[0].split()),
            "".join(assembly),
        )
    return found
