"""Wrong priorities and invariants, and what is wrong in several files: all of it is said at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.registries.files import brief, refusal, row, write
from support.suite.sentences import Sentences


def orders(platform: str, *lines: str) -> str:
    """priorities.yaml with one platform; its lines begin at line 2."""
    return f"{platform}:\n" + "".join(f"  {line}\n" for line in lines)


WRONG = {
    "an order that names an unknown backend": ("priorities", orders("gpu", "- name: all", "  order: [A, BB]"), "3:16"),
    "an order for an unknown platform": ("priorities", orders("gpus", "- {name: all, order: [A]}"), "1:1"),
    "an order without backends": ("priorities", orders("gpu", "- {name: all, order: []}"), "2:24"),
    "an entry that is no backend": ("priorities", orders("gpu", "- {name: all, order: [[A]]}"), "2:25"),
    "an entry without its condition": ("priorities", orders("gpu", "- {name: all, order: [{backend: A}]}"), "2:25"),
    "a backend twice in an order": (
        "priorities",
        orders("gpu", "- {name: all, order: [A, {backend: A, if: {arch: g1}}]}"),
        "2:28",
    ),
    "a row that does not run there": ("priorities", orders("npu", "- {name: all, order: [A]}"), "2:25"),
    "an order that is never reached": (
        "priorities",
        orders("gpu", "- {name: one, order: [A]}", "- {name: two, when: {arch: g1}, order: [B]}"),
        "3:5 3:5",
    ),
    "an order after its like": (
        "priorities",
        orders(
            "gpu",
            "- {name: one, when: {arch: g1}, order: [A]}",
            "- {name: two, when: {arch: g1}, order: [B]}",
            "- {name: three, order: [B]}",
        ),
        "3:5",
    ),
    "a last order with a condition": (
        "priorities",
        orders("gpu", "- {name: one, when: {arch: g1}, order: [A]}"),
        "2:5",
    ),
    "two orders of one name": (
        "priorities",
        orders("gpu", "- {name: one, when: {arch: g1}, order: [A]}", "- {name: one, order: [B]}"),
        "3:12",
    ),
    "an unknown facet in an order": (
        "priorities",
        orders(
            "gpu",
            "- {name: one, when: {head: 1}, order: [A]}",
            "- {name: two, order: [{backend: B, if: {flags: [fst]}}]}",
        ),
        "2:24 3:51",
    ),
    "priorities that are a list": ("priorities", "- {name: all, order: [A]}\n", "1:1"),
    "an invariant that states two things": (
        "invariants",
        "invariants:\n  - {name: i, says: s, chosen: [A], never: [B]}\n",
        "2:5",
    ),
    "an invariant that states nothing": ("invariants", "invariants:\n  - {name: i, says: s}\n", "2:5"),
    "an invariant of unknown backends": (
        "invariants",
        "invariants:\n  - {name: i, says: s, chosen: [A, null, C]}\n",
        "2:42",
    ),
    "an unknown state of an invariant": (
        "invariants",
        "invariants:\n  - {name: i, says: s, finds: false, while: emulated}\n",
        "2:31 2:45",
    ),
}


@pytest.mark.parametrize(("file", "text", "places"), WRONG.values(), ids=WRONG)
def test_wrong_data(file: str, text: str, places: str, tmp_path: Path, sentences: Sentences) -> None:
    sentences.check(brief(refusal(write(tmp_path, **{file: text}))), places)


def test_problems_of_several_files_come_together_each_with_its_line(tmp_path: Path) -> None:
    files = {
        "backends": row("capabilities: {dtypes: [float61]}", "statuss: stable"),
        "priorities": orders("gpu", "- {name: all, order: [A, C]}"),
        "invariants": "invariants:\n  - {name: i, says: s, never: [A], when: {role: drft}}\n",
    }
    assert refusal(write(tmp_path, **files)) == (
        """\
backends.yaml:8:29: backends.A.capabilities.dtypes: unknown dtype 'float61'
    8 |     capabilities: {dtypes: [float61]}
      |                             ^^^^^^^
  help: did you mean `float16`? (also: bfloat16)
backends.yaml:9:5: backends.A: unknown key `statuss`
    9 |     statuss: stable
      |     ^^^^^^^
  help: did you mean `status`? (also: attention, capabilities, consequences, contract, emulated, graphs, \
layouts, module, notes, only_on_request, options, phase, …)
priorities.yaml:2:28: gpu.order: unknown backend `C`
    2 |   - {name: all, order: [A, C]}
      |                            ^
  help: known: A, B
invariants.yaml:2:49: invariants.when.role: unknown role 'drft'
    2 |   - {name: i, says: s, never: [A], when: {role: drft}}
      |                                                 ^^^^
  help: did you mean `draft`? (also: target)"""
    )


@pytest.mark.parametrize("broken", ["capabilities: [x]", "status: new", "rules: [{reject: r}]"])
def test_a_row_that_is_wrong_is_no_unknown_backend(broken: str, tmp_path: Path) -> None:
    message = refusal(write(tmp_path, backends=row(broken)))
    assert "unknown backend" not in message
    assert "backends.yaml:8:" in message


def test_an_unreadable_file_hides_no_problem_of_another(tmp_path: Path) -> None:
    files = {"backends": "backends: [\n", "priorities": "gpu: 1\n", "invariants": "invariants: [{name: i}]\n"}
    assert brief(refusal(write(tmp_path, **files))).splitlines() == [
        "backends.yaml:1:12: not valid YAML: while parsing a flow node did not find expected node content",
        "priorities.yaml:1:1: the file is no list of orders: it has no key of one",
        "  help: its keys are order",
        "invariants.yaml:1:14: invariants: `says` is missing",
        "  help: `says`: the statement in words",
    ]
