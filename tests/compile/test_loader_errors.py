"""Wrong data: whatever is wrong is said, with its place and the cure, all of it at once, and nothing else is raised."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.files import brief, refusal, row, write

import attnreg


def orders(platform: str, *lines: str) -> str:
    """priorities.yaml with one platform; its lines begin at line 2."""
    return f"{platform}:\n" + "".join(f"  {line}\n" for line in lines)


# wrong data: the file, its text, and what is printed (without the lines of source, which test_source covers)
WRONG = {
    "an unknown key": (
        "backends",
        row("capabilites: {}", "capabilities: {}"),
        """\
backends.yaml:8:5: backends.A: unknown key `capabilites`
  help: did you mean `capabilities`? (also: attention, emulated, module, notes, only_on_request, phase, platforms, \
requires, rules, since, source, status, …)""",
    ),
    "a missing key": (
        "backends",
        row(),
        """\
backends.yaml:3:3: backends.A: `capabilities` is missing
  help: every entry of this kind must have it""",
    ),
    "a value of the wrong kind": (
        "backends",
        row("capabilities: [float16]", "notes: one", "status: new", "since: 1"),
        """\
backends.yaml:8:19: backends.A.capabilities: expected a mapping, got a list
backends.yaml:9:12: backends.A.notes: expected a list, got `one`
backends.yaml:10:13: backends.A.status: expected `stable`, `experimental` or `deprecated`, got `new`
backends.yaml:11:12: backends.A.since: expected text, got `1`
  help: quote it""",
    ),
    "a row that is no mapping": (
        "backends",
        "backends: {A: fast, B: }\n",
        """\
backends.yaml:1:15: backends.A: expected a mapping, got `fast`
backends.yaml:1:24: backends.B: expected a mapping, got `null`""",
    ),
    "a duplicate backend": (
        "backends",
        row("capabilities: {}") + "  A: {}\n",
        """\
backends.yaml:15:3: `A` is given twice (first on line 3)
  help: keep one of the two""",
    ),
    "an unknown capability": (
        "backends",
        row("capabilities: {dtype: [float16]}"),
        """\
backends.yaml:8:20: backends.A.capabilities.dtype: unknown capability `dtype`
  help: did you mean `dtypes`? (also: add, block_sizes, features, head_sizes, head_sizes_v, kv_dtypes, num_heads, \
num_kv_heads, remove)""",
    ),
    "an unknown word in a claim": (
        "backends",
        row("capabilities: {dtypes: [float16, float61]}"),
        """\
backends.yaml:8:38: backends.A.capabilities.dtypes: unknown dtype 'float61'
  help: did you mean `float16`? (also: bfloat16)""",
    ),
    "an unknown feature": (
        "backends",
        row("capabilities: {features: [sink, 5]}"),
        """\
backends.yaml:8:31: backends.A.capabilities.features: unknown feature `sink`
  help: did you mean `sinks`? (also: alibi)
backends.yaml:8:37: backends.A.capabilities.features: expected a feature, got `5`
  help: known: alibi, sinks""",
    ),
    "features as one word": (
        "backends",
        row("capabilities: {features: sinks}"),
        """\
backends.yaml:8:30: backends.A.capabilities.features: expected a list of features, got `sinks`""",
    ),
    "an empty claim": (
        "backends",
        row("capabilities:", "  dtypes:", "  head_sizes: []"),
        """\
backends.yaml:9:7: backends.A.capabilities.dtypes: the claim is empty
  help: state what is accepted; `any` accepts every value
backends.yaml:10:19: backends.A.capabilities.head_sizes: the list is empty
  help: name at least one value""",
    ),
    "an empty range": (
        "backends",
        row("capabilities: {head_sizes: {min: 65, max: 64}}"),
        """\
backends.yaml:8:32: backends.A.capabilities.head_sizes: nothing is 65 to 64: the range is empty
  help: mend its bounds, or remove it""",
    ),
    "an unknown platform": (
        "backends",
        row("capabilities: {}").replace("[gpu]", "[gpu, gpus]"),
        """\
backends.yaml:5:22: backends.A.platforms: unknown platform 'gpus'
  help: did you mean `gpu`? (also: npu)""",
    ),
    "a feature native and emulated": (
        "backends",
        row("capabilities: {features: [sinks]}", "emulated: {sinks: a detour}"),
        """\
backends.yaml:9:16: backends.A.emulated.sinks: is listed under `features` too
  help: keep one of the two""",
    ),
    "an unknown emulated feature": (
        "backends",
        row("capabilities: {}", "emulated: {snks: a detour}"),
        """\
backends.yaml:9:16: backends.A.emulated.snks: unknown feature `snks`
  help: did you mean `sinks`? (also: alibi)""",
    ),
    "an unknown word that is not checked": (
        "backends",
        row("capabilities: {}", "unchecked: [sinks, dtype, heads]"),
        """\
backends.yaml:9:31: backends.A.unchecked: unknown feature or facet `heads`
  help: did you mean `num_heads`? (also: alibi, block_size, dtype, head_size, head_size_v, kv_dtype, num_kv_heads, \
sinks)""",
    ),
    "an unknown source": (
        "backends",
        row("capabilities: {}").replace("s:path", "t:path", 1),
        """\
backends.yaml:7:13: backends.A.source: unknown source `t`
  help: known: s""",
    ),
    "a source without a symbol": (
        "backends",
        row("capabilities: {}").replace("#symbol", "", 1),
        """\
backends.yaml:7:13: backends.A.source: `s:path` is not <source>:<path>#<symbol>""",
    ),
    "a module that is no path": (
        "backends",
        row("capabilities: {}", "module: numpy"),
        """\
backends.yaml:9:13: backends.A.module: `numpy` is not a dotted module path""",
    ),
    "a module of a stranger": (
        "backends",
        row("capabilities: {}", "module: os.path"),
        """\
backends.yaml:9:13: backends.A.module: the package os is not trusted to be imported
  help: trust it explicitly: load_registry(..., trust=['os']), --trust os, or an entry point""",
    ),
    "a module of attnreg that is no kernel": (
        "backends",
        row("capabilities: {}", "module: attnreg.cli"),
        """\
backends.yaml:9:13: backends.A.module: the kernel modules of attnreg itself are those in attnreg.kernels""",
    ),
    "a condition on an unknown facet": (
        "backends",
        row("capabilities: {}", "requires: {archs: g1}"),
        """\
backends.yaml:9:16: backends.A.requires.archs: unknown facet `archs`
  help: did you mean `arch`? (also: any, attention, attn_type, block_size, dtype, eager, features, flags, \
head_size, head_size_v, index_topk, kv_dtype, …)""",
    ),
    "a rule that rejects everything": (
        "backends",
        row("capabilities: {}", "rules:", "  - {when: {}, reject: never}"),
        """\
backends.yaml:10:16: backends.A.rules.when: the rule rejects everything
  help: say which combination fails""",
    ),
    "a rule after its like": (
        "backends",
        row("capabilities: {}", "rules:", "  - {when: {arch: g1}, reject: a}", "  - {when: {arch: g1}, reject: b}"),
        """\
backends.yaml:11:9: backends.A.rules: unreachable rule: number 1 of the list has the same `when`
  help: remove or move one""",
    ),
    "a rule about an unknown facet": (
        "backends",
        row("capabilities: {}", "rules:", "  - {when: {arch: g1}, reject: a, facets: [arc]}"),
        """\
backends.yaml:10:48: backends.A.rules.facets: unknown facet `arc`
  help: did you mean `arch`? (also: attention, attn_type, block_size, dtype, eager, features, flags, head_size, \
head_size_v, index_topk, kv_dtype, kv_lora_rank, …)""",
    ),
    "a variant twice": (
        "backends",
        row("capabilities: {}", "variants:", "  - {name: v, when: {arch: g1}}", "  - {name: v}"),
        """\
backends.yaml:11:9: backends.A.variants: the variant v is given twice""",
    ),
    "add that is no mapping": (
        "backends",
        row("capabilities: {}", "variants:", "  - name: v", "    capabilities: {add: [sinks]}"),
        """\
backends.yaml:11:29: backends.A.variants.capabilities.add: expected a mapping, got a list
  help: as in add: {features: [...]}""",
    ),
    "add to a claim that is not there": (
        "backends",
        row(
            "capabilities: {kv_dtypes: any}",
            "variants:",
            "  - name: v",
            "    capabilities: {add: {dtypes: [float16], kv_dtypes: [fp8]}}",
        ),
        """\
backends.yaml:11:38: backends.A.variants.capabilities.add.dtypes: the row has no list of dtypes to change
  help: state the whole claim instead
backends.yaml:11:60: backends.A.variants.capabilities.add.kv_dtypes: the row has no list of kv_dtypes to change
  help: state the whole claim instead""",
    ),
    "remove of what is not claimed": (
        "backends",
        row(
            "capabilities: {dtypes: [float16]}",
            "variants:",
            "  - name: v",
            "    capabilities: {remove: {dtypes: [float16, bfloat16], features: [sinks]}}",
        ),
        """\
backends.yaml:11:41: backends.A.variants.capabilities.remove.dtypes: leaves nothing
  help: state the whole claim instead
backends.yaml:11:51: backends.A.variants.capabilities.remove.dtypes: the row does not claim `bfloat16`
  help: claimed: float16
backends.yaml:11:73: backends.A.variants.capabilities.remove.features: the row does not claim `sinks`""",
    ),
    "remove of everything": (
        "backends",
        row(
            "capabilities: {dtypes: [float16]}",
            "variants:",
            "  - name: v",
            "    capabilities: {remove: {dtypes: [float16]}}",
        ),
        """\
backends.yaml:11:41: backends.A.variants.capabilities.remove.dtypes: leaves nothing
  help: state the whole claim instead""",
    ),
    "add and remove of the unknown": (
        "backends",
        row(
            "capabilities: {dtypes: [float16]}",
            "variants:",
            "  - name: v",
            "    capabilities: {add: {dtype: [float16]}, remove: {features: [snks]}}",
        ),
        """\
backends.yaml:11:30: backends.A.variants.capabilities.add.dtype: unknown capability `dtype`
  help: did you mean `dtypes`? (also: block_sizes, features, head_sizes, head_sizes_v, kv_dtypes, num_heads, \
num_kv_heads)
backends.yaml:11:69: backends.A.variants.capabilities.remove.features: unknown feature `snks`
  help: did you mean `sinks`? (also: alibi)""",
    ),
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
  help: every entry of this kind must have it""",
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
  help: did you mean `status`? (also: attention, capabilities, emulated, module, notes, only_on_request, phase, \
platforms, requires, rules, since, source, …)
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
        "priorities.yaml:1:6: gpu: expected a list, got `1`",
        "invariants.yaml:1:14: invariants: `says` is missing",
        "  help: every entry of this kind must have it",
    ]


# words ---------------------------------------------------------------------------------------------------------------

ASKED = "asked says whether an order tries a backend (`automatic`) or a user named it (`by_name`)"
WRONG_WORDS = {
    "a feature without its sentence": (
        "features: {new: 5}",
        "features.new: expected a sentence, or a mapping with a `legend`, got `5`",
    ),
    "a feature that is a flag": ("features: {fast: l}", "features: `fast` is a feature and a flag\n  help: rename one"),
    "a flag that is a feature": ("flags: {sinks: l}", "flags: `sinks` is a feature and a flag\n  help: rename one"),
    "a set that nothing uses": (
        "words: {kv_dtype: {int8: l}}",
        (
            "words: no facet takes its values from `kv_dtype`\n  help: did you mean `kv_dtypes`? (also: attention, "
            "attn_types, dtypes, features, flags, phases, platforms, roles)"
        ),
    ),
    "a platform without an architecture": (
        "words: {platforms: {tpu: l}}",
        "words.platforms: `tpu` has no architecture\n  help: add one under `architectures`",
    ),
    "architectures of an unknown platform": (
        "architectures: {npus: {n2: {family: f}}}",
        "architectures: unknown platform `npus`\n  help: did you mean `npu`? (also: gpu)",
    ),
    "an architecture of two platforms": (
        "architectures: {npu: {g1: {family: f}}}",
        "architectures.npu: `g1` is an architecture of gpu too\n  help: rename one",
    ),
    "a facet without words": (
        "facets: {mode: {of: request, kind: word, legend: l}}",
        (
            "facets.mode: `words` is missing\n"
            "  help: known: attention, attn_types, dtypes, features, flags, kv_dtypes, phases, platforms, roles"
        ),
    ),
    "a facet of unknown words": (
        "facets: {mode: {of: request, kind: word, words: dtype, legend: l}}",
        (
            "facets.mode: unknown set of words `dtype`\n  help: did you mean `dtypes`? (also: attention, attn_types, "
            "features, flags, kv_dtypes, phases, platforms, roles)"
        ),
    ),
    "a facet that changes its kind": (
        "facets: {head_size: {of: platform, kind: text, legend: l}}",
        "facets.head_size: expected a facet of the request, of kind integer",
    ),
    "a set beside features and flags": (
        "facets: {modes: {of: request, kind: words, words: dtypes, legend: l}}",
        (
            "facets.modes: expected a facet of the request, of kind word, arch, integer, text, boolean\n"
            "  help: sets of words are asked for as features or flags"
        ),
    ),
    "a facet of a stranger": (
        "facets: {mode: {of: engine, kind: text, legend: l}}",
        "facets.mode.of: expected `request`, `platform` or `selection`, got `engine`",
    ),
    "a second facet of the selection": (
        "facets: {mode: {of: selection, kind: word, words: dtypes, legend: l}}",
        f"facets.mode: the selection has one facet, `asked`, of kind word\n  help: {ASKED}",
    ),
    "a facet of the request that has the name of the selection's": (
        "facets: {asked: {of: request, kind: word, words: dtypes, legend: l}}",
        f"facets.asked: the selection has one facet, `asked`, of kind word\n  help: {ASKED}",
    ),
    "a facet of the selection of another kind": (
        "facets: {asked: {of: selection, kind: boolean, legend: l}}",
        f"facets.asked: the selection has one facet, `asked`, of kind word\n  help: {ASKED}",
    ),
    "a facet of the selection with other words": (
        "facets: {asked: {of: selection, kind: word, words: dtypes, legend: l}}",
        f"facets.asked: its words are `automatic` and `by_name`, got bfloat16, float16\n  help: {ASKED}",
    ),
    "a facet of the selection with a claim": (
        (
            "{words: {asked: {automatic: l, by_name: l}}, "
            "facets: {asked: {of: selection, kind: word, words: asked, legend: l, claim: asked}}}"
        ),
        f"facets.asked: no capability constrains it\n  help: {ASKED}",
    ),
    "a facet of the request that is to be the selection's": (
        "facets: {role: {of: selection, kind: word, words: roles, legend: l}}",
        "facets.role: expected a facet of the request, of kind word, text",
    ),
    "a derived facet that is one already": (
        "derived: {arch: {legend: l, cases: [{value: 1}]}}",
        "derived.arch: is a facet already\n  help: give the derived facet a name of its own",
    ),
    "a case that is never reached": (
        "derived: {d: {legend: l, cases: [{value: 1}, {when: {arch: g1}, value: 2}]}}",
        (
            "derived.d.cases: unreachable case: number 1 of the list has no `when`, so it takes everything\n"
            "  help: remove or move one"
        ),
    ),
    "a derived facet of itself": (
        "derived: {d: {legend: l, cases: [{when: {d: 1}, value: 1}]}}",
        (
            "derived.d.cases.when.d: unknown facet `d`\n"
            "  help: known: any, arch, attention, attn_type, block_size, dtype, eager, features, "
            "flags, head_size, head_size_v, index_topk, …"
        ),
    ),
    "a case without a value": (
        "derived: {d: {legend: l, cases: [{value: [1]}]}}",
        "derived.d.cases.value: expected a word, an integer, true or false, got a list",
    ),
    "a derived facet of an unknown source": (
        "derived: {d: {legend: l, cases: [{value: 1}], source: 't:p#q'}}",
        "derived.d.source: unknown source `t`\n  help: known: s",
    ),
    "words of another registry": ("extends: default", "an overlay says at its top what it extends, as a whole"),
}


@pytest.mark.parametrize(("text", "message"), WRONG_WORDS.values(), ids=WRONG_WORDS)
def test_wrong_words(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(f"vocabulary:\n  {text}\n")
    where, _, said = brief(refusal(write(tmp_path / "tiny"), ["mine.yaml"])).partition(": ")
    assert where.startswith("mine.yaml:2:")
    # what is wrong with the vocabulary's own shape names it too
    assert said.removeprefix("vocabulary.") == message


NO_MATTER = (
    "`asked` is no matter of requests: it differs from backend to backend\n"
    "  help: rows, waivers and derived facets may ask for it"
)
MISUSED: dict[str, tuple[str, str]] = {
    "an unknown word": (
        "backends: {A: {requires: {asked: named}}}",
        "backends.A.requires.asked: unknown asked 'named'\n  help: did you mean `by_name`? (also: automatic)",
    ),
    "an order": (
        "orders: {gpu: [{name: mine, when: {not: {asked: by_name}}, order: [A]}]}",
        f"orders.gpu.when.not.asked: {NO_MATTER}",
    ),
    "an entry": (
        "orders: {gpu: [{name: mine, when: {arch: g1}, order: [{backend: A, if: {asked: automatic}}]}]}",
        f"orders.gpu.order.if.asked: {NO_MATTER}",
    ),
    "a place": ("place: [{backend: B, after: A, if: {asked: by_name}}]", f"place.if.asked: {NO_MATTER}"),
    "a choice": ("choices: [{when: {asked: by_name}, require: A}]", f"choices.when.asked: {NO_MATTER}"),
    "an invariant": (
        "invariants: [{name: i, says: s, when: {asked: by_name}, chosen: [A]}]",
        f"invariants.when.asked: {NO_MATTER}",
    ),
}


@pytest.mark.parametrize(("text", "message"), MISUSED.values(), ids=MISUSED)
def test_who_asks_is_a_matter_of_backends(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "words: {asked: {automatic: l, by_name: l}}"
    facet = "facets: {asked: {of: selection, kind: word, words: asked, legend: l}}"
    Path("mine.yaml").write_text(f"vocabulary: {{{words}, {facet}}}\n{text}\n")
    where, _, said = brief(refusal(write(tmp_path / "tiny"), ["mine.yaml"])).partition(": ")
    assert where.startswith("mine.yaml:2:")
    assert text[int(where.split(":")[2]) - 1 :].startswith("named" if "unknown" in message else "asked")
    assert said == message


def test_a_registry_that_does_not_declare_it_knows_no_asked(tmp_path: Path) -> None:
    message = brief(refusal(write(tmp_path), [{"backends": {"A": {"requires": {"asked": "by_name"}}}}]))
    assert message.startswith("<overlay>:5:9: backends.A.requires.asked: unknown facet `asked`\n  help: did you mean ")


def test_a_registry_needs_every_facet_and_every_stated_claim(tmp_path: Path) -> None:
    words = copy.deepcopy(tiny.VOCABULARY)
    del words["facets"]["model"], words["facets"]["flags"]
    message = brief(refusal(write(tmp_path, vocabulary=json.dumps(words))))
    assert message == (
        "vocabulary.yaml:1:2: the facet `flags` is missing: every platform has it\n  help: add it, or use `extends`\n"
        "vocabulary.yaml:1:2: the facet `model` is missing: every request has it\n  help: add it, or use `extends`"
    )
    words = copy.deepcopy(tiny.VOCABULARY)
    words["facets"]["dtype"]["stated"] = True
    message = brief(refusal(write(tmp_path, vocabulary=json.dumps(words), backends=row("capabilities: {}"))))
    assert message == (
        "backends.yaml:8:5: backends.A.capabilities: `dtypes` is missing\n"
        "  help: every backend states it; `any` accepts every value"
    )


# any data ------------------------------------------------------------------------------------------------------------

# an overlay that says something of everything
EVERYTHING: dict[str, Any] = {
    "extends": "default",
    "vocabulary": {
        "features": {"new": "l"},
        "flags": {"slow": {"legend": "l", "platforms": ["gpu"]}},
        "packages": {"pkg": {"legend": "l", "import": "pkg", "distributions": ["p"]}},
        "words": {"kv_dtypes": {"int8": {"bits": 8, "legend": "l"}}},
        "architectures": {"gpu": {"g3": {"family": "f", "products": ["p"], "capability": "3.0", "series": "gpu"}}},
        "facets": {"mode": {"of": "request", "kind": "boolean", "legend": "l", "claim": "modes", "stated": False}},
        "derived": {
            "version": {
                "legend": "l",
                "cases": [{"when": {"arch": "g1"}, "value": 3}, {"value": 1}],
                "claim": "versions",
            }
        },
        "retired_environment": {"OLD": {"engine": "e", "use": "u"}},
    },
    "sources": {"t": {"url": "u", "version": "1", "read": "2026-11-21"}},
    "backends": {
        "C": {
            "summary": "s",
            "status": "stable",
            "platforms": ["gpu"],
            "attention": "mha",
            "phase": ["any"],
            "requires": {"arch": {"min": "g1"}, "packages": ["lib>=3"]},
            "capabilities": {
                "dtypes": ["float16", "bfloat16"],
                "kv_dtypes": ["auto"],
                "head_sizes": [64, {"multiple_of": 8, "max": 256}],
                "features": ["sinks"],
                "modes": True,
                "versions": [1, 3],
            },
            "emulated": {"alibi": "slow"},
            "unchecked": ["new"],
            "variants": [
                {
                    "name": "v",
                    "when": {"arch": "g1"},
                    "requires": {"flags": ["fast"]},
                    "capabilities": {
                        "add": {"features": ["alibi"], "kv_dtypes": ["fp8"], "head_sizes": [512]},
                        "remove": {"features": ["sinks"], "dtypes": ["float16"], "head_sizes": [64]},
                    },
                    "rules": [{"when": {"kv_dtype": "fp8*"}, "reject": "r", "facets": ["kv_dtype"], "source": "t:a#b"}],
                }
            ],
            "rules": [{"when": {"any": [{"head_size": 96}, {"not": {"without": ["sinks"]}}]}, "reject": "r"}],
            "only_on_request": "x",
            "source": "s:a#b",
        },
        "B": {"status": "experimental", "capabilities": {"add": {"dtypes": ["bfloat16"]}}},
    },
    "orders": {
        "gpu": [{"name": "mine", "when": {"role": "draft"}, "order": ["C", {"backend": "A", "if": {"arch": "g1"}}]}]
    },
    "place": [{"backend": "C", "before": "A", "orders": ["gpu/all"], "if": {"head_size": {"not": None}}}],
    "choices": [{"when": {"role": "draft"}, "prefer": "C"}, {"deny": ["B"]}, {"require": "A", "when": {"model": "x*"}}],
    "invariants": [{"name": "i", "says": "s", "when": {"arch": "g1"}, "chosen": ["A", None], "while": "native"}],
}
WORDS = st.sampled_from(
    [
        *("A", "B", "C", "g1", "gpu", "sinks", "auto", "fp8*", "arch", "head_size", "packages", "flags", "lib>=2"),
        *("any", "not", "without", "only", "min", "max", "multiple_of", "add", "remove", "features", "when", "name"),
        *("", "*", "null", "a\nb", "\x1b", "é", "os.path", "s:a#b"),
    ]
)
VALUES: st.SearchStrategy[Any] = WORDS | st.sampled_from(
    [None, True, 0, 1, -1, 3, 64, 10**9, 10**30, 2.5, [], {}, [[]], {"a": 1}, [{}]]
)


def paths(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [p for key, value in inner for p in [(*path, key), *paths(value, (*path, key))]]


def spoil(data: Any, path: tuple[Any, ...], key: str | None, value: Any) -> None:
    """Replace a value, or with a key add one beside it."""
    for step in path[:-1]:
        data = data[step]
    if key is not None and isinstance(data, dict):
        data[key] = value
    else:
        data[path[-1]] = value


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("small"))


def test_the_overlay_that_says_something_of_everything_is_right(small: Path) -> None:
    assert attnreg.load_registry(small, EVERYTHING).name == f"{small.name}+overlay"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_data_is_a_registry_or_a_refusal_and_any_registry_answers(small: Path, data: st.DataObject) -> None:
    overlay = copy.deepcopy(EVERYTHING)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(paths(overlay)))
        spoil(overlay, path, data.draw(st.none() | WORDS), copy.deepcopy(data.draw(VALUES)))
    try:
        registry = attnreg.load_registry(small, [overlay])
    except attnreg.RegistryError:
        return
    request = attnreg.AttentionRequest(head_size=64, kv_dtype="fp8", features=frozenset({"alibi"}), role="draft")
    for arch in ("g1", "g2"):
        with contextlib.suppress(attnreg.NoBackendError, attnreg.RequestError):
            attnreg.select(request, attnreg.Platform(platform="gpu", arch=arch, packages=(("lib", "3.1"),)), registry)
