"""Wrong statements of what follows from a choice: each is refused with its place and the cure."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.registries.files import brief, refusal, row, write
from support.suite.sentences import Sentences

WRONG = {
    "nothing that follows": ("{when: {dtype: float16}}", "10:7"),
    "two things at once": ('{fails: "it does", workspace: 1 MiB}', "10:7"),
    "a size without a unit": ("{workspace: '394'}", "10:19"),
    "a size of nothing": ("{workspace: 0 MiB}", "10:19"),
    "a size that is a number": ("{workspace: 394}", "10:19"),
    "a size that no GPU has": ("{workspace: 99999999999999999999 GiB}", "10:19"),
    "a size that is a little too large": ("{workspace: 1048577 GiB}", "10:19"),
    "no bytes for each element": ("{workspace: 4 MiB, per_query_element: 0}", "10:45"),
    "bytes for each element that are no number": ("{workspace: 4 MiB, per_query_element: true}", "10:45"),
    "more bytes for each element than there are": ("{workspace: 4 MiB, per_query_element: 4294967296}", "10:45"),
    "elements without a workspace": ("{kernel_blocks: 16, per_query_element: 4}", "10:27"),
    "a remark on a failure": ("{fails: it does, says: rarely}", "10:24"),
    "a failure without a word": ("{fails: ''}", "10:15"),
    "a kernel that is only spaces": ("{runs: '  '}", "10:14"),
    "blocks of no size": ("{kernel_blocks: [16, any]}", "10:28"),
    "an unknown word in its condition": ("{when: {dtype: float61}, fails: it does}", "10:22"),
    "a KV dtype that does not exist": ("{stores: float61}", "10:16"),
    "a source that is pinned nowhere": ("{fails: it does, source: 't:p#q'}", "10:32"),
}


@pytest.mark.parametrize(("item", "places"), WRONG.values(), ids=WRONG)
def test_wrong_consequences(item: str, places: str, tmp_path: Path, sentences: Sentences) -> None:
    text = row("capabilities: {}", f"consequences: [{item}]")
    text = text.replace(f"consequences: [{item}]", f"consequences:\n    - {item}")
    sentences.check(brief(refusal(write(tmp_path, backends=text))), places)


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
