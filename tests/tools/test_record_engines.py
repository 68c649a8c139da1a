"""The watch over releases: which are new on an index, their recorders one by one, and the report of all."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from packaging.version import Version
from support import ROOT

sys.path.insert(0, str(ROOT / "tools" / "record"))

import record_engines
import sglang_release
import transformers_release
from release_watch import recording, report
from release_watch.index import NoIndexError, releases
from release_watch.recording import Move, Outcome, Summary
from release_watch.standing import bundled_releases, standing

Run = Callable[..., int]
# stands in for `make record-engine`: fails for 9.1.0, as long as nobody has let it pass
RECORDER = """
import json, pathlib, sys
given = dict(word.split("=", 1) for word in sys.argv[1:])
folder = pathlib.Path(given["RECORD"], f"{given['ENGINE']}-{given['VERSION']}")
with (folder / "calls").open("a") as calls:
    calls.write("called\\n")
print("half of it is recorded")
if given["VERSION"] == "9.1.0" and not (folder.parent / "mended").exists():
    print("KeyError: 'the attention moved'")
    print("make: *** [record-engine] Error 1")
    sys.exit(2)
data = {"recorded": "7 decisions", "against": "vllm-0.33.0", "compared": 7, "moved": [], "proposed": str(folder),
        "left": ["one fact"], "failed": []}
(folder / "summary.json").write_text(json.dumps(data))
# the recorder's own status, for something that is left
sys.exit(2)
"""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """An index of wheels in a folder, which pip reads as it reads any other. Returns the function that fills it."""
    folder = tmp_path / "simple"

    def fill(**versions: Sequence[str]) -> None:
        for package, listed in versions.items():
            (folder / package).mkdir(parents=True, exist_ok=True)
            names = [f"{package}-{version}-py3-none-any.whl" for version in listed]
            links = "".join(f'<a href="{name}">{name}</a>' for name in names)
            (folder / package / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")

    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_PRE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", folder.as_uri())
    fill(vllm=["0.33.0"], sglang=["0.5.23"], transformers=[str(bundled_releases("transformers")[-1])])
    return fill


@pytest.fixture
def run(tmp_path: Path) -> Run:
    script = tmp_path / "recorder.py"
    script.write_text(RECORDER)
    recorder = (sys.executable, str(script))
    return lambda *words: record_engines.main([*words, "--work", str(tmp_path / "work")], recorder=recorder)


def test_pip_lists_final_and_post_releases(index: Callable[..., None]) -> None:
    index(vllm=["0.9.0", "0.10.0", "0.10.0.post1", "0.11.0rc1", "0.11.0.dev1", "0.9.1+cpu"])
    assert [*map(str, releases("vllm"))] == ["0.9.0", "0.9.1+cpu", "0.10.0", "0.10.0.post1"]


def test_releases_are_newer_missing_between_or_gone() -> None:
    found = standing("vllm", map(Version, ("0.20.0", "0.30.0")), map(Version, ("0.9.0", "0.30.0", "0.25.1", "0.31.0")))
    assert (*map(str, found.newer), *map(str, found.between), *map(str, found.gone)) == ("0.31.0", "0.25.1", "0.20.0")
    assert str(found.newest) == "0.31.0"
    assert str(bundled_releases("vllm")[0]) == "0.20.0"
    # the table of another release answers for it
    assert Version("0.27.1") in bundled_releases("vllm")
    assert str(bundled_releases("sglang")[-1]) == "0.5.23"


def test_nothing_is_new(index: Callable[..., None], run: Run, tmp_path: Path) -> None:
    assert run() == 0
    page = (tmp_path / "work/report.md").read_text()
    assert page.startswith("# No new releases\n")
    assert "| SGLang | 0.5.23 | 0.5.23 | none | none |" in page
    assert "Bundled, and not on the index: vLLM 0.20.0, " in page
    assert "## " not in page


def test_looking_records_nothing(
    index: Callable[..., None], run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index(vllm=["0.33.0", "0.34.0", "0.25.9"])
    assert run("--look", "--engine", "vllm") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# New releases: vLLM 0.34.0\n")
    assert "| vLLM | 0.33.0 | 0.34.0 | 0.34.0 | 0.25.9 |" in printed
    assert "SGLang" not in printed
    assert not (tmp_path / "work").exists()


def test_an_index_out_of_reach_is_an_error_of_its_own(
    index: Callable[..., None], run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    assert run() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the package index lists no release of vllm: ")
    assert "help: check the network, and the index that `pip config list` and PIP_INDEX_URL name" in error
    with pytest.raises(NoIndexError, match="pip cannot be run: No such file"):
        releases("vllm", ["/no/such/pip"])


def test_a_recorder_that_fails_is_named_and_the_others_go_on(
    index: Callable[..., None], run: Run, tmp_path: Path
) -> None:
    index(vllm=["0.33.0", "9.1.0", "9.2.0"], sglang=["0.5.23", "0.5.24"])
    assert run() == 1
    work = tmp_path / "work"
    page = (work / "report.md").read_text()
    assert page.startswith("# New releases: vLLM 9.1.0, vLLM 9.2.0, SGLang 0.5.24\n")
    assert "2 of 3 newer releases recorded. Not recorded, or in part: vLLM 9.1.0." in page
    assert "Not recorded: KeyError: 'the attention moved' (exit status 2)" in page
    assert "The log is `vllm-9.1.0/recorder.log`." in page
    assert page.count("Nothing moves against vllm-0.33.0, in 7 compared cases.") == 2
    # the next run goes on with what is not finished, and repeats nothing
    (work / "mended").touch()
    (work / "sglang-0.5.24/summary.json").write_text('{"recorded": "a half')
    assert run() == 0
    calls = [
        (work / name / "calls").read_text().count("called") for name in ("vllm-9.1.0", "vllm-9.2.0", "sglang-0.5.24")
    ]
    assert calls == [2, 1, 2]
    assert "3 of 3 newer releases recorded." in (work / "report.md").read_text()


def test_releases_between_are_recorded_on_request(index: Callable[..., None], run: Run, tmp_path: Path) -> None:
    index(vllm=["0.33.0", "0.25.9"])
    assert run("--missing") == 0
    page = (tmp_path / "work/report.md").read_text()
    assert page.startswith("# No new releases\n")
    assert "1 of 1 newer and missing releases recorded." in page
    assert "## vLLM 0.25.9" in page


def test_a_recording_in_part_is_gone_on_with(tmp_path: Path) -> None:
    part = Summary("5 decisions", "vllm-0.33.0", failed=("the selector on cuda sm90",))
    (tmp_path / "vllm-9.0.0").mkdir()
    part.write(tmp_path / "vllm-9.0.0")
    assert Summary.read(tmp_path / "vllm-9.0.0") == part
    script = tmp_path / "recorder.py"
    script.write_text(RECORDER)
    outcome = recording.record("vllm", "9.0.0", tmp_path, (sys.executable, str(script)))
    assert outcome.complete
    assert (tmp_path / "vllm-9.0.0/calls").exists()
    assert recording.record("vllm", "9.5.0", tmp_path, ("/no/such/make",)).problem.startswith("/no/such/make: No such")


def test_moves_are_joined_over_architectures_and_read_well() -> None:
    side = {"backend": "FLASHINFER", "variant": "XQA"}
    move = {"model": "gpt-oss", "layers": "36 layers", "before": {"backend": "TRITON_ATTN", "variant": None},
            "after": side, "why": [{"text": "sinks | are read"}]}  # fmt: skip
    data = {"moves": [{**move, "platform": {"arch": arch}} for arch in ("sm90", "sm120")]}
    moves = recording.moves_of_diff(data)
    assert moves == (
        Move("gpt-oss, 36 layers", ("sm90", "sm120"), "TRITON_ATTN", "FLASHINFER/XQA", "sinks | are read"),
    )
    found = standing("vllm", [Version("0.33.0")], [Version("0.34.0")])
    many = Summary("7 decisions", "vllm-0.33.0", 9, moves * 50, "build/x", failed=("a <machine>",))
    page = report.page([found], [Outcome("vllm", "0.34.0", many)])
    assert "| gpt-oss, 36 layers | sm90, sm120 | TRITON_ATTN | FLASHINFER/XQA | sinks \\| are read |" in page
    assert "10 more are in `summary.json`." in page
    assert "- a &lt;machine>" in page
    assert "Not recorded, or in part: vLLM 0.34.0." in page
    unknown = report.page([found], [Outcome("vllm", "0.34.0", Summary("0 decisions", "vllm-0.33.0"))])
    assert "What moves against vllm-0.33.0 is not known." in unknown


def test_decisions_of_sglang_differ_in_what_they_resolve() -> None:
    out = {"error": None, "attention_backend": "fa3", "page_size": 1, "trace": [["a", {}]], "model": {}}
    assert sglang_release.differences(out, out | {"trace": [], "model": None}) == ("", "")
    assert sglang_release.differences(out, out | {"page_size": 64}) == ("page_size 1", "page_size 64")
    refused = {"error": {"message": "no waves", "at": "server_args.py:1"}, "trace": []}
    moved = {"error": {"message": "no waves", "at": "server_args.py:2"}, "trace": []}
    assert sglang_release.differences(refused, moved) == ("", "")
    assert sglang_release.differences(out, refused) == ("attention_backend fa3", "refused: no waves")
    row = {"version": "9", "arch": "sm90", "model": "Llama", "page_size": 64, "kv_cache_dtype": None, "tp_size": 2}
    assert sglang_release.given_to(row) == "with page_size 64, tp_size 2"
    assert sglang_release.given_to({"model": "Llama"}) == ""
    rows = sglang_release.asked("0.5.23", "9", 1, 5)
    assert [row["in"]["version"] for row in rows] == ["9"] * 5
    assert rows == sglang_release.asked("0.5.23", "9", 1, 5)


def test_fresh_rows_of_sglang_are_words_of_its_table_that_were_never_recorded() -> None:
    rows = sglang_release.fresh("0.5.21", 7, 30)
    assert rows == sglang_release.fresh("0.5.21", 7, 30)
    seen = {sglang_release._key(row["in"]) for row in sglang_release._recorded("*.jsonl.gz")}
    for row in rows:
        assert sglang_release._key(row["in"]) not in seen
        assert {"error", "trace"} <= sglang_release.decision(row["in"]).keys()
    assert len({row["in"]["arch"] for row in rows}) > 5


def test_decisions_are_compared_with_the_bundled_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same, other, *_ = [r for r in sglang_release._recorded("drawn-0.5.23.jsonl.gz") if not r["out"]["error"]]
    other = other | {"out": other["out"] | {"page_size": 7}}
    intel = {"in": same["in"] | {"platform": "xpu", "arch": "xe_hpc", "flags": []}, "out": same["out"]}
    [case] = sglang_release.held([same, other, intel], tmp_path)
    assert case[:2] == (other["in"]["model"], other["in"]["arch"])
    assert case[3] == "page_size 7"
    assert capsys.readouterr().out == "1 equal, 1 different, 1 not known\n"
    with gzip.open(tmp_path / "decisions.jsonl.gz", "rt") as lines:
        assert len(lines.readlines()) == 3


def test_machines_on_which_sglang_fails_are_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that are recorded are not recorded again."""
    script = tmp_path / "sglang_decisions.py"
    script.write_text("import sys\nprint('no attention here', file=sys.stderr)\nsys.exit(1)\n")
    monkeypatch.setattr(sglang_release, "RECORDER", script)
    row = {"platform": "cuda", "arch": "sm90", "flags": [], "model": "LlamaForCausalLM"}
    rows = [{"in": row}, {"in": row | {"arch": "sm100"}}, {"in": row | {"flags": ["no-flashinfer"]}}]
    (tmp_path / "decisions-cuda-sm90.jsonl").write_text(json.dumps({"in": row, "out": {"error": None}}) + "\n")
    decisions, failed = sglang_release.record(rows, tmp_path, tmp_path)
    assert [decision["in"] for decision in decisions] == [row]
    assert failed == ["the decisions on cuda-sm100, cuda-sm90-no-flashinfer: no attention here"]


def test_model_types_and_changed_sources_of_transformers(tmp_path: Path) -> None:
    table = 'CONFIG_MAPPING_NAMES = OrderedDict([("llama", "LlamaConfig"){}])\n'
    config = "class LlamaConfig:\n    {}\n    hidden_size: int = {}\n"
    trees = []
    for name, more, aside, size in (
        ("before", "", '"""Llama."""', 1), ("worded", "", "keys_to_ignore_at_inference = []", 1),
        ("after", ', ("dory", "DoryConfig")', "pass", 2),
    ):  # fmt: skip
        models = tmp_path / name / "transformers" / "models"
        (models / "auto").mkdir(parents=True)
        (models / "llama").mkdir()
        (models / "auto" / "configuration_auto.py").write_text(table.format(more))
        (models / "llama" / "configuration_llama.py").write_text(config.format(aside, size))
        trees.append(tmp_path / name)
    before, worded, after = trees
    assert transformers_release.model_types(after) - transformers_release.model_types(before) == {"dory"}
    families = transformers_release.bundled_families()
    assert list(transformers_release.changed_sources(families, before, worded)) == []
    found = list(transformers_release.changed_sources(families, before, after))
    assert ("llama", "models/llama/configuration_llama.py#LlamaConfig", "changed") in found
    with pytest.raises(ValueError, match="no CONFIG_MAPPING_NAMES: the table of configs moved"):
        transformers_release.model_types(tmp_path)


def test_what_transformers_builds_otherwise_is_read_from_the_observer(tmp_path: Path) -> None:
    text = "bert (base): 2 differences\n  layer.0.heads: 12 -> 6\n  layer.1.heads: 12 -> 6\n1 of 2 as recorded\n"
    (tmp_path / "observed.txt").write_text(text)
    moves, count, failed = transformers_release.observed(tmp_path, tmp_path, 7)
    assert moves == (Move("bert (base)", ("any",), "layer.0.heads: 12", "6"),)
    assert (count, failed) == (2, [])


def test_the_summary_of_a_release_is_json_that_is_read_again(tmp_path: Path) -> None:
    summary = Summary("7 decisions", "vllm-0.33.0", 9, (Move("m", ("sm90",), "A", "B"),), "x", ("left",), ())
    summary.write(tmp_path)
    assert Summary.read(tmp_path) == summary
    data = json.loads((tmp_path / "summary.json").read_text())
    (tmp_path / "summary.json").write_text(json.dumps({**data, "unknown": 1}))
    assert Summary.read(tmp_path) is None
    assert Summary.read(tmp_path / "nothing") is None
