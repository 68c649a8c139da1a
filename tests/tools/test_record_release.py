"""The recorder of a release: what moved in its sources, and the differences that its decisions ask for."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import DATA, ROOT
from support.platform_parity import recorded

from attnreg import load_registry

sys.path.insert(0, str(ROOT / "tools" / "record"))

import neighbours
import record_release
from release_watch.recording import Summary

SOURCE = """
LIMIT = 3
class Backend:
    # a comment
    @classmethod
    def supports(cls, x): return x < {limit}
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "config.py").write_text(SOURCE.format(limit=3))
    return folder


def test_what_the_recorder_needs_and_a_release_lacks_is_named(tree: Path) -> None:
    there = ["vllm.config:Backend", "vllm.config:LIMIT", "vllm.config:Backend.supports"]
    assert record_release.missing(tree, there) == []
    assert record_release.missing(tree, ["vllm.config:Gone", "vllm.moved:Backend"]) == [
        "vllm.config:Gone",
        "vllm.moved:Backend",
    ]


def test_a_symbol_is_compared_without_its_comments_and_blanks(tree: Path) -> None:
    file, symbol = tree / "vllm" / "config.py", "Backend.supports"
    before = neighbours.symbol_text(tree, "vllm/config.py", symbol)
    assert before is not None
    neighbours.symbol_text.cache_clear()
    file.write_text(SOURCE.replace("# a comment", "# another").replace("x <", "x  <").format(limit=3))
    assert neighbours.symbol_text(tree, "vllm/config.py", symbol) == before
    neighbours.symbol_text.cache_clear()
    file.write_text(SOURCE.format(limit=4))
    assert neighbours.symbol_text(tree, "vllm/config.py", symbol) != before
    assert neighbours.symbol_text(tree, "vllm/config.py", "Backend.gone") is None
    assert neighbours.symbol_text(tree, "vllm/gone.py", symbol) is None


def test_rows_are_drawn_by_their_seed() -> None:
    first, again, other = (list(record_release.drawn(seed, 50)) for seed in (7, 7, 8))
    assert first == again != other
    assert [row["id"] for row in first] == list(range(50))
    assert {row["platform"] for row in first} >= {"cuda"}


def test_differences_lead_from_one_release_to_the_other() -> None:
    near, far = ({"a": {"b": 1, "c": [1]}, "d": [{"name": "x", "e": 1}, {"name": "y"}]},
                 {"a": {"b": 2, "f": 3}, "d": [{"name": "x", "e": 2}]})  # fmt: skip
    found = list(neighbours.patches(near, far))
    expected = [(("a", "b"), 2), (("a", "c"), None), (("a", "f"), 3), (("d", "[x]", "e"), 2), (("d", "[y]"), None)]
    assert found == expected
    data = neighbours.release_of("vllm-0.33.0", found, {"vllm": {}})
    assert data["a"] == {"b": 2, "c": None, "f": 3}
    assert data["d"] == [{"name": "x", "e": 2}, {"name": "y", "gone": True}]


@pytest.mark.slow(reason="compiles registries")
def test_the_difference_that_the_decisions_ask_for_is_proposed() -> None:
    sources = {"vllm": {"version": "0.33.5", "read": "2026-11-30"}}
    orders = load_registry("vllm-0.32.0").orders["cuda"]

    def wrong(registry: object) -> int:
        here = {order.name: order.entries for order in registry.orders["cuda"]}  # type: ignore[attr-defined]
        return sum([e.backend for e in here.get(o.name, ())] != [e.backend for e in o.entries] for o in orders)

    chosen, left = neighbours.proposed("vllm-0.33.0", ["vllm-0.32.0"], wrong, "vllm-0.33.5", sources)
    assert left <= wrong(load_registry("vllm-0.33.0"))
    assert all(path[0] in neighbours.PARTS for path, _ in chosen)


def test_the_releases_beside_one_are_its_neighbours() -> None:
    assert record_release.beside("0.30.5") == ["vllm-0.30.0", "vllm-0.31.0"]
    assert record_release.beside("0.1.0") == ["vllm-0.20.0"]
    assert record_release.beside("9.0.0") == ["vllm-0.33.0"]


def test_a_tree_that_is_no_vllm_is_refused(tmp_path: Path) -> None:
    words = ["--version", "0.29.0", "--tree", str(tmp_path), "--work", str(tmp_path / "work")]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, str(ROOT / "tools/record/record_release.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert "no vLLM: it has no vllm/platforms" in done.stderr


def test_a_recording_goes_on_where_it_stopped(tmp_path: Path) -> None:
    recording = record_release.Recording("0.29.0", tmp_path / "none", tmp_path / "work")
    rows = recording.rows(3, 20)
    assert recording.rows(4, 5) == rows
    # the release lacks what the recorder uses: that is a note, and nothing is recorded
    assert recording.decisions(rows) == []
    assert recording.platforms(20) == []
    assert [note.partition(":")[0] for note in recording.notes] == [
        "the selector is not recorded", "cpu is not recorded", "xpu is not recorded"
    ]  # fmt: skip
    assert recording.notes[0].startswith("the selector is not recorded: this release has no vllm.config:VllmConfig")
    assert recording.notes[2].endswith("no vllm.platforms.xpu:XPUPlatform")


def test_the_platforms_of_a_recording_are_not_asked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree, work = tmp_path / "tree", tmp_path / "work"
    for path in ("config/__init__", "config/cache", "platforms/cpu", "platforms/interface", "platforms/xpu",
                 "v1/attention/selector", "v1/attention/backends/registry"):  # fmt: skip
        file = tree / "vllm" / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            "".join(f"{symbol.partition(':')[2]} = None\n" for symbol in record_release.vllm_platforms.SYMBOLS["cpu"])
        )
    (tree / "vllm/platforms/xpu.py").write_text("class XPUGpu: ...")
    recording = record_release.Recording("0.33.5", tree, work)
    recording.rows(3, 4)
    rows = recorded("0.33.0")
    of_cpu = [row for row in rows if record_release.platform_of(row) == "cpu"]
    (work / "platforms-cpu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_cpu))
    # the class for Intel GPUs has another name; the recording of processors is there
    assert recording.platforms(20) == of_cpu
    assert recording.notes == ["xpu is not recorded: this release has no vllm.platforms.xpu:XPUPlatform"]
    assert record_release.held(of_cpu, "vllm-0.33.0", failed=recording.notes) == 3
    said = capsys.readouterr().out
    assert f"alike: cuda none, rocm none, xpu none, cpu {len(of_cpu)} of {len(of_cpu)}" in said
    assert "xpu is not recorded" in said


@pytest.mark.slow(reason="compiles registries")
def test_a_recording_that_is_there_is_summed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decisions are another release's. The recorder of architectures fails: there is no engine here."""
    with gzip.open(DATA / "vllm/selector-0.32.0.jsonl.gz", "rt") as lines:
        asked = [json.loads(line) for line in lines][:40]
    work, tree = tmp_path / "work", tmp_path / "tree"
    (tree / "vllm" / "platforms").mkdir(parents=True)
    work.mkdir()
    (work / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [{"seed": 1}, *(r["in"] for r in asked)]))
    for row in asked:
        name = "-".join(filter(None, record_release.vllm_selector.machine(row["in"])))
        with (work / f"selector-{name}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    rows = recorded("0.33.0")
    for name in ("cpu", "xpu"):
        mine = [json.dumps(row) + "\n" for row in rows if record_release.platform_of(row) == name]
        (work / f"platforms-{name}.jsonl").write_text("".join(mine[:30]))
    (work / "starts.jsonl").touch()
    monkeypatch.setattr(record_release, "missing", lambda *_: [])
    words = ["record_release.py", "--version", "0.33.5", "--tree", str(tree), "--work", str(work)]
    monkeypatch.setattr(sys, "argv", words)
    assert record_release.main() == 3
    summary = Summary.read(work)
    assert summary is not None
    # 0.32.0 does not know a backend of 0.33.0, and no bundled release after has a difference to try
    alike = "cuda 33 of 40, rocm none, xpu 30 of 30, cpu 30 of 30"
    assert summary.recorded == f"100 decisions; alike: {alike}; 0 starts of whole models"
    assert sum(int(text.partition(" ")[0]) for text in summary.left) == 7
    assert summary.against == "vllm-0.33.0"
    assert summary.compared > 500
    assert summary.moved is not None
    assert [text.partition(":")[0] for text in summary.failed] == [
        "the proposed registry says nothing of rocm", "the architectures"
    ]  # fmt: skip
    # nothing is recorded on AMD GPUs, and so the proposal does not answer there
    proposed = load_registry(work / "registry/vllm-0.33.5")
    assert proposed.silence("rocm", "gfx942")
    assert not proposed.silence("xpu", "xe2")
    # the recorder does not have what it needs: then nothing is known
    monkeypatch.setattr(record_release, "missing", lambda *_: ["vllm.gone:Backend"])
    assert record_release.main() == 3
    summary = Summary.read(work)
    assert summary is not None
    assert (summary.moved, summary.compared, summary.proposed) == (None, 0, "")
    assert "the selector is not recorded: this release has no vllm.gone:Backend" in summary.failed


def test_a_bundled_release_is_held_against_its_own_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gzip.open(DATA / "vllm/selector-0.32.0.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines][:40]
    assert record_release.held(rows, "vllm-0.32.0", tmp_path / "kept.gz") == 0
    assert capsys.readouterr().out == "vllm-0.32.0: 40 decisions; alike: cuda 40 of 40, rocm none, xpu none, cpu none\n"
    with gzip.open(tmp_path / "kept.gz", "rt") as lines:
        assert [json.loads(line) for line in lines] == rows[::4]
    rows[0]["out"]["candidates"][0]["reasons"] = ["a reason that no table has"]
    assert record_release.held(rows, "vllm-0.32.0") == 3
    assert "do not know vLLM's reason 'a reason that no table has'" in capsys.readouterr().out
    # a recorder that failed is no success, whatever the rest says
    assert record_release.held(rows[1:], "vllm-0.32.0", failed=["the selector on cuda: the recorder failed: gone"]) == 3
    assert capsys.readouterr().out.endswith("  the selector on cuda: the recorder failed: gone\n")
