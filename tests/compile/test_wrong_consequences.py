"""Wrong statements of what follows from a choice: each is refused with its place and the cure."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.files import brief, refusal, row, write

SIZE = "expected a size of 1 B to 1024 TiB, with its unit (B, KiB, MiB or GiB), as 394 MiB"
WRONG = {
    "nothing that follows": (
        "{when: {dtype: float16}}",
        """\
10:7: backends.A.consequences: states nothing that follows
  help: state one of fails, runs, workspace, kernel_blocks, stores; the list may have several items""",
    ),
    "two things at once": (
        '{fails: "it does", workspace: 1 MiB}',
        """\
10:7: backends.A.consequences: states fails and workspace
  help: state one of fails, runs, workspace, kernel_blocks, stores; the list may have several items""",
    ),
    "a size without a unit": (
        "{workspace: '394'}",
        f"""\
10:19: backends.A.consequences.workspace: {SIZE}, got `394`""",
    ),
    "a size of nothing": (
        "{workspace: 0 MiB}",
        f"""\
10:19: backends.A.consequences.workspace: {SIZE}, got `0 MiB`""",
    ),
    "a size that is a number": (
        "{workspace: 394}",
        f"""\
10:19: backends.A.consequences.workspace: {SIZE}, got `394`""",
    ),
    "a size that no GPU has": (
        "{workspace: 99999999999999999999 GiB}",
        f"""\
10:19: backends.A.consequences.workspace: {SIZE}, got `99999999999999999999 GiB`""",
    ),
    "a size that is a little too large": (
        "{workspace: 1048577 GiB}",
        f"""\
10:19: backends.A.consequences.workspace: {SIZE}, got `1048577 GiB`""",
    ),
    "no bytes for each element": (
        "{workspace: 4 MiB, per_query_element: 0}",
        """\
10:45: backends.A.consequences.per_query_element: expected an integer of at least 1, got `0`""",
    ),
    "bytes for each element that are no number": (
        "{workspace: 4 MiB, per_query_element: true}",
        """\
10:45: backends.A.consequences.per_query_element: expected an integer, got `true`""",
    ),
    "more bytes for each element than there are": (
        "{workspace: 4 MiB, per_query_element: 4294967296}",
        """\
10:45: backends.A.consequences.per_query_element: expected an integer of at most 2147483647, got `4294967296`""",
    ),
    "elements without a workspace": (
        "{kernel_blocks: 16, per_query_element: 4}",
        """\
10:27: backends.A.consequences.per_query_element: is about a workspace, which is not stated""",
    ),
    "a remark on a failure": (
        "{fails: it does, says: rarely}",
        """\
10:24: backends.A.consequences.says: `fails` is the whole sentence
  help: put it there""",
    ),
    "a failure without a word": (
        "{fails: ''}",
        """\
10:15: backends.A.consequences.fails: expected a text with something in it, got ``""",
    ),
    "a kernel that is only spaces": (
        "{runs: '  '}",
        """\
10:14: backends.A.consequences.runs: expected a text with something in it, got `  `""",
    ),
    "blocks of no size": (
        "{kernel_blocks: [16, any]}",
        """\
10:28: backends.A.consequences.kernel_blocks: expected tokens, 1 to 2147483647, or {multiple_of: 16}, got `any`""",
    ),
    "an unknown word in its condition": (
        "{when: {dtype: float61}, fails: it does}",
        """\
10:22: backends.A.consequences.when.dtype: unknown dtype 'float61'
  help: did you mean `float16`? (also: bfloat16)""",
    ),
    "a KV dtype that does not exist": (
        "{stores: float61}",
        """\
10:16: backends.A.consequences.stores: unknown KV dtype `float61`
  help: known: auto, fp8""",
    ),
    "a source that is pinned nowhere": (
        "{fails: it does, source: 't:p#q'}",
        """\
10:32: backends.A.consequences.source: unknown source `t`
  help: known: s""",
    ),
}


@pytest.mark.parametrize(("item", "message"), WRONG.values(), ids=WRONG)
def test_wrong_consequences(item: str, message: str, tmp_path: Path) -> None:
    text = row("capabilities: {}", f"consequences: [{item}]")
    text = text.replace(f"consequences: [{item}]", f"consequences:\n    - {item}")
    assert brief(refusal(write(tmp_path, backends=text))) == f"backends.yaml:{message}"


@pytest.mark.parametrize(
    "blocks", ["0", "-16", "'16'", "true", "[]", "{min: 16}", "{multiple_of: 0}", "[16, {}]", "1.5"]
)
def test_blocks_are_sizes_or_multiples(blocks: str, tmp_path: Path) -> None:
    message = refusal(write(tmp_path, backends=row("capabilities: {}", f"consequences: [{{kernel_blocks: {blocks}}}]")))
    assert "backends.yaml:9:" in message
    assert "kernel_blocks" in message
    assert "Data" not in message
    assert "constrained" not in message


def test_a_rule_says_something(tmp_path: Path) -> None:
    text = row("capabilities: {}", "rules: [{when: {dtype: float16}, reject: ''}]")
    assert "rules.reject: expected a text with something in it" in refusal(write(tmp_path, backends=text))
