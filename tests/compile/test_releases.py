"""A registry that is the difference to another release: what it changes, what it takes away, and where it is cited."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attnreg import Registry, RegistryError, load_registry
from attnreg.compile.inputs.bundled import release_name

Write = Callable[[str], Path]


@pytest.fixture
def release(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        folder = tmp_path / "engine-1.0"
        folder.mkdir(exist_ok=True)
        (folder / "release.yaml").write_text(text)
        return folder

    return write


def refused(folder: Path) -> str:
    with pytest.raises(RegistryError) as caught:
        load_registry(folder)
    return str(caught.value)


def test_what_it_does_not_name_is_the_other_releases(release: Write) -> None:
    below, changed = load_registry("vllm-0.33.0"), load_registry(release("extends: vllm-0.33.0\nsteps: null\n"))
    assert changed.name == "engine-1.0"
    assert changed.backends.keys() == below.backends.keys()
    assert (bool(below.steps), changed.steps) == (True, ())


def test_rows_claims_and_orders_are_changed_by_name(release: Write) -> None:
    text = """
extends: vllm-0.33.0
steps: null
backends:
  backends:
    TRITON_ATTN: {capabilities: {dtypes: [float32]}}
    FLASHINFER: {variants: [{name: XQA, capabilities: {add: {kv_dtypes: null}}}]}
priorities:
  cuda:
    - {name: blackwell-mla-few-heads, gone: true}
    - {name: mha, order: [TRITON_ATTN, FLASHINFER]}
  xpu: null
"""
    below, changed = load_registry("vllm-0.33.0"), load_registry(release(text))
    names = [order.name for order in below.orders["cuda"]]
    names.remove("blackwell-mla-few-heads")
    assert [order.name for order in changed.orders["cuda"]] == names
    mha = changed.orders["cuda"][-1]
    assert [entry.backend for entry in mha.entries] == ["TRITON_ATTN", "FLASHINFER"]
    assert "xpu" not in changed.orders
    claims = {claim.facet: claim for claim in changed.backends["TRITON_ATTN"].variants[-1].claims}
    # what is changed is cited where it was changed, all else where it stands
    assert str(claims["dtype"].where).endswith("engine-1.0/release.yaml:6:34")
    assert claims["head_size"].where.file == "registry/engines/vllm-0.33.0/backends.yaml"
    assert changed.orders["cuda"][0].where == below.orders["cuda"][0].where
    assert mha.entries[0].where.file.endswith("release.yaml")
    xqa = [next(v for v in r.backends["FLASHINFER"].variants if v.name == "XQA") for r in (below, changed)]
    kv = [next(claim for claim in variant.claims if claim.facet == "kv_dtype").matcher.text for variant in xqa]
    assert ("nvfp4" in kv[0], "nvfp4" in kv[1]) == (True, False)


def test_steps_are_changed_moved_and_added_by_name(release: Write) -> None:
    text = """
extends: sglang-0.5.23
steps:
  steps:
    - {step: _beam_overrides, gone: true}
    - {name: GPT-OSS's backends, step: another, before: drafts}
    - {name: mine, step: drafts, before: drafts, when: {role: draft}, refuses: no drafts here}
"""
    below, changed = load_registry("sglang-0.5.23"), load_registry(release(text))
    names = [step.name for step in changed.steps]
    assert names[:5] == ["platforms", "vision towers", "another", "drafts", "DraftBackendFactory._create_backend"]
    assert len(names) == len(below.steps)
    assert "_beam_overrides" not in names
    # all else of a step that is moved stands where it stood
    assert changed.steps[2].effects[0].refuses.startswith("GPT-OSS requires")
    assert changed.steps[2].where.file == "registry/engines/sglang-0.5.23/steps.yaml"
    assert changed.steps[3].where.file.endswith("release.yaml")


def test_known_findings_are_changed_by_code_and_subject(release: Write) -> None:
    text = """
extends: vllm-0.33.0
invariants:
  known:
    - {code: unguarded-row, each: [TORCH_SDPA, [CPU_ATTN]], gone: true}
    - {code: unguarded-row, of: FLEX_ATTENTION, because: another reason}
    - {code: unplaced-row, each: [A, B], because: a test}
"""
    below, changed = load_registry("vllm-0.33.0"), load_registry(release(text))
    before, after = ({known.key: known for known in registry.known} for registry in (below, changed))
    assert before.keys() - after.keys() == {("unguarded-row", ("TORCH_SDPA",)), ("unguarded-row", ("CPU_ATTN",))}
    assert after.keys() - before.keys() == {("unplaced-row", ("A",)), ("unplaced-row", ("B",))}
    # each subject is cited where it stands
    assert [known.where[1:] for known in changed.known[-2:]] == [(7, 35), (7, 38)]
    flex = before["unguarded-row", ("FLEX_ATTENTION",)], after["unguarded-row", ("FLEX_ATTENTION",)]
    assert flex[1].because == "another reason"
    assert flex[0].where == flex[1].where


def test_a_file_beside_it_stands_for_the_one_below(release: Write) -> None:
    folder = release("extends: sglang-0.5.23\n")
    (folder / "invariants.yaml").write_text("known:\n  - {code: unused-word, of: nothing, because: a test}\n")
    assert [known.key for known in load_registry(folder).known] == [("unused-word", ("nothing",))]


def test_a_part_is_changed_or_whole(release: Write) -> None:
    folder = release("extends: sglang-0.5.23\ninvariants: {known: []}\n")
    (folder / "invariants.yaml").write_text("known: []\n")
    assert "release.yaml:2:1: invariants is changed here, and invariants.yaml beside it" in refused(folder)


PROBLEMS = [
    (
        "steps of one name",
        "extends: sglang-0.5.23\nsteps: {steps: [{step: _handle_deprecated_args, gone: true}]}\n",
        "release.yaml:2:17: there is no _handle_deprecated_args to take away",
    ),
    (
        "a name twice",
        "extends: sglang-0.5.23\nsteps: {steps: [{step: drafts}, {step: drafts}]}\n",
        "release.yaml:2:33: drafts is changed twice",
    ),
    (
        "a place that is not there",
        "extends: sglang-0.5.23\nsteps: {steps: [{step: drafts, before: draughts}]}\n",
        "release.yaml:2:40: there is no draughts to stand before",
    ),
    (
        "a known finding that there is not",
        "extends: vllm-0.33.0\ninvariants: {known: [{code: unguarded-row, each: [TORCH_SDPA, NOBODY], gone: true}]}\n",
        "release.yaml:2:22: there is no unguarded-row [NOBODY] to take away",
    ),
    ("no base", "steps: null\n", "release.yaml:1:1: `extends` is missing"),
    ("unknown base", "extends: vllm-9.9.9\n", "release.yaml:1:10: no bundled registry `vllm-9.9.9` to extend"),
    ("unknown part", "extends: vllm-0.33.0\nbackend: {}\n", "release.yaml:2:1: unknown key `backend`"),
    (
        "a row that is not there",
        "extends: vllm-0.33.0\nbackends: {backends: {FLASH_ATN: null}}\n",
        (
            "release.yaml:2:23: there is no FLASH_ATN to take away\n"
            "    2 | backends: {backends: {FLASH_ATN: null}}\n"
            "      |                       ^^^^^^^^^\n"
            "  help: did you mean `FLASH_ATTN`?"
        ),
    ),
    (
        "an order that is not there",
        "extends: vllm-0.33.0\npriorities: {cuda: [{name: mhaa, gone: true}]}\n",
        "release.yaml:2:21: there is no mhaa to take away",
    ),
    (
        "a word that is used",
        "extends: vllm-0.33.0\nsteps: null\nvocabulary: {words: {kv_dtypes: {ultraquant_4bit: null}}}\n",
        "registry/engines/vllm-0.33.0/backends.yaml:",
    ),
]


@pytest.mark.parametrize(("text", "message"), [p[1:] for p in PROBLEMS], ids=[p[0] for p in PROBLEMS])
def test_what_is_wrong_is_said_with_its_place(release: Write, text: str, message: str) -> None:
    assert message in refused(release(text))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("vllm-0.33", "vllm-0.33.0"),
        ("sglang-0.5", "sglang-0.5.23"),
        ("vllm-0", "vllm-0.33.0"),
        ("vllm-0.3", "vllm-0.3"),
        ("vllm", "vllm-0.33.0"),
        ("sglang", "sglang-0.5.23"),
        ("vlm", "vlm"),
        ("default", "default"),
    ],
)
def test_a_release_is_named_by_the_beginning_of_its_version(name: str, meant: str) -> None:
    assert release_name(name) == meant


def test_a_short_name_loads_the_release() -> None:
    registry: Registry = load_registry("vllm-0.32")
    assert (registry.name, registry.base) == ("vllm-0.32.0", "vllm-0.32.0")
    assert "registry/engines/vllm-0.32.0/release.yaml" in registry.files
    assert registry.sources["vllm"].version == "0.32.0"
