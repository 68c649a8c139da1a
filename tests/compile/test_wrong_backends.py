"""Wrong rows of backends.yaml: all that is wrong is said at once, with its place and the cure."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.files import brief, refusal, row, write

# the file's text, and what is printed (without the lines of source, which test_yaml_source covers)


WRONG = {
    "an unknown key": (
        "backends",
        row("capabilites: {}", "capabilities: {}"),
        """\
backends.yaml:8:5: backends.A: unknown key `capabilites`
  help: did you mean `capabilities`? (also: attention, consequences, contract, emulated, module, notes, \
only_on_request, options, phase, platforms, requires, rules, …)""",
    ),
    "a missing key": (
        "backends",
        row(),
        """\
backends.yaml:3:3: backends.A: `capabilities` is missing
  help: `capabilities`: what it accepts; every row states every claim""",
    ),
    "a value of the wrong kind": (
        "backends",
        row("capabilities: [float16]", "notes: one", "status: new", "since: 1"),
        """\
backends.yaml:8:19: backends.A.capabilities: expected a mapping, got a list
backends.yaml:9:12: backends.A.notes: expected a list, got `one`
  help: write [one]
backends.yaml:10:13: backends.A.status: expected `stable`, `experimental` or `deprecated`, got `new`
backends.yaml:11:12: backends.A.since: expected text, got `1`
  help: quote it""",
    ),
    "a row that is no mapping": (
        "backends",
        "backends: {A: fast, B: }\n",
        """\
backends.yaml:1:15: backends.A: expected a mapping, got `fast`
  help: some of these keys: summary, module, contract, options, status, platforms, attention, phase, requires, \
capabilities, emulated, unchecked, …
backends.yaml:1:24: backends.B: expected a mapping, got `null`
  help: some of these keys: summary, module, contract, options, status, platforms, attention, phase, requires, \
capabilities, emulated, unchecked, …""",
    ),
    "a duplicate backend": (
        "backends",
        row("capabilities: {}").replace("sources:", "  A: {}\nsources:"),
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
    "a package by its file": (
        "backends",
        row("capabilities: {}", "module: attnreg.kernels.__init__"),
        """\
backends.yaml:9:13: backends.A.module: `attnreg.kernels.__init__` names a package by its file
  help: name the module itself, as in attnreg.kernels.triton_attn""",
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
    "remove of what is no word": (
        "backends",
        row(
            "capabilities: {dtypes: [float16], features: [sinks]}",
            "variants:",
            "  - name: v",
            "    capabilities: {remove: {features: [sinks, {a: 1}, []]}}",
        ),
        """\
backends.yaml:11:51: backends.A.variants.capabilities.remove.features: expected a feature, got a mapping
  help: known: alibi, sinks
backends.yaml:11:59: backends.A.variants.capabilities.remove.features: expected a feature, got an empty list
  help: known: alibi, sinks""",
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
}


@pytest.mark.parametrize(("file", "text", "message"), WRONG.values(), ids=WRONG)
def test_wrong_data(file: str, text: str, message: str, tmp_path: Path) -> None:
    assert brief(refusal(write(tmp_path, **{file: text}))) == message
