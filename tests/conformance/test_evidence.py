"""Evidence is recorded, and what is refuted is struck from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.layers.altered import altered

from attnreg import Platform, Registry, loader
from attnreg.conformance.evidence import save_run
from attnreg.conformance.verify import verify
from attnreg.files import FileError, held
from attnreg.packages.kernel_code import kernel_digest
from attnreg.packages.records import read_records
from attnreg.packages.signing import digest_of
from attnreg.runtime.interface import BatchMetadata

AGAIN = "remove it, and record it again with `attnreg verify --record`"
ALONE = "such a file is written by `attnreg verify --record` alone"


def past_the_end(batch: BatchMetadata) -> BatchMetadata:
    longer = (batch.seq_lens + 1) if batch.paged else batch.seq_lens
    return replace(batch, seq_lens=longer, seq_lens_cpu=longer)


def test_evidence_is_recorded_and_what_is_refuted_is_struck_from_it(
    default: Registry, cpu: Platform, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    (evidence,) = verify(
        ["CPU_ATTN"], registry=default, platform=cpu, size="claims", record=tmp_path, report=lambda *a: seen.append(a)
    )
    assert evidence.proven
    data = json.loads((tmp_path / "cpu.json").read_text())
    assert (data["device"], data["platform"]) == ("cpu", "cpu")
    entry = data["backends"]["CPU_ATTN"]
    assert entry["for"] == "cpu x86_64"
    assert entry["cases"] == len(seen) == evidence.cases > 8
    assert entry["versions"]["torch"] == torch.__version__
    # the one case in bfloat16 has a window of one key, whose weight is 1 whatever the scores are: it may be exact
    assert entry["claims"]["dtype"]["bfloat16"]["cases"] >= 1
    assert 0 < entry["claims"]["dtype"]["float32"]["share"] <= 1
    assert entry["claims"]["features"]["sinks"]["cases"] >= 1

    assert entry["signed"]["kernel"] == kernel_digest(default, "CPU_ATTN") == evidence.kernel
    assert entry["signed"]["cases"] == digest_of([case.words for _, case, _ in seen])

    verify(["TORCH_SDPA"], registry=default, platform=cpu, size="claims", record=tmp_path)
    both = json.loads((tmp_path / "cpu.json").read_text())["backends"]
    assert both.keys() == {"CPU_ATTN", "TORCH_SDPA"}
    # the other record stays as it was, and both are whole
    assert both["CPU_ATTN"] == entry
    found = read_records(tmp_path / "cpu.json")
    assert (len(found.rows), found.problems) == (2, ())
    assert all(row.is_current(default) for row in found.rows)
    monkeypatch.setattr(loader, "load_kernel", lambda registry, backend: altered(batch=past_the_end))
    (refuted,) = verify(["CPU_ATTN"], registry=default, platform=cpu, size="claims", record=tmp_path)
    assert not refuted.proven
    assert json.loads((tmp_path / "cpu.json").read_text())["backends"].keys() == {"TORCH_SDPA"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", f"{{file}}:1:1: no record of evidence: it has no object `backends`; {ALONE}"),
        ('{"backends": 3}', f"{{file}}:1:1: no record of evidence: it has no object `backends`; {ALONE}"),
        (
            '{"device": "cpu", "platform": "cpu", "backends": {\n "TORCH_SDPA": {"cases": 3}}}',
            f"{{file}}:2:16: the record of 'TORCH_SDPA': it is of another form: it has no `versions`; {AGAIN}",
        ),
        (
            '{"device": "NVIDIA H200", "platform": "cuda", "backends": {}}',
            "{file}:1:1: it has the records of NVIDIA H200 (cuda), and this is cpu (cpu): name another file",
        ),
        ('{"backends":\n', f"{{file}}:2:1: not JSON: Expecting value; {ALONE}"),
        ("\0", f"{{file}}:1:1: not JSON: Expecting value; {ALONE}"),
        (None, "{file}:1:1: cannot be written: there is no directory {folder}"),
    ],
)
def test_a_record_that_cannot_be_kept_is_refused_before_anything_is_run(
    default: Registry, cpu: Platform, tmp_path: Path, text: str | None, message: str
) -> None:
    file = tmp_path / ("cpu.json" if text is not None else "nowhere/cpu.json")
    if text is not None:
        file.write_text(text)
    ran = []
    with pytest.raises(FileError) as caught:
        verify(["CPU_ATTN"], registry=default, platform=cpu, record=file, report=lambda *a: ran.append(a))
    assert (str(caught.value), ran) == (message.format(file=file, folder=file.parent), [])


def test_a_file_of_records_that_another_run_writes_is_refused_before_anything_is_run(
    default: Registry, cpu: Platform, tmp_path: Path
) -> None:
    ran: list[object] = []
    with held(tmp_path / "cpu.json"), pytest.raises(FileError, match=r"cpu\.json:1:1: process \d+ is writing it"):
        verify(["CPU_ATTN"], registry=default, platform=cpu, record=tmp_path, report=lambda *a: ran.append(a))
    with held(tmp_path / "cpu.json"), pytest.raises(FileError, match="is writing it"):
        save_run("fuzz", {"errors": 0, "commit": None}, tmp_path, torch.device("cpu"), {})
    assert (ran, [*tmp_path.iterdir()]) == ([], [])
    save_run("fuzz", {"errors": 0, "commit": None}, tmp_path, torch.device("cpu"), {})
    assert [path.name for path in tmp_path.iterdir()] == ["cpu.json"]
