"""What a compiler makes of a kernel: the resources that it uses and a digest of its instructions, kept by what it is.

Compiling every kernel for every target takes several minutes, and gives the same each time for the same source, so the
facts are recorded in tests/data/compiled, a file for each version of Triton that was read (`READ` of
attnreg/kernels/triton/inside), under a key of all that the compiler is given: a kernel that is changed has another key,
and is compiled. ``make record-compiled`` writes the record of the installed version anew; the suite compiles some of
each target again, and holds them against it (tests/kernels/test_compile.py).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from support import DATA
from support.compilers.code_keys import keys_of_code
from support.compilers.descriptors import astray

FOLDER = DATA / "compiled"
# a product of matrices by four warps, and a copy of a box by the copy engine
PRODUCT, COPY = "HGMMA", "UTMALDG"


@dataclass(frozen=True)
class Facts:
    """``registers`` of a thread; ``spills``: bytes of them that did not fit; ``shared``: bytes of a program.

    serialised: ptxas could not keep the matrix products of a loop in flight, which costs a fifth of the speed. astray:
    the matrix products that read shared memory where nothing says. instructions: how often the code has `PRODUCT` and
    `COPY`, where it has them. digest: of the instructions, as text.
    """

    registers: int
    spills: int
    shared: int
    serialised: bool
    astray: list[str]
    instructions: dict[str, int]
    digest: str


@dataclass
class Kernel:
    """What a compiler is given: a source of Triton's or Gluon's, the GPU and the options."""

    source: Any
    gpu: Any
    options: Any

    @property
    def name(self) -> str:
        """The name of the function."""
        return str(self.source.fn.__name__)

    @cached_property
    def key(self) -> str:
        """A digest of all of it; the record is one for each version of the compiler."""
        from triton.compiler.compiler import make_backend

        backend = make_backend(self.gpu)
        options = vars(backend.parse_options(dict(self.options) | self.source.parse_options()))
        # wherever Triton is installed
        libraries = [(name, Path(path).name) for name, path in options["extern_libs"]]
        with keys_of_code():
            source = self.source.hash()
        parts = (source, backend.hash(), str(sorted({**options, "extern_libs": libraries}.items())))
        return hashlib.sha256("-".join(parts).encode()).hexdigest()[:32]

    @cached_property
    def compiled(self) -> Any:
        """The result of Triton's compiler."""
        import triton

        from attnreg.kernels.triton.inside.assembler import assembler_of

        with assembler_of(self.gpu.backend, self.gpu.arch):
            return triton.compile(self.source, target=self.gpu, options=self.options)

    @property
    def text(self) -> str:
        """The instructions: LLVM's for AMD, PTX for NVIDIA."""
        return str(self.compiled.asm["amdgcn" if "amdgcn" in self.compiled.asm else "ptx"])

    @property
    def facts(self) -> Facts:
        """As the record has them, or else of the kernel, compiled."""
        return recorded().get(self.key) or self.measured()

    def measured(self) -> Facts:
        """The facts of the kernel, compiled."""
        registers, spills, serialised = report(self.compiled)
        machine_code = disassembled(self.compiled)
        words = Counter(re.findall(r"\b[A-Z]+\b", machine_code))
        return Facts(
            registers=registers,
            spills=spills,
            shared=self.compiled.metadata.shared,
            serialised=serialised,
            astray=astray(machine_code),
            instructions={word: words[word] for word in (PRODUCT, COPY) if words[word]},
            digest=hashlib.sha256(self.text.encode()).hexdigest()[:32],
        )


def record_file() -> Path:
    """Where the facts of the Triton that is installed are, or would be."""
    import triton

    return FOLDER / f"triton-{triton.__version__}.jsonl.gz"


@cache
def recorded() -> dict[str, Facts]:
    """Key -> facts, for the Triton that is installed; empty if nothing was recorded of it, or with ATTNREG_FULL=1."""
    if os.environ.get("ATTNREG_FULL") or not record_file().is_file():
        return {}
    with gzip.open(record_file(), "rt", encoding="utf-8") as lines:
        return {line.pop("key"): Facts(**line) for line in map(json.loads, lines)}


def write_record(facts: dict[str, Facts]) -> None:
    """Write the record of the Triton that is installed."""
    text = "".join(json.dumps({"key": key} | asdict(facts[key])) + "\n" for key in sorted(facts))
    FOLDER.mkdir(parents=True, exist_ok=True)
    record_file().write_bytes(gzip.compress(text.encode(), mtime=0))


def report(compiled: Any) -> tuple[int, int, bool]:
    """Registers per thread, bytes of them that were spilled to memory, and whether matrix products were serialised."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        numbers = (re.search(rf"\.{word}:\s+(\d+)", text) for word in ("vgpr_count", "private_segment_fixed_size"))
        registers, spills = (int(number[1]) for number in numbers if number)
        return registers, spills, False
    from triton import knobs
    from triton.backends.nvidia.compiler import get_ptxas

    from attnreg.kernels.triton.inside.assembler import assembler_of

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(compiled.asm["cubin"])
        usage = _output(knobs.nvidia.cuobjdump.path, "-res-usage", str(file))
    found = (re.search(rf"\b{word}:(\d+)", usage) for word in ("REG", "STACK", "LOCAL"))
    registers, stack, local = (int(number[1]) for number in found if number)
    # ptxas may reserve a frame that no instruction uses
    used = stack + local and re.search(r"\b(STL|LDL)\b", disassembled(compiled))
    # only sm90 has asynchronous products, and only the assembler reports that it serialised them; Triton has several
    arch = compiled.metadata.target.arch
    with assembler_of("cuda", arch):
        serialised = arch == 90 and "serialized" in _output(
            get_ptxas(arch).path, "-v", "--gpu-name=sm_90a", "-o", os.devnull, "-", text=compiled.asm["ptx"]
        )
    return registers, stack + local if used else 0, serialised


def disassembled(compiled: Any) -> str:
    """The instructions that an NVIDIA GPU runs; nothing for other targets."""
    if "cubin" not in compiled.asm:
        return ""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(compiled.asm["cubin"])
        return _output(knobs.nvidia.nvdisasm.path, "-c", str(file))


def _output(*command: str, text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
