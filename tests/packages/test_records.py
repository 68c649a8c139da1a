"""Records of evidence: each forged form is found with its place, and counts nowhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.registries.forged import FORGED, file_of, forged, record

from attnreg import Registry
from attnreg.analysis.check import records as found_by_check
from attnreg.analysis.check.findings import check, notes
from attnreg.packages.kernel_code import kernel_digest
from attnreg.packages.records import RecordsError, read_records, signed, whole_records


@pytest.fixture
def whole(default: Registry) -> dict[str, Any]:
    """A file of two records that nothing is wrong with; one of them has something that no run proves."""
    rows = [record(name, kernel_digest(default, name), unproven=["bfloat16"]) for name in ("TRITON_ATTN", "TRITON_MLA")]
    return file_of("NVIDIA H200", "cuda", *rows)


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default: Registry) -> Path:
    """The file of records beside the default registry, for `attnreg check`."""
    (tmp_path / "evidence").mkdir()
    monkeypatch.setattr("attnreg.analysis.check.records.bundled_registries", lambda: {default.base: tmp_path})
    return tmp_path / "evidence/gpu.json"


def findings(registry: Registry) -> list[Any]:
    return list(found_by_check.record_findings(registry))


def test_a_whole_file_is_read(tmp_path: Path, whole: dict[str, Any]) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps(whole))
    found = read_records(tmp_path / "gpu.json")
    assert [row.title for row in found.rows] == ["TRITON_ATTN", "TRITON_MLA"]
    assert (found.device, found.machine, found.problems) == ("NVIDIA H200", "cuda", ())


@pytest.mark.parametrize("form", FORGED)
def test_a_forged_record_is_found_with_its_place(
    beside: Path, whole: dict[str, Any], form: str, default: Registry
) -> None:
    beside.write_bytes(forged(form, whole))
    broken = [f for f in findings(default) if f.code == "broken-record"]
    assert broken
    for finding in broken:
        assert re.fullmatch(r"registry/evidence/gpu\.json:\d+:\d+", str(finding.where))
        assert finding.message
        assert finding.help
    # no forged record counts: those that are left are as they were
    read = read_records(beside)
    assert all(whole["backends"].get(row.title) == row.result for row in read.rows)
    with pytest.raises(RecordsError, match="the evidence has"):
        whole_records(beside.parent.parent)


def test_a_record_that_is_a_link_to_a_device_is_found(beside: Path, default: Registry) -> None:
    beside.symlink_to("/dev/zero")
    [finding] = findings(default)
    assert finding.message == "cannot be read: it is a device"


def test_a_record_that_is_in_two_files_is_found(beside: Path, whole: dict[str, Any], default: Registry) -> None:
    for file in (beside, beside.with_name("copy.json")):
        file.write_text(json.dumps(whole))
    doubled = [f for f in findings(default) if f.code == "doubled-record"]
    assert len(doubled) == len(whole["backends"])
    assert {Path(f.where.file).name for f in doubled} == {max(beside.name, "copy.json")}
    # a device may have a record for each version of a package
    for title, row in whole["backends"].items():
        row = {**row, "versions": {**row["versions"], "triton": "9.9.9"}}
        given = row.pop("signed")
        whole["backends"][title] = signed(
            whole["device"], whole["platform"], title, row, given["kernel"], given["cases"]
        )
    beside.with_name("copy.json").write_text(json.dumps(whole))
    assert {f.code for f in findings(default)} & {"doubled-record", "broken-record"} == set()


def test_no_key_of_another_file_is_quoted(tmp_path: Path) -> None:
    for text, named in (('{"s3cret": 1, "s3cret": 1}', "a key"), ('{"runs": 1, "runs": 1}', "the key 'runs'")):
        (tmp_path / "a.json").write_text(text)
        [problem] = read_records(tmp_path / "a.json").problems
        assert problem.message == f"{named} is given twice"


def test_the_place_is_that_of_the_record(beside: Path, whole: dict[str, Any], default: Registry) -> None:
    whole["backends"]["TRITON_MLA"]["refused"] = 99
    text = json.dumps(whole, indent=2)
    beside.write_text(text)
    [finding] = [f for f in findings(default) if f.code == "broken-record"]
    line = text.splitlines()[finding.where.line - 1]
    assert line == '    "TRITON_MLA": {'
    assert line[finding.where.column - 1 :] == "{"
    assert finding.message.startswith("the record of 'TRITON_MLA': it was changed after it was written")
    assert finding.help == "remove it, and record it again with `attnreg verify --record`"


def test_a_claim_of_the_row_that_no_case_had_is_found(beside: Path, whole: dict[str, Any], default: Registry) -> None:
    beside.write_text(json.dumps(whole))
    first, second = findings(default)
    assert first.title == "partial-record [TRITON_ATTN, NVIDIA H200]"
    assert "no case has attn_type encoder" in first.message
    assert "features sinks" in first.message
    # what no run proves is asked of none
    assert "bfloat16" not in first.message
    assert second.title == "partial-record [TRITON_MLA, NVIDIA H200]"


@pytest.mark.parametrize("kernel", ["0123456789abcdef", None])
def test_a_record_of_an_earlier_kernel_is_a_note(beside: Path, default: Registry, kernel: str | None) -> None:
    beside.write_text(json.dumps(file_of("NVIDIA H200", "cuda", record("TRITON_ATTN", kernel))))
    [note] = findings(default)
    assert (note.title, note.is_note) == ("earlier-record [TRITON_ATTN, NVIDIA H200]", True)
    which = "an earlier kernel" if kernel else "a kernel that is not known"
    assert note.message == f"the record of TRITON_ATTN is of {which}, and proves nothing of this one"
    assert notes(default) == [note]


def test_a_record_of_a_backend_that_there_is_not_is_found(beside: Path, default: Registry) -> None:
    beside.write_text(json.dumps(file_of("NVIDIA H200", "cuda", record("LAPLACE_ATTN", None))))
    [finding] = findings(default)
    assert (finding.title, finding.is_note) == ("orphan-record [LAPLACE_ATTN, NVIDIA H200]", False)


def test_the_records_that_come_along_have_no_problem(default: Registry) -> None:
    files = whole_records(ROOT / "registry")
    assert {file.device for file in files} >= {"cpu", "NVIDIA H200"}
    assert not [f for f in check(default) if f.code.endswith("-record")]
