"""Writes the machine code of the suite's compile cases, and compares the files of two trees.

A change that only rewords a kernel leaves its machine code identical:

    git worktree add ../before main
    (cd ../before; PYTHONPATH=.:tests python -m support.compilers.machine_code write /tmp/before sm90 gfx942)
    PYTHONPATH=.:tests python -m support.compilers.machine_code write /tmp/after sm90 gfx942
    PYTHONPATH=.:tests python -m support.compilers.machine_code compare /tmp/before /tmp/after

``write FOLDER [--full] [TARGET …]`` writes one file for each kernel, by default of all targets. --full adds the cases
that the suite compiles only with ATTNREG_FULL=1.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

os.environ |= {"TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1"}

from support.compilers.compiled import report
from support.compilers.compiling import TARGETS, cases_of, kernels_of


def write(folder: Path, targets: list[str], *, full: bool) -> None:
    """Compile the cases for the targets, and write each kernel's machine code and resources."""
    for target in targets:
        for case in cases_of(target, full=full):
            place = folder / target / re.sub(r"\W+", "-", case.name)
            place.mkdir(parents=True, exist_ok=True)
            for i, launched in enumerate(kernels_of(case, target)):
                about = launched.kernel.compiled.metadata
                registers, spills, _ = report(launched.kernel.compiled)
                uses = f"{registers} registers, {spills} bytes spilled, {about.shared} bytes shared"
                text = _normalised(launched.kernel.text, about.name)
                (place / f"{i}.s").write_text(f"{uses}, {about.num_warps} warps\n{text}", encoding="utf-8")


def _normalised(text: str, name: str) -> str:
    """Machine code without debug information, and without the kernel's name, because its length aligns comments."""
    lines = (" ".join(line.replace(name, "kernel").split()) for line in text.splitlines())
    return "\n".join(line for line in lines if not line.startswith((".file", ".loc", ".ident"))) + "\n"


def compare(before: Path, after: Path) -> bool:
    """Print the files that differ. Returns whether none does."""
    old, new = ({str(file.relative_to(root)) for file in root.rglob("*.s")} for root in (before, after))
    only = [f"only in {root}: {file}" for root, files in ((before, old - new), (after, new - old)) for file in files]
    differ = [
        f"differs: {file}" for file in sorted(old & new) if (before / file).read_bytes() != (after / file).read_bytes()
    ]
    sys.stdout.write("".join(f"{line}\n" for line in sorted(only) + differ))
    sys.stdout.write(f"{len(old & new) - len(differ)} of {len(old | new)} kernels are the same\n")
    return bool(old | new) and not only and not differ


if __name__ == "__main__":
    verb, *words = sys.argv[1:]
    names = [word for word in words if word != "--full"]
    if verb == "compare":
        sys.exit(not compare(Path(names[0]), Path(names[1])))
    write(Path(names[0]), names[1:] or list(TARGETS), full="--full" in words)
