"""Matrix products of sm90 that read shared memory where nothing says, found in a kernel's machine code.

A warpgroup's matrix product is told by a descriptor in uniform registers where its operands are. CUDA 12.8's ptxas has
been seen to make descriptors of registers that nothing had set, or that held a kernel's parameter, where the code that
it was given adds to an address.
"""

from __future__ import annotations

import re

# the kernel's parameters are in constant memory from here on
_PARAMETERS = 0x210
_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s*(?:@!?U?P\w+\s+)?(\S+)\s*([^;]*)", re.MULTILINE)


def astray(sass: str) -> list[str]:
    """The matrix products whose operand's address is made of a parameter, or of what nothing defines.

    sass: as nvdisasm prints it. Registers are followed in the order of the text, not along its branches.
    """
    # uniform register -> what its value is made of
    made: dict[int, set[str]] = {}
    found = []
    for operation, text in _LINE.findall(sass):
        operands = [operand.strip() for operand in text.split(",")]
        if operation.startswith("HGMMA"):
            found += [
                f"{operation} {text.strip()}" for r in _addresses(text) if made.get(r, {"?"}) & {"?", "parameter"}
            ]
        target = re.match(r"UR(\d+)$", operands[0])
        if target is None:
            continue
        for half in range(2 if ".64" in operation else 1):
            made[int(target[1]) + half] = _sources(operation, operands[1:], half, made)
    return found


def _addresses(operands: str) -> list[int]:
    """The registers of the addresses of a product's operands; the first operand may be in registers itself."""
    descriptor = re.search(r"gdesc\[UR(\d+)\]", operands)
    if descriptor is None:
        return []
    first = int(descriptor[1])
    return [first + 2] if re.match(r"R\d+, R\d+", operands) else [first, first + 2]


def _sources(operation: str, operands: list[str], half: int, made: dict[int, set[str]]) -> set[str]:
    """What the result of an instruction for uniform registers is made of."""
    if operation.startswith("ULDC"):
        place = re.search(r"c\[0x0\]\[0x([0-9a-f]+)\]", operands[0])
        return {"parameter"} if place is not None and int(place[1], 16) >= _PARAMETERS else {"constant"}
    if operation.startswith(("R2UR", "S2UR")):
        return {"register"}
    registers = [int(r) + half for operand in operands for r in re.findall(r"UR(\d+)", operand)]
    return {"constant"}.union(*(made.get(r, {"?"}) for r in registers))
