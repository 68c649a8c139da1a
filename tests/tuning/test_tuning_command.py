"""`attnreg tune` on this processor: kernels are really timed; its overlay is loaded, checked, cited and compared."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.suite.once import once

import attnreg
from attnreg.analysis.check.evidence import evidence
from attnreg.analysis.check.findings import check
from attnreg.analysis.timings.samples import read_samples, signature
from attnreg.cli.commands import main
from attnreg.compile.source.yaml_source import Document
from attnreg.machine.probe import probe
from attnreg.tuning import overlay
from attnreg.tuning.journal import Journal
from attnreg.tuning.run import TuningRun

LAYER = ["--head-size", "64", "--num-heads", "4", "--num-kv-heads", "2", "--dtype", "float32"]
SMALL = ["--decode", "2x33", "--prefill", "1x16"]


@functools.cache
def _loads(modules: tuple[str, ...]) -> dict[str, str | None]:
    return probe(modules)


@pytest.fixture(autouse=True)
def _modules_are_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process imports them all, and torch, each time; the run of `tuned` does so."""
    monkeypatch.setattr("attnreg.tuning.command.probe", lambda modules: _loads(tuple(modules)))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The overlay of a run."""

    def tune(folder: Path) -> None:
        folder.mkdir()
        assert main(["tune", *LAYER, *SMALL, "--minutes", "3", "-o", str(folder / "tuned.yaml")]) == 0

    return once(tmp_path_factory, "tuned", tune) / "tuned.yaml"


def order_of(file: Path) -> dict[str, Any]:
    (orders,) = yaml.safe_load(file.read_text())["orders"].values()
    return orders[0]  # type: ignore[no-any-return]


def test_a_run_writes_samples_and_orders_with_their_evidence(tuned: Path) -> None:
    samples = read_samples(tuned.with_suffix(".samples.jsonl"))
    assert [cell.words for cell in samples.cells] == ["decode 2 x 33", "prefill 1 x 16"]
    assert {"CPU_ATTN"} < {name.partition("/")[0] for _, name in samples.turns}
    assert not samples.problems
    order = order_of(tuned)
    assert order["when"]["head_size"] == 64
    assert order["when"]["dtype"] == "float32"
    measured = order["measured"]
    assert measured.keys() == {"file", "of", "over", "ratio", "noise"}
    assert measured["file"] == "tuned.samples.jsonl"
    assert samples.machine["packages"]["torch"]
    # kernels of attnreg's own are as they are in this version
    assert samples.machine["packages"]["attnreg"] == attnreg.__version__


def test_its_overlay_has_no_findings_and_explain_cites_it(tuned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    registry = attnreg.load_registry(None, [tuned])
    assert [f for f in check(registry, attnreg.detect(registry.vocabulary)) if str(tuned) in f.where.file] == []
    arguments = ["explain", "--overlay", str(tuned), *LAYER]
    assert main(arguments) == 0
    text = " ".join(capsys.readouterr().out.split())
    measured, date = order_of(tuned)["measured"], read_samples(tuned.with_suffix(".samples.jsonl")).date
    assert f"as fast as {measured['over']}" in text
    assert f"measured {date} on" in text
    assert "tuned.yaml:" in text
    assert main([*arguments, "--json"]) == 0
    (selection,) = json.loads(capsys.readouterr().out)["answers"][0]["selections"]
    assert date in selection["evidence"]
    # another layer is a judgement still
    assert main(["explain", "--overlay", str(tuned), "--head-size", "128", "--json"]) == 0
    assert "evidence" not in json.loads(capsys.readouterr().out)["answers"][0]["selections"][0]
    assert main(["diff", "default", str(tuned), *LAYER]) in (0, 1)
    capsys.readouterr()


def changed(tuned: Path, folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of the overlay with another order, or another head of its samples, beside a copy of these."""
    samples = tuned.with_suffix(".samples.jsonl")
    head, *lines = samples.read_text().splitlines(keepends=True)
    data = yaml.safe_load(tuned.read_text())
    order = next(iter(data["orders"].values()))[0]
    order["head"] = json.loads(head)
    change(order)
    changed_head = order.pop("head")
    text = json.dumps(changed_head) + "\n" + "".join(lines[:-1])
    sign = json.dumps(signature(changed_head["machine"], text.encode()))
    (folder / samples.name).write_text(f"{text}{sign}\n")
    copy = folder / "tuned.yaml"
    copy.write_text(yaml.safe_dump(data))
    return copy


STALE: list[tuple[str, Callable[[dict[str, Any]], Any], str, str]] = [
    ("a package", lambda o: o["head"]["machine"]["packages"].update(torch="1.0"), "stale-evidence",
     "torch was 1.0, and here"),
    ("another attnreg", lambda o: o["head"]["machine"]["packages"].update(attnreg="0.0.9"), "stale-evidence",
     f"attnreg was 0.0.9, and here it is {attnreg.__version__}"),
    ("a row", lambda o: o["head"]["rows"].update(CPU_ATTN="0"), "stale-evidence", "CPU_ATTN has another kernel"),
    ("no file", lambda o: o["measured"].update(file="none.jsonl"), "missing-evidence", "cannot be read"),
    ("another device", lambda o: o["head"]["machine"].update(device="NVIDIA H200"), "missing-evidence", "is sm90"),
    ("another layer", lambda o: o["when"].update(head_size=80), "missing-evidence", "no sample in"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "code", "message"), [c[1:] for c in STALE], ids=[c[0] for c in STALE])
def test_evidence_that_does_not_hold_is_found(
    tuned: Path, tmp_path: Path, change: Any, code: str, message: str
) -> None:
    registry = attnreg.load_registry(None, [changed(tuned, tmp_path, change)])
    # of the findings of `check` those about evidence: the others take ten times as long, and nothing here is theirs
    found = [(f.code, f.message) for f in evidence(registry, attnreg.detect(registry.vocabulary))]
    assert any(c == code and message in text for c, text in found), found


def test_evidence_of_another_device_is_stale(tuned: Path) -> None:
    registry = attnreg.load_registry(None, [tuned])
    here = replace(attnreg.detect(registry.vocabulary), device="H200")
    # an order for each phase, where its fastest kernel is another
    found = [f for f in evidence(registry, here) if f.code == "stale-evidence"]
    assert {f.subject[1] for f in found} == {"device"}
    assert all("and this is H200" in f.message for f in found)


def test_evidence_of_before_attnreg_said_its_version_is_valid(tuned: Path, tmp_path: Path) -> None:
    copy = changed(tuned, tmp_path, lambda order: order["head"]["machine"]["packages"].pop("attnreg"))
    registry = attnreg.load_registry(None, [copy])
    found = [f for f in evidence(registry, attnreg.detect(registry.vocabulary)) if str(copy) in f.where.file]
    assert found == []


def test_an_order_against_its_samples_is_found(tuned: Path, tmp_path: Path) -> None:
    def reversed_(order: dict[str, Any]) -> None:
        order["order"] = ["TORCH_SDPA/gathered", "CPU_ATTN"]

    copy = changed(tuned, tmp_path, reversed_)
    samples = copy.with_suffix(".samples.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()][:-1]
    times = {"CPU_ATTN": 10.0, "TORCH_SDPA/gathered": 1000.0}
    head = [line for line in lines if "us" not in line]
    turns = [
        {"us": [us + turn / 7, us, us + 1], "of": cell, "backend": name}
        for cell in (0, 1)
        for turn in range(8)
        for name, us in times.items()
    ]
    text = "".join(json.dumps(line) + "\n" for line in [*head, *turns])
    samples.write_text(text + json.dumps(signature(head[0]["machine"], text.encode())) + "\n")
    found = evidence(attnreg.load_registry(None, [copy]), None)
    messages = [f.message for f in found if f.code == "contradicted-order"]
    assert any("ranks TORCH_SDPA/gathered before CPU_ATTN, which its samples show to be" in m for m in messages), (
        messages
    )


def test_orders_follow_from_a_file_of_samples_alone(
    tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = tuned.with_suffix(".samples.jsonl")
    other = tmp_path / "again.yaml"
    assert main(["tune", "--from", str(samples), "-o", str(other)]) == 0
    assert order_of(other)["order"] == order_of(tuned)["order"]
    (tmp_path / "made-up.jsonl").write_text(samples.read_text().replace("float32", "float16"))
    assert main(["tune", "--from", str(tmp_path / "made-up.jsonl"), "-o", str(other)]) == 2
    assert "the signature is not that of these lines" in capsys.readouterr().err


def test_samples_of_words_that_there_are_not_are_found(tuned: Path, tmp_path: Path) -> None:
    copy = changed(tuned, tmp_path, lambda order: None)
    samples = copy.with_suffix(".samples.jsonl")
    lines = samples.read_text().replace("float32", "float33").splitlines()[:-1]
    text = "".join(f"{line}\n" for line in lines)
    samples.write_text(text + json.dumps(signature(json.loads(lines[0])["machine"], text.encode())) + "\n")
    found = [f.message for f in evidence(attnreg.load_registry(None, [copy]), None) if f.code == "missing-evidence"]
    # one for each order, and how many orders there are is the timings' to say
    assert found
    assert all("of no request that the registry knows: dtype names 'float33'" in message for message in found)


def test_an_interrupt_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*about: Any, **more: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("attnreg.tuning.command.tune", interrupted)
    assert main(["tune", *LAYER, *SMALL, "-o", str(tmp_path / "t.yaml")]) == 130
    assert "interrupted: what was timed is in" in capsys.readouterr().err


def test_a_second_run_on_the_same_samples_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both would be timed against each other, and the samples of one would be lost."""
    command = ["tune", *LAYER, *SMALL, "-o", str(tmp_path / "tuned.yaml")]
    statuses = []

    def tune(run: TuningRun, planned: object, journal: Journal, **more: object) -> int:
        before = journal.path.read_bytes()
        monkeypatch.setattr("attnreg.tuning.command.tune", None)
        statuses.append(main(command))
        assert journal.path.read_bytes() == before
        raise KeyboardInterrupt

    monkeypatch.setattr("attnreg.tuning.command.tune", tune)
    assert (main(command), statuses) == (130, [2])
    err = " ".join(capsys.readouterr().err.split())
    assert f"tuned.samples.jsonl:1:1: process {os.getpid()} is writing it: wait until it has ended, or name" in err
    assert [path.name for path in tmp_path.iterdir()] == ["tuned.samples.jsonl"]


@pytest.mark.parametrize(
    ("given", "seconds"), [([], 120.0), (["--minutes", "1"], 45.0), (["--minutes", "1", "--patience", "600"], 600.0)]
)
def test_a_kernel_is_waited_for_as_long_as_was_asked(
    given: list[str], seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def tune(run: TuningRun, planned: object, journal: object, **more: object) -> int:
        waited.append(run.timeout)
        raise KeyboardInterrupt

    monkeypatch.setattr("attnreg.tuning.command.tune", tune)
    assert main(["tune", *LAYER, *SMALL, *given, "-o", str(tmp_path / "tuned.yaml")]) == 130
    assert waited == [seconds]


def test_a_dry_run_says_what_would_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tuned.yaml"
    assert main(["tune", *LAYER, *SMALL, "--dry-run", "-o", str(file)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "2 cells on cpu" in out
    assert "decode 2 x 33: CPU_ATTN" in out
    assert "not timed: " in out
    assert not any(tmp_path.iterdir())
    assert main(["tune", *LAYER, *SMALL[:2], "--dry-run", "-o", str(file)]) == 0
    assert capsys.readouterr().out.startswith("1 cell on cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--decode", "32"], "--decode 32: expected requests and length, as 32x4096"),
        (["--prefill", "0x4"], "--prefill 0x4: expected"),
        (["--minutes", "0"], "--minutes"),
        (
            ["--head-size", "64", "--registry", "vllm-0.33.0", "--dry-run"],
            "it describes another engine, whose modules are not imported\n  help: leave --registry out",
        ),
        (["--from", "none.jsonl"], "none.jsonl:1:1: cannot be read"),
        (["--head-size", "64", "--overlay", "deny.yaml"], "nothing to compare: for no layer do two backends load here"),
    ],
)
def test_bad_input(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("deny.yaml").write_text("choices:\n  - {deny: [CPU_ATTN]}\n  - {deny: [TORCH_SDPA]}\n")
    assert main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0123456789012345", "12345678901234e5", "1234567890123456", "2.13", "-1"])
def test_a_hash_of_digits_stays_a_text(text: str, tmp_path: Path) -> None:
    """PyYAML writes some of them bare, which YAML 1.2 reads as numbers."""
    written = yaml.dump({"a": text}, Dumper=overlay._Dumper)
    assert Document(written, "a.yaml").data == {"a": text}
