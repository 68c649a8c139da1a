"""A lock holds the selections of a deployment against later data, and shows what changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from attnreg import Platform, RegistryError, load_registry
from attnreg.analysis.lock import drift, read_lock
from attnreg.cli import main
from attnreg.loader import bundled_registries

MODEL = str(ROOT / "examples/configs/gpt-oss-120b")


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    file = tmp_path / "attnreg.lock"
    assert main(["lock", "--platform", "rocm", "--arch", "gfx942", "--model", MODEL, "-o", str(file)]) == 0
    return file


def test_a_lock_says_what_every_group_gets(lock: Path) -> None:
    data = json.loads(lock.read_text())
    assert (data["registry"], data["overlays"], data["detected"]) == ("default", [], False)
    assert data["fingerprint"] == load_registry("default").fingerprint
    assert [(s["layers"], s["outcome"]["backend"]) for s in data["selections"]] == [
        ("18 layers (0, 2, … 34)", "TRITON_ATTN"),
        ("18 layers (1, 3, … 35)", "TRITON_ATTN"),
    ]
    assert data["selections"][0]["outcome"] == {
        "backend": "TRITON_ATTN",
        "variant": None,
        "fails": [],
        "emulates": [],
        "unchecked": [],
        "kv_cache": {"cache_layout": "NHD, HND"},
        "needs": ["torch", "triton>=3.6"],
        "packages": {},
        "follows": {},
        "problem": "",
    }


def test_the_same_data_holds_it(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--lock", str(lock)]) == 0
    assert capsys.readouterr().out.endswith("2 of 2 locked selections hold\n")


# layers of all kinds: MLA, a tower, an encoder and its decoder, MLA with an indexer, sinks and windows
KINDS = [
    "DeepSeek-V3",
    "Qwen2.5-VL-7B-Instruct",
    "t5-11b",
    "DeepSeek-V3.2-Exp",
    "gpt-oss-20b",
    "Qwen3-Next-80B-A3B-Instruct",
]


@pytest.mark.parametrize("name", bundled_registries())
def test_a_lock_just_written_holds(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "x.lock")
    archs = ["--arch", "sm90", "--arch", "gfx942", "--arch", "sm75"]
    models = [part for kind in KINDS for part in ("--model", str(ROOT / "examples/configs" / kind))]
    # some of these layers have no backend on some of these GPUs, or one that is not known
    assert main(["lock", "--registry", name, *archs, *models, "-o", file]) in (1, 3)
    capsys.readouterr()
    assert main(["check", "--lock", file, "--json"]) in (0, 3), capsys.readouterr().out
    data = json.loads(capsys.readouterr().out)
    assert (data["moves"], data["compared"]) == ([], len(json.loads(Path(file).read_text())["selections"]))


def test_a_renamed_variant_holds_and_is_said_to_be_renamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.lock"
    model = str(ROOT / "examples/configs/DeepSeek-V3")
    ask = ["--engine", "vllm-0.20.0", "--arch", "sm90", "--model", model]
    assert main(["lock", *ask, "-o", str(file)]) == 0
    assert main(["check", "--lock", str(file), "--engine", "vllm-0.33.0", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    names = [(move["before"]["variant"], move["after"]["variant"]) for move in data["renamed"]]
    assert (data["moves"], names) == ([], [(None, "FA3"), (None, "CUDA")])
    assert main(["check", "--lock", str(file), "--engine", "vllm-0.33.0"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "renamed: FLASH_ATTN_MLA is FLASH_ATTN_MLA/FA3 now, the same kernel (backends.yaml:" in out
    assert out.endswith("2 of 2 locked selections hold")
    # the lock's registry decides something else today: whether the kernel is the same is not known
    changed = json.loads(file.read_text())
    changed["selections"][0]["outcome"]["variant"] = "FA2"
    file.write_text(json.dumps(changed))
    assert main(["check", "--lock", str(file), "--engine", "vllm-0.33.0", "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["moves"]) == 1


TOWER = [
    "--registry",
    "sglang-0.5.23",
    "--arch",
    "sm90",
    "--model",
    str(ROOT / "examples/configs/Qwen2.5-VL-7B-Instruct"),
]
ELSEWHERE = (
    "SGLang chooses the backend of vision towers elsewhere (--mm-attention-backend), which this table does not hold"
)


def test_what_is_not_known_is_locked_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.lock"
    assert main(["lock", *TOWER, "-o", str(file)]) == 3
    data = json.loads(file.read_text())
    assert [s["outcome"]["problem"].startswith(ELSEWHERE) for s in data["selections"]] == [True, True, False, False]
    assert main(["check", "--lock", str(file)]) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert f"note: not known of Qwen2.5-VL-7B-Instruct in sglang-0.5.23: {ELSEWHERE}" in out
    assert out.endswith("4 of 4 locked selections hold")
    # what nothing accepted by then, and what an attnreg that recorded neither wrote
    for problem, status in (("", 1), (None, 3)):
        for selection in data["selections"][:2]:
            selection["outcome"]["problem"] = problem
        file.write_text(json.dumps(data))
        assert main(["check", "--lock", str(file)]) == status
        assert ("none → not known" in capsys.readouterr().out) == (status == 1)


def test_a_change_is_shown_with_its_reasons(lock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overlay = tmp_path / "o.yaml"
    overlay.write_text("choices:\n  - {deny: TRITON_ATTN, when: {features: [sliding_window]}, because: we measured}\n")
    assert main(["check", "--lock", str(lock), "--overlay", str(overlay)]) == 1
    lines = capsys.readouterr().out.splitlines()
    fingerprint = load_registry("default").fingerprint
    assert [line for line in lines if not line.startswith("  also")] == [
        "",
        "TRITON_ATTN → ROCM_ATTN",
        "  after: TRITON_ATTN: denied: we measured  [o.yaml:2]",
        "  gfx942: gpt-oss-120b (18 layers (0, 2, … 34))",
        f"locked with default@{fingerprint}",
        f"{load_registry('default', [overlay]).title}: 1 of 2 locked selections hold",
    ]
    assert "  also  emulates sinks (slow)" in lines
    assert main(["check", "--lock", str(lock), "--overlay", str(overlay), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["compared"], data["moved"], data["locked_with"]) == (2, 1, fingerprint)
    assert data["moves"][0]["after"]["backend"] == "ROCM_ATTN"


def test_a_choice_that_is_known_to_fail_by_now_is_a_drift(
    lock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # as locks were written before data knew of failures
    data = json.loads(lock.read_text())
    for selection in data["selections"]:
        del selection["outcome"]["fails"]
    lock.write_text(json.dumps(data))
    assert main(["check", "--lock", str(lock)]) == 0
    overlay = tmp_path / "o.yaml"
    overlay.write_text("backends: {TRITON_ATTN: {consequences: [{fails: it was seen to}]}}\n")
    assert main(["check", "--lock", str(lock), "--overlay", str(overlay)]) == 1
    assert "  is chosen, and then fails: it was seen to" in capsys.readouterr().out.splitlines()


def test_a_choice_that_is_known_to_fail_is_locked_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overlay, file = tmp_path / "o.yaml", tmp_path / "a.lock"
    overlay.write_text("backends: {TRITON_ATTN: {consequences: [{fails: it was seen to}]}}\n")
    command = ["lock", "--arch", "gfx942", "--model", MODEL, "--overlay", str(overlay), "-o", str(file)]
    assert main(command) == 0
    said = "gpt-oss-120b on gfx942: TRITON_ATTN is chosen, and then fails: it was seen to (o.yaml:1)"
    assert capsys.readouterr().err == f"attnreg: {said}\n"
    # the lock holds, and so does the warning
    assert main(["check", "--lock", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == [said]
    assert main(["check", "--lock", str(file)]) == 0
    assert "and then fails: it was seen to" in " ".join(capsys.readouterr().out.split())
    assert main(["check", "--lock", str(file), "--registry", "default"]) == 1
    assert "and then fails" not in capsys.readouterr().out


def test_a_workspace_is_a_drift_where_the_lock_recorded_none(
    lock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overlay = tmp_path / "o.yaml"
    overlay.write_text("backends: {TRITON_ATTN: {consequences: [{workspace: 4 MiB}]}}\n")
    assert main(["check", "--lock", str(lock), "--overlay", str(overlay)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert "  workspace: not stated → 4.0 MiB" in printed
    # as locks were written before they recorded it
    data = json.loads(lock.read_text())
    for selection in data["selections"]:
        del selection["outcome"]["follows"]
    lock.write_text(json.dumps(data))
    assert main(["check", "--lock", str(lock), "--overlay", str(overlay)]) == 0


def test_a_lock_is_compared_with_its_overlays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overlay, file = tmp_path / "o.yaml", tmp_path / "x.lock"
    overlay.write_text("choices: [{deny: TRITON_ATTN}]\n")
    options = ["--arch", "gfx942", "--model", MODEL, "--overlay", str(overlay)]
    assert main(["lock", *options, "-o", str(file)]) == 0
    assert main(["check", "--lock", str(file)]) == 0
    assert main(["check", "--lock", str(file), "--registry", "default"]) == 1
    overlay.unlink()
    assert main(["check", "--lock", str(file)]) == 2
    assert str(overlay) in capsys.readouterr().err


GONE: list[tuple[str, Any, str]] = [
    ("request", {"kv_dtype": "fp3"}, "kv_dtype names 'fp3', which default@"),
    ("platform", {"arch": "gfx10"}, "arch names 'gfx10', which default@"),
    ("request", {"features": ["levitation"]}, "features names 'levitation', which default@"),
]


@pytest.mark.parametrize(("part", "change", "message"), GONE, ids=[str(case[1]) for case in GONE])
def test_a_word_that_the_data_lost_is_a_drift(
    lock: Path, part: str, change: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(lock.read_text())
    data["selections"][0][part] |= change
    lock.write_text(json.dumps(data, indent=1))
    assert main(["check", "--lock", str(lock)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "TRITON_ATTN → not known"
    assert lines[2].startswith(f"  after: {message}")
    assert lines[-1].endswith("1 of 2 locked selections hold")


def test_a_flag_that_the_data_lost_is_left_out_and_named(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(lock.read_text())
    for entry in data["selections"]:
        entry["platform"]["flags"] = ["turbo"]
        entry["request"]["extra"] = {"colour": "red"}
    lock.write_text(json.dumps(data))
    assert main(["check", "--lock", str(lock)]) == 0
    out = capsys.readouterr().out
    assert "note: default has no flag turbo: compared without it\n" in out
    assert "note: default has no facet colour: compared without it\n" in out


def test_an_upgrade_of_a_package_is_a_drift(lock: Path) -> None:
    here = Platform(platform="rocm", arch="gfx942", packages={"triton": "3.7.0", "torch": "2.11"})
    data = json.loads(lock.read_text())
    for entry in data["selections"]:
        entry["platform"] = here.to_dict()
        entry["outcome"]["packages"] = {"torch": "2.11", "triton": "3.7.0"}
    data["detected"] = True
    lock.write_text(json.dumps(data))
    locked, registry = read_lock(lock), load_registry("default")
    assert drift(locked, registry, here).moves == ()
    upgraded = replace(here, packages={"triton": "3.8.0", "torch": "2.11"})
    assert [m.changes for m in drift(locked, registry, upgraded).moves] == [("package triton 3.7.0 → 3.8.0",)] * 2
    removed = replace(here, packages={"torch": "2.12"})
    assert {m.after.title for m in drift(locked, registry, removed).moves} == {"none"}
    elsewhere = drift(locked, registry, replace(upgraded, arch="gfx950"))
    assert (elsewhere.moves, len(elsewhere.notes)) == ((), 1)
    # a lock of named hardware is compared as it was written
    assert drift(locked._replace(detected=False), registry, upgraded).moves == ()


HEAD = (
    '{"format": 4, "registry": "default", "overlays": [], "fingerprint": "f", "detected": false, "skip_layers": {},'
    ' "selections": '
)
ENTRY: dict[str, Any] = {
    "model": "m",
    "layers": "l",
    "label": "a",
    "platform": {"platform": "cuda", "arch": "sm90", "flags": [], "packages": None},
    "request": {"head_size": 128},
    "outcome": {
        "backend": "FLASH_ATTN",
        "variant": "FA3",
        "emulates": [],
        "unchecked": [],
        "kv_cache": {},
        "needs": [],
        "packages": {},
    },
}


def entries(*changed: Any) -> str:
    """A lock whose entries differ from `ENTRY`, each on a line of its own."""
    return (
        HEAD + "[\n" + ",\n".join(json.dumps(c if not isinstance(c, dict) else {**ENTRY, **c}) for c in changed) + "]}"
    )


BAD: list[tuple[str, str, str]] = [
    ("", "1:1", "not JSON: Expecting value"),
    ("{", "1:2", "not JSON: "),
    ("[]", "1:1", "no lock file: it states no format"),
    ("null", "1:1", "no lock file: it states no format"),
    ("{}", "1:1", "no lock file: it states no format"),
    ('{"format": 1, "selections": [{}]}', "1:12", "a lock file of format `1`; this attnreg reads format 4"),
    ('{\n "format": "2"}', "2:12", "a lock file of format `2`; this attnreg reads format 4"),
    ('{"format": true}', "1:12", "a lock file of format `true`; this attnreg reads format 4"),
    ('{"format": 4}', "1:1", "registry is missing"),
    (HEAD + "{}}", "1:126", "selections: expected a list, got an empty mapping"),
    (HEAD + "[]}", "1:126", "the lock holds no selection"),
    (HEAD + "[{}]}", "1:127", "selections[1].model is missing"),
    (entries({}, 7), "3:1", "selections[2]: expected an object, got `7`"),
    (entries({}, {"more": 1}), "3:", "selections[2].more: a lock has no such key"),
    (
        entries({"platform": {**ENTRY["platform"], "arch": 90}}),
        "2:",
        "selections[1].platform.arch: expected text",
    ),
    (entries({"platform": {**ENTRY["platform"], "arch": ""}}), "2:", "selection 1: arch is ''; expected a word"),
    (
        entries({"outcome": {**ENTRY["outcome"], "backend": 5}}),
        "2:",
        "selections[1].outcome.backend: expected text",
    ),
    (
        entries({"outcome": {**ENTRY["outcome"], "backend": None}}),
        "2:",
        "selection 1: an outcome without a backend has",
    ),
    (
        entries({"outcome": {**ENTRY["outcome"], "problem": "not known"}}),
        "2:",
        "selection 1: an outcome with a backend has no problem",
    ),
    (entries({"request": {}}), "2:", "selection 1: head_size is None; every request needs one"),
    (entries({"request": {"head_size": "128"}}), "2:", "selection 1: head_size is '128'"),
    (entries({"request": {"head_sizes": 128}}), "2:", "selection 1: unknown request field 'head_sizes'"),
    (entries({"request": {"head_size": 8, "features": 3}}), "2:", "selection 1: features is 3"),
    (entries({"request": {"head_size": 8, "extra": 3}}), "2:", "selection 1: extra is 3"),
    (entries({}, {"model": "n"}, {}), "4:1", "selection 3 repeats selection 1"),
    ('{"format": 4,\n "skip_layers": {"a": 1,\n  "a": 2}}', "3:8", "the key 'a' is given twice"),
    ('{"format": ' + "[" * 100_000, "1:1", "not JSON: nested too deeply"),
    ('{"format": 1' + "0" * 5000 + "}", "1:1", "not JSON: a number of too many digits"),
]


@pytest.mark.parametrize(("text", "place", "message"), BAD, ids=[b[2] for b in BAD])
def test_what_is_no_lock_is_said_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, place: str, message: str
) -> None:
    file = tmp_path / "x.lock"
    file.write_text(text)
    with pytest.raises(RegistryError) as e:
        read_lock(file)
    (problem,) = e.value.problems
    assert problem.message.startswith(message)
    assert f"{problem.where.line}:{problem.where.column}".startswith(place)
    assert main(["check", "--lock", str(file)]) == 2
    assert f"{file}:{place}" in capsys.readouterr().err


UNUSABLE = ["nowhere/x.lock", ".", "/dev/full"]


@pytest.mark.parametrize("output", UNUSABLE)
def test_an_output_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str) -> None:
    path = tmp_path / output
    assert main(["lock", "--arch", "sm90", "--model", MODEL, "-o", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"attnreg: {path}:1:1: cannot be written: ")
    assert not [*tmp_path.iterdir()]


def test_a_lock_that_cannot_be_written_whole_is_not_touched(
    lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = lock.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    assert main(["lock", "--arch", "sm90", "--model", MODEL, "-o", str(lock)]) == 2
    assert lock.read_bytes() == before
    assert [*tmp_path.iterdir()] == [lock]


def test_a_lock_is_not_compared_where_the_rules_for_layers_with_another_cache_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "a.lock")
    asked = ["--arch", "sm90", "--model", str(ROOT / "examples/configs/Qwen3-8B"), "--kv-dtype", "turboquant_k8v4"]
    assert main(["lock", "--registry", "vllm-0.20.0", *asked, "-o", path]) == 0
    assert main(["check", "--lock", path, "--registry", "vllm-0.20.0"]) == 0
    capsys.readouterr()
    assert main(["check", "--lock", path, "--registry", "vllm-0.33.0"]) == 2
    assert capsys.readouterr().err == (
        "attnreg: the lock cannot be compared with vllm-0.33.0: in runs with turboquant_k8v4 some layers of a model ask"
        " for something else there than where the lock was written\n"
        "  help: see what moves with `attnreg diff vllm-0.20.0 vllm-0.33.0 --model ... --kv-dtype turboquant_k8v4`,"
        " then write the lock again\n"
    )


def test_what_the_models_type_decides_is_compared_though_the_locks_release_did_not_ask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, path = str(ROOT / "examples/configs/whisper-large-v3"), str(tmp_path / "attnreg.lock")
    assert main(["lock", "--registry", "vllm-0.20.0", "--arch", "sm90", "--model", model, "-o", path]) == 0
    # asked without the model's type, its encoder would be no tower there
    assert main(["check", "--lock", path, "--registry", "vllm-0.33.0"]) == 0
    out = capsys.readouterr().out
    assert "note: the lock lacks " in out
    assert "facets that vllm-0.33.0 reads from a model's config: `attnreg upgrade` compares" in " ".join(out.split())
    assert out.endswith("vllm-0.33.0@" + load_registry("vllm-0.33.0").fingerprint + ": 3 of 3 locked selections hold\n")
    # the release that wrote it holds it
    assert main(["check", "--lock", path]) == 0
    assert "lacks" not in capsys.readouterr().out
