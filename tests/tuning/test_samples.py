"""The file of samples: what a run wrote is read again, and a file that no run can have written is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

import attnreg
from attnreg import AttentionRequest
from attnreg.analysis.check.evidence import contradictions
from attnreg.analysis.timings.samples import Cell, Samples, SamplesError, read_samples, signature
from attnreg.cli.commands import main
from attnreg.errors import Location, Problem
from attnreg.tuning.journal import Journal

MACHINE = {"platform": "cpu", "arch": "x86_64", "device": "a processor", "packages": {"torch": "2.11"}}
CELL = Cell(AttentionRequest(head_size=64, num_heads=4, num_kv_heads=2), 2, 1, 64)


def samples(**changes: Any) -> Samples:
    return Samples({**MACHINE, **changes}, "default@1", {"A": "1", "B": "2"}, "2026-11-22")


def filled(path: Path, turns: int = 4) -> Journal:
    journal = Journal(path, samples())
    index = journal.index(CELL)
    for turn in range(turns):
        journal.add({"us": [10.0 + turn, 11.0, 11.5], "of": index, "backend": "A"})
        journal.add({"us": [20.0 + turn, 21.0, 21.5], "of": index, "backend": "B"})
    journal.add({"problem": "hangs", "of": index, "backend": "C"})
    return journal


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    journal = filled(tmp_path / "s.jsonl")
    journal.sign()
    found = read_samples(tmp_path / "s.jsonl")
    assert found.cells == [CELL]
    assert found.turns == journal.samples.turns
    assert found.problems == {(0, "C"): "hangs"}
    assert found.machine == MACHINE
    assert (CELL.phase, CELL.words) == ("decode", "decode 2 x 65")


def test_times_are_written_to_the_nanosecond(tmp_path: Path) -> None:
    """Also those that the running process ranks: a file read again gives the same order."""
    journal = Journal(tmp_path / "s.jsonl", samples())
    journal.add({"us": [137.66400516033173, 10.0, 1e-3], "of": journal.index(CELL), "backend": "A"})
    assert journal.samples.turns == {(0, "A"): [[137.664, 10.0, 0.001]]}
    assert '"us": [137.664, 10.0, 0.001]' in (tmp_path / "s.jsonl").read_text()


def resigned(change: Callable[[list[dict[str, Any]]], Any], path: Path) -> Path:
    """A file that somebody changed, and signed as a run does."""
    lines = [json.loads(line) for line in path.read_text().splitlines()][:-1]
    change(lines)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(text + json.dumps(signature(lines[0]["machine"], text.encode())) + "\n")
    return path


def times_of_another(lines: list[dict[str, Any]], factor: float, decimals: int = 9) -> None:
    """Give B the times of A, each times a number."""
    of_a = [line["us"] for line in lines if line.get("backend") == "A"]
    for line, times in zip([line for line in lines if line.get("backend") == "B"], of_a, strict=True):
        line["us"] = [round(factor * us, decimals) for us in times]


MADE_UP: list[tuple[str, Callable[[list[dict[str, Any]]], Any], str]] = [
    (
        "no clock",
        lambda ls: [line.update(us=[5.0, 5.0, 5.0]) for line in ls if line.get("backend") == "A"],
        "times are all 5.0 µs",
    ),
    ("few turns", lambda ls: [ls.remove(x) for x in [y for y in ls if "us" in y][:2]], "2 turns; 3 are the least"),
    ("no time", lambda ls: ls[2].update(us=[0.0]), "times in microseconds, all above 0"),
    ("a time that no float holds", lambda ls: ls[2].update(us=[10**400]), "times in microseconds, all above 0"),
    ("a text", lambda ls: ls[2].update(us=["1"]), "times in microseconds"),
    ("infinity", lambda ls: ls[2].update(us=[float("inf")]), "times in microseconds"),
    ("too fast", lambda ls: ls[1]["cell"].update(requests=4096, context=10**6), "no machine moves its bytes"),
    ("faster than a launch", lambda ls: ls[2].update(us=[0.1, 0.2, 0.3]), "0.1 µs; no machine"),
    *(
        (
            f"{n:.0e} of {name}" if n < 2**40 else f"far too many {name}",
            lambda ls, n=n, name=name: ls[1]["cell"].update({name: n}),
            "each less than 2,147,483,648",
        )
        for name in ("requests", "queries", "context")
        for n in (2**31, 10**400)
    ),
    (
        "heads that no request has",
        lambda ls: ls[1]["cell"]["request"].update(num_heads=10**400),
        "num_heads is ",
    ),
    ("another form of a day", lambda ls: ls[0].update(date="20261122"), "the date is written as 2026-11-22"),
    ("a day of a week", lambda ls: ls[0].update(date="2026-W47-7"), "the date is written as 2026-11-22"),
    ("a day", lambda ls: ls[2].update(us=[1.0, 2.0, 86400e6]), "waits for no kernel that long"),
    ("one call", lambda ls: ls[2].update(us=[5.0]), "a turn of 1; 3 calls are the least of a turn"),
    (
        "turns again",
        lambda ls: [x.update(us=[7.0, 8.0, 9.0]) for x in ls[7:] if x.get("backend") == "B"],
        "2 of 4 turns",
    ),
    ("times of another", lambda ls: times_of_another(ls, 1), "B, decode 2 x 65: every time is that of A times 1"),
    ("scaled times", lambda ls: times_of_another(ls, 1.3), "B, decode 2 x 65: every time is that of A times 1.3"),
    (
        "rounded times",
        lambda ls: times_of_another(ls, 0.33371, 3),
        "B, decode 2 x 65: every time is that of A times 0.3337",
    ),
    ("no such row", lambda ls: ls[2].update(backend="D"), "D, decode 2 x 65: the first line names no such backend"),
    ("no cell", lambda ls: ls[2].update(of=7), "`of` which cell"),
    ("a request that cannot be", lambda ls: ls[1]["cell"]["request"].update(head_size=0), "head_size is 0"),
    ("no packages", lambda ls: ls[0]["machine"].update(packages={}), "machine has platform, arch, device, packages"),
    ("a version that is no text", lambda ls: ls[0]["machine"]["packages"].update(torch=2), "versions of packages"),
    ("a cell twice", lambda ls: ls.append(ls[1]), "this cell is there already"),
    ("no day", lambda ls: ls[0].update(date="today"), "Invalid isoformat"),
    ("another format", lambda ls: ls[0].update(format=9), "a file of samples of format 1"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in MADE_UP], ids=[case[0] for case in MADE_UP])
def test_a_made_up_file_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    filled(tmp_path / "s.jsonl").sign()
    with pytest.raises(SamplesError) as caught:
        read_samples(resigned(change, tmp_path / "s.jsonl"))
    assert message in str(caught.value)
    assert "s.jsonl:" in str(caught.value)


def test_numbers_that_no_float_holds_are_a_problem_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is computed of them."""
    filled(tmp_path / "s.jsonl").sign()

    def overflows(cell: Cell, *_: float) -> float:
        return float(10**400)

    for part in ("least_us", "words"):
        monkeypatch.setattr(Cell, part, overflows if part == "least_us" else property(overflows))
        with pytest.raises(SamplesError, match="numbers are those of no machine: int too large"):
            read_samples(tmp_path / "s.jsonl")


@pytest.mark.parametrize("turn", [[12.288, 13.312, 12.288], [12.288, 12.288, 12.288]])
def test_a_clock_with_wide_steps_may_repeat_itself(tmp_path: Path, turn: list[float]) -> None:
    """Of some GPUs it has steps of a microsecond: a short kernel falls on one of two, or always on the same."""
    filled(tmp_path / "s.jsonl").sign()

    def coarse(lines: list[dict[str, Any]], times: list[float] = turn, other: float = 102.4) -> None:
        lines[0]["machine"] = {"platform": "cuda", "arch": "sm80", "device": "a GPU", "packages": {"torch": "2.11"}}
        for number, line in enumerate(line for line in lines if "us" in line):
            line["us"] = times if line["backend"] == "A" else [other, other + 1.024, other + 1.024 * number]

    assert read_samples(resigned(coarse, tmp_path / "s.jsonl")).turns[0, "A"] == [turn] * 4
    # a long one does not
    with pytest.raises(SamplesError, match=r"12 times are all 204\.8 µs"):
        read_samples(resigned(lambda lines: coarse(lines, [204.8] * 3, 512.0), tmp_path / "s.jsonl"))


def test_a_changed_number_or_device_breaks_the_signature(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    filled(path).sign()
    text = path.read_text()
    for old, new in (("21.0", "2.0"), ("a processor", "a better one"), ("2.11", "2.12")):
        path.write_text(text.replace(old, new))
        with pytest.raises(SamplesError, match="the signature is not that of these lines, this device"):
            read_samples(path)
    path.write_text(text + text.splitlines()[2] + "\n")
    with pytest.raises(SamplesError, match="behind the signature"):
        read_samples(path)


def test_contributed_measurements_are_files_of_samples() -> None:
    files = sorted((ROOT / "registry/measurements").glob("*"))
    for file in files:
        assert file.suffix == ".jsonl"
        found = read_samples(file)
        assert found.date in file.name
        # longer times are a third of the wheel, and say nothing more
        assert all(us == round(us, 3) for turns in found.turns.values() for turn in turns for us in turn)


def test_no_contributed_measurement_contradicts_a_measured_order(default: attnreg.Registry) -> None:
    """Those of a GPU's siblings too, which an order for their architecture serves."""
    checked = 0
    for file in sorted((ROOT / "registry/measurements").glob("*.jsonl")):
        found = read_samples(file)
        known = {name: found.machine[name] for name in ("platform", "arch")}
        for order in (order for orders in default.orders.values() for order in orders):
            if order.measured is not None and order.when.decided(known) is not False:
                measured = replace(order.measured, file=f"measurements/{file.name}")
                # another file may be of other requests, and has ratios of its own
                own = measured == order.measured
                said = [f for f in contradictions(default, order, measured) if own or "ranks" in f.message]
                assert said == []
                checked += 1
    assert checked >= 6


def test_a_run_that_has_not_ended_is_no_contribution_and_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    filled(path).close()
    with pytest.raises(SamplesError, match="no signature: its run has not ended"):
        read_samples(path)
    # its last line is torn
    path.write_text(path.read_text() + '{"us": [1')
    again = Journal(path, samples())
    assert again.resumed == 8
    # what failed is tried again
    assert again.samples.problems == {}
    assert again.index(CELL) == 0
    again.sign()
    assert read_samples(path).signed


@pytest.mark.parametrize(
    ("fresh", "message"),
    [
        (samples(device="another"), "measured on another machine or with other packages"),
        (samples(packages={"torch": "2.12"}), "measured on another machine or with other packages"),
        (Samples(MACHINE, "default@1", {"A": "9", "B": "2"}, "2026-11-22"), "measured with other rows"),
    ],
)
def test_samples_of_something_else_are_not_gone_on_with(tmp_path: Path, fresh: Samples, message: str) -> None:
    path = tmp_path / "s.jsonl"
    filled(path).close()
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        Journal(path, fresh)
    assert path.read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_is_said_once(tmp_path: Path) -> None:
    """What could not be written is written again when the file is closed, and that fails too."""
    journal = filled(tmp_path / "s.jsonl")
    journal.close()
    journal._file = Path("/dev/full").open("a", encoding="utf-8")  # noqa: SIM115 the journal closes it
    with pytest.raises(ValueError, match=r"s\.jsonl:1:1: cannot be written: No space left on device; what was written"):
        journal.add({"us": [1.0], "of": 0, "backend": "A"})
    journal.close()
    with pytest.raises(ValueError, match=r"cannot be written: No such file or directory$"):
        Journal(tmp_path / "none" / "s.jsonl", samples())


def test_a_full_disk_is_said_and_what_was_written_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = filled(tmp_path / "s.jsonl")
    before = read_samples(tmp_path / "s.jsonl", unfinished=True)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ValueError, match=r"s\.jsonl:1:1: cannot be written: No space left on device; what was written"):
        journal.add({"us": [1.0], "of": 0, "backend": "A"})
    assert read_samples(tmp_path / "s.jsonl", unfinished=True).turns.keys() == before.turns.keys()
    with pytest.raises(ValueError, match="cannot be written"):
        Journal(tmp_path / "none" / "s.jsonl", samples())
    monkeypatch.setattr(Path, "replace", lambda self, to: full(0))
    with pytest.raises(ValueError, match="No space left on device"):
        journal.sign()
    assert [file.name for file in tmp_path.iterdir()] == ["s.jsonl"]


def test_an_order_that_cannot_be_is_a_problem_of_the_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An overlay that nobody has seen is no place of one."""
    source = ROOT / "registry/measurements/nvidia_h200_mla_sparse_128_heads_2026-11-27.jsonl"
    path = tmp_path / "s.jsonl"
    path.write_bytes(source.read_bytes())
    problem = Problem(Location("<overlay>", 4, 2), "unknown package `bananas`")

    def refuse(*_: object) -> str:
        raise attnreg.RegistryError([problem])

    monkeypatch.setattr("attnreg.tuning.command.overlay_text", refuse)
    file = path
    assert main(["tune", "--from", str(file), "-o", str(tmp_path / "t.yaml")]) == 2
    error = capsys.readouterr().err
    assert f"{file}:1:1: no order follows from them: " in error
    assert "unknown package `bananas`" in error
    assert "<overlay>" not in error
    assert not (tmp_path / "t.yaml").exists()
