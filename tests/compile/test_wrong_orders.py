"""Wrong priorities and invariants, and what is wrong in several files: all of it is said at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.files import brief, refusal, row, write


def orders(platform: str, *lines: str) -> str:
    """priorities.yaml with one platform; its lines begin at line 2."""
    return f"{platform}:\n" + "".join(f"  {line}\n" for line in lines)


WRONG = {
    "an order that names an unknown backend": (
        "priorities",
        orders("gpu", "- name: all", "  order: [A, BB]"),
        """\
priorities.yaml:3:16: gpu.order: unknown backend `BB`
  help: did you mean `B`? (also: A)""",
    ),
    "an order for an unknown platform": (
        "priorities",
        orders("gpus", "- {name: all, order: [A]}"),
        """\
priorities.yaml:1:1: gpus: unknown platform `gpus`
  help: did you mean `gpu`? (also: npu)""",
    ),
    "an order without backends": (
        "priorities",
        orders("gpu", "- {name: all, order: []}"),
        """\
priorities.yaml:2:24: gpu.order: expected at least one item, got an empty list""",
    ),
    "an entry that is no backend": (
        "priorities",
        orders("gpu", "- {name: all, order: [[A]]}"),
        """\
priorities.yaml:2:25: gpu.order: expected a backend's name, or {backend: ..., if: ...}, got a list""",
    ),
    "an entry without its condition": (
        "priorities",
        orders("gpu", "- {name: all, order: [{backend: A}]}"),
        """\
priorities.yaml:2:25: gpu.order: `if` is missing
  help: `if`: when the automatic order considers it""",
    ),
    "a backend twice in an order": (
        "priorities",
        orders("gpu", "- {name: all, order: [A, {backend: A, if: {arch: g1}}]}"),
        """\
priorities.yaml:2:28: gpu.order: A stands twice in the order
  help: remove one, or give each an `if`""",
    ),
    "a row that does not run there": (
        "priorities",
        orders("npu", "- {name: all, order: [A]}"),
        """\
priorities.yaml:2:25: npu.order: A does not run on npu (it runs on gpu)""",
    ),
    "an order that is never reached": (
        "priorities",
        orders("gpu", "- {name: one, order: [A]}", "- {name: two, when: {arch: g1}, order: [B]}"),
        """\
priorities.yaml:3:5: gpu: the last order has a `when`
  help: end the list with an order that has no `when`
priorities.yaml:3:5: gpu: unreachable order: number 1 of the list has no `when`, so it takes everything
  help: remove or move one""",
    ),
    "an order after its like": (
        "priorities",
        orders(
            "gpu",
            "- {name: one, when: {arch: g1}, order: [A]}",
            "- {name: two, when: {arch: g1}, order: [B]}",
            "- {name: three, order: [B]}",
        ),
        """\
priorities.yaml:3:5: gpu: unreachable order: number 1 of the list has the same `when`
  help: remove or move one""",
    ),
    "a last order with a condition": (
        "priorities",
        orders("gpu", "- {name: one, when: {arch: g1}, order: [A]}"),
        """\
priorities.yaml:2:5: gpu: the last order has a `when`
  help: end the list with an order that has no `when`""",
    ),
    "two orders of one name": (
        "priorities",
        orders("gpu", "- {name: one, when: {arch: g1}, order: [A]}", "- {name: one, order: [B]}"),
        """\
priorities.yaml:3:12: gpu.name: gpu has an order one already
  help: give it a name of its own""",
    ),
    "an unknown facet in an order": (
        "priorities",
        orders(
            "gpu",
            "- {name: one, when: {head: 1}, order: [A]}",
            "- {name: two, order: [{backend: B, if: {flags: [fst]}}]}",
        ),
        """\
priorities.yaml:2:24: gpu.when.head: unknown facet `head`
  help: did you mean `num_heads`? (also: any, arch, attention, attn_type, block_size, dtype, eager, features, \
flags, head_size, head_size_v, index_topk, …)
priorities.yaml:3:51: gpu.order.if.flags: unknown flag 'fst'
  help: did you mean `fast`?""",
    ),
    "priorities that are a list": (
        "priorities",
        "- {name: all, order: [A]}\n",
        """\
priorities.yaml:1:1: the file: expected a mapping, got a list""",
    ),
    "an invariant that states two things": (
        "invariants",
        "invariants:\n  - {name: i, says: s, chosen: [A], never: [B]}\n",
        """\
invariants.yaml:2:5: invariants: an invariant states exactly one of `chosen`, `never` and `finds`""",
    ),
    "an invariant that states nothing": (
        "invariants",
        "invariants:\n  - {name: i, says: s}\n",
        """\
invariants.yaml:2:5: invariants: an invariant states exactly one of `chosen`, `never` and `finds`""",
    ),
    "an invariant of unknown backends": (
        "invariants",
        "invariants:\n  - {name: i, says: s, chosen: [A, null, C]}\n",
        """\
invariants.yaml:2:42: invariants.chosen: unknown backend `C`
  help: known: A, B""",
    ),
    "an unknown state of an invariant": (
        "invariants",
        "invariants:\n  - {name: i, says: s, finds: false, while: emulated}\n",
        """\
invariants.yaml:2:31: invariants.finds: expected `true`, got `false`
invariants.yaml:2:45: invariants.while: expected `native`, got `emulated`""",
    ),
}


@pytest.mark.parametrize(("file", "text", "message"), WRONG.values(), ids=WRONG)
def test_wrong_data(file: str, text: str, message: str, tmp_path: Path) -> None:
    assert brief(refusal(write(tmp_path, **{file: text}))) == message


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
  help: did you mean `status`? (also: attention, capabilities, consequences, contract, emulated, module, \
notes, only_on_request, options, phase, platforms, requires, …)
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
