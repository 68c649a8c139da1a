"""The benchmarks of GPUs run: every case of benchmarks/mla.py at small sizes, and the files of figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from attnreg.loader import load_registry
from attnreg.packages.kernel_code import kernel_digest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def figures_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`measuring.Figures`, of a module that is no part of the package."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.delitem(sys.modules, "measuring", raising=False)
    import measuring

    yield measuring.Figures
    del sys.modules["measuring"]


def test_the_spread_of_samples_is_their_10th_and_90th_percentile(figures_class: Any) -> None:
    spread = sys.modules["measuring"].spread
    assert spread([float(n) for n in range(11)]) == spread([float(n) for n in reversed(range(11))]) == [1.0, 9.0]
    assert spread([5.0] * 10) == [5.0, 5.0]
    # between neighbours: one slow sample of ten does not become the end of the bar
    assert spread([10.0] * 9 + [110.0]) == [10.0, 20.0]
    assert spread([1.26, 1.26]) == [1.3, 1.3]


def test_a_row_has_the_median_and_the_spread_of_a_case_and_its_peers(
    figures_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring = sys.modules["measuring"]
    monkeypatch.setattr(measuring, "samples_us", lambda call: call())

    def refuses() -> list[float]:
        raise RuntimeError("no kernel\nfor this")

    peers = [measuring.Peer("other", lambda: [20.0, 21.0, 22.0]), measuring.Peer("old", refuses)]
    row = measuring.measured("a", [12.0, 10.0, 11.0], 11.5, 4.0, 1e-3, 1e-2, peers)
    assert (row["us"], row["spread"], row["met"]) == (11.0, [10.2, 11.8], True)
    assert row["peers"] == {"other": 21.0, "old": "refused: no kernel"}
    assert row["peer_spreads"] == {"other": [20.2, 21.8]}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/vllm_engine.py as a module; it imports vLLM only where it measures."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in ("measuring", "engine_figures", "vllm_engine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import vllm_engine

    yield vllm_engine
    for name in ("measuring", "engine_figures", "vllm_engine"):
        del sys.modules[name]


def test_the_marks_of_whole_engines_are_those_of_their_figures(engines: Any) -> None:
    record = json.loads((BENCHMARKS / "results" / "vllm_engine.json").read_text(encoding="utf-8"))
    assert engines.marks(record["figures"]) == record["marks"]
    assert {(mark["model"], mark["load"], mark["beside"]) for mark in record["marks"]} == {
        (model, load, beside) for model in engines.CONFIGS for load, _, beside, _ in engines.MARKS
    }


def test_a_mark_of_decoding_is_of_steps_that_only_decode_where_both_were_timed(engines: Any) -> None:
    def row(backend: str, **figures: float) -> dict[str, Any]:
        return {"model": "llama", "backend": backend, "load": "64 of 2k + 256", **figures}

    ours, old = row("attnreg", **{"decode ms": 2.0, "ms a token": 9.0}), row("FLASH_ATTN", **{"ms a token": 6.0})
    (mark,) = engines.marks([ours, old])
    assert (mark["figure"], mark["ratio"], mark["met"]) == ("ms a token", 1.5, False)
    (mark,) = engines.marks([ours, {**old, "decode ms": 4.0}])
    assert (mark["figure"], mark["ratio"], mark["met"]) == ("decode ms", 0.5, True)
    assert engines.marks([ours]) == []


def test_a_step_that_waits_is_not_the_time_of_a_step_that_decodes(engines: Any) -> None:
    # two prompts, then decodes of 2 ms, one of which waits for 30
    ended = [0.1, 0.2, 0.202, 0.204, 0.234, 0.236, 0.238]
    assert engines.decode_ms(ended, 0.2) == 2.0
    assert engines.decode_ms(ended, 0.237) == engines.decode_ms([], 0.0) == 0.0


def test_engines_that_are_measured_in_parts_become_one_record(engines: Any, tmp_path: Path) -> None:
    def row(backend: str, load: str, **rest: Any) -> dict[str, Any]:
        return {"model": "llama", "backend": backend, "load": load, **rest}

    record, machine = tmp_path / "it.json", {"device": "here", "vllm": "1", "date": "2026-01-01"}
    stopped, old = row("attnreg", "", problem="stopped"), row("FLASH_ATTN", "b", seconds=1)
    before = {"machine": machine, "figures": [old, row("attnreg", "a", seconds=2), stopped]}
    record.write_text(json.dumps({**before, "kernels": sys.modules["measuring"].kernels()}))
    new = [row("attnreg", "a", seconds=3), row("attnreg", "b", seconds=4)]
    assert engines.merged(record, {**machine, "date": "2026-01-02"}, new) == [old, *new]
    # another release, or another device: nothing of it can be compared
    assert engines.merged(record, {**machine, "vllm": "2"}, new) == new
    # nor can figures of other kernels
    record.write_text(json.dumps({**before, "kernels": {"TRITON_ATTN": "0"}}))
    assert engines.merged(record, {**machine, "date": "2026-01-02"}, new) == new


def test_every_case_of_mla_runs_at_small_sizes() -> None:
    # whether kernels are interpreted is decided where they are defined, so in a process of their own
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / "mla.py"), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert len(names) == len({*names}) == 19
    for word in ("merge", "decode b", "decode fp8 ", "decode fp8_ds_mla", "sparse decode", "prefill 4k", "context in"):
        assert any(word in name for name in names), word


def test_the_host_is_timed_without_a_gpu() -> None:
    """The stand-ins of benchmarks/host_stub.py stand where a call's path goes: tokens of both forms come to an end."""
    names = [
        "one launch",
        *(f"a token of 8 layers, {case}, attnreg" for case in ("b1", "b1, static cache", "b4, latents")),
    ]
    command = [sys.executable, str(BENCHMARKS / "host.py"), "--serve", "--stubbed"]
    done = subprocess.run(command, input="\n".join(names), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures, *times = map(json.loads, done.stdout.splitlines())
    assert {*names} <= {*figures}
    assert len(times) == len(names)
    assert all(isinstance(us, float) and us > 0 for us in times)


def test_a_run_that_is_ended_loses_no_figure(figures_class: Any, tmp_path: Path) -> None:
    record, machine = tmp_path / "it.json", {"device": "here", "torch": "1", "date": "2026-01-01"}
    figures = figures_class(record, machine, ceilings={"read": 1})
    figures.add({"case": "a", "us": 1.0})
    # nothing is done at the end
    figures.add({"case": "b", "us": 2.0})
    kept = json.loads(record.read_text())
    # the digests of the kernels say later whether their code has changed
    assert kept.pop("kernels")["TRITON_ATTN"] == kernel_digest(load_registry("default"), "TRITON_ATTN")
    assert kept == {
        "machine": machine,
        "ceilings": {"read": 1},
        "figures": [{"case": "a", "us": 1.0}, {"case": "b", "us": 2.0}],
    }
    # later, on the same machine: what is measured anew takes its place
    figures_class(record, {**machine, "date": "2026-01-02"}).add({"case": "a", "us": 3.0})
    assert json.loads(record.read_text())["figures"] == [{"case": "a", "us": 3.0}, {"case": "b", "us": 2.0}]
    figures_class(record, {**machine, "torch": "2"}).add({"case": "b", "us": 4.0})
    assert json.loads(record.read_text())["figures"] == [{"case": "b", "us": 4.0}]
    # figures of another kernel are no longer kept
    record.write_text(record.read_text().replace(kernel_digest(load_registry("default"), "TRITON_ATTN") or "", "0"))
    figures_class(record, {**machine, "torch": "2"}).add({"case": "a", "us": 5.0})
    assert json.loads(record.read_text())["figures"] == [{"case": "a", "us": 5.0}]


# of figures that are the better the smaller they are
KINDS = ("bytes", "key_error", "value_error", "output_error", "kl")


def test_the_quality_of_packed_formats_on_random_data_and_real_weights(tmp_path: Path) -> None:
    record = tmp_path / "it.json"
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(BENCHMARKS / "kv_quality.py"),
        "--small",
        "--tokens",
        "64",
        "--record",
    ]
    done = subprocess.run([*command, str(record)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = {(f["source"], f["format"]): f for f in json.loads(record.read_text())["figures"]}
    assert {source for source, _ in figures} == {"gaussian", "outliers", "all-MiniLM-L6-v2"}
    for source in ("gaussian", "outliers"):
        four, three = (figures[source, f"turboquant_{n}bit_ub"] for n in (4, 3))
        # the levels of a Gaussian's codebook: 0.0095 of the variance in 4 bits, 0.0345 in 3
        assert four["key_error"] == pytest.approx(0.0092, rel=0.15)
        assert three["key_error"] == pytest.approx(0.033, rel=0.15)
        assert four["bytes"] < figures[source, "int4_hadamard"]["bytes"]
    # at fewer bytes no figure is worse than that of rotated 4-bit codes, and none of 3 bits than with corrected norms
    for source in ("gaussian", "outliers", "all-MiniLM-L6-v2"):
        for ours, peer in (("turboquant_4bit_ls", "int4_hadamard"), ("turboquant_3bit_ls", "turboquant_3bit_nc")):
            mine, other = figures[source, ours], figures[source, peer]
            assert {name for name in KINDS if mine[name] > other[name]} == set()
    # rotation keeps outlier channels of values from setting the scale of the others
    assert figures["outliers", "turboquant_4bit_ub"]["value_error"] * 3 < figures["outliers", "int4"]["value_error"]
    real = figures["all-MiniLM-L6-v2", "turboquant_4bit_ub"]
    assert (
        figures["all-MiniLM-L6-v2", "fp8"]["kl"] < real["kl"] < figures["all-MiniLM-L6-v2", "turboquant_3bit_ub"]["kl"]
    )


@pytest.fixture
def sglang_engines(engines: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/sglang_engine.py as a module; it imports SGLang only where it measures."""
    monkeypatch.delitem(sys.modules, "sglang_engine", raising=False)
    import sglang_engine

    yield sglang_engine
    del sys.modules["sglang_engine"]


def test_models_of_sglangs_engine_are_eight_layers_of_text(sglang_engines: Any, tmp_path: Path) -> None:
    classes = {}
    for name in sglang_engines.CONFIGS:
        config = json.loads((sglang_engines.write_model(name, tmp_path) / "config.json").read_text())
        classes[name] = config["architectures"]
        assert config["num_hidden_layers"] == 8
        assert len(config.get("layer_types", range(8))) == 8
        assert "vision_config" not in config
    assert classes == {
        "llama": ["LlamaForCausalLM"],
        "gpt-oss": ["GptOssForCausalLM"],
        "gemma-3": ["Gemma3ForCausalLM"],
    }


def test_marks_of_sglangs_engine_compare_what_both_have(sglang_engines: Any) -> None:
    def row(backend: str, load: str, **figures: float) -> dict[str, Any]:
        return {"model": "llama", "backend": backend, "load": load, **figures}

    rows = [
        row("triton", "64 of 2k + 256", **{"tokens/s": 100.0}),
        row("attnreg", "64 of 2k + 256", **{"tokens/s": 120.0, "decode ms": 3.0}),
        row("triton", "1 of 32k, first token", seconds=2.0),
        row("attnreg", "1 of 32k, first token", seconds=1.0),
    ]
    found = sglang_engines.marks(rows)
    assert [(one["load"], one["ratio"], one["met"]) for one in found] == [
        ("64 of 2k + 256", 1.2, True),
        ("1 of 32k, first token", 0.5, False),
    ]


def engine_run(sglang_engines: Any, folder: Path, backend: str, code: str, loads: str = "64 of 2k") -> Any:
    """An `EngineRun` whose process runs this code in place of an engine."""
    log = folder / f"{backend}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=file, stderr=file, start_new_session=True
        )
    return sglang_engines.EngineRun("llama", backend, loads, process, log)


STARTED = "import sys, time; print('READY', flush=True); sys.stdin.readline()\n"
SERVES = "print('attnreg: its kernels serve the layers of this run, over pages of 64', flush=True)\n"
FIGURE = """print('ROW {"load": "64 of 2k + 256", "seconds": 1.5}', flush=True)\n"""


def test_an_engine_runs_its_loads_when_it_is_let(sglang_engines: Any, tmp_path: Path) -> None:
    run = engine_run(sglang_engines, tmp_path, "triton", STARTED + FIGURE)
    run.wait_for_start(30)
    assert "ROW" not in run.text()
    assert run.process.poll() is None
    assert run.rows(30) == [{"model": "llama", "backend": "triton", "load": "64 of 2k + 256", "seconds": 1.5}]


@pytest.mark.parametrize(("backend", "code"), [("attnreg", ""), ("triton", SERVES)])
def test_figures_of_another_backend_are_dropped(sglang_engines: Any, tmp_path: Path, backend: str, code: str) -> None:
    (row,) = engine_run(sglang_engines, tmp_path, backend, STARTED + code + FIGURE).rows(30)
    assert row["load"] == ""
    assert row["problem"].startswith("attnreg's backend")


def test_an_engine_that_takes_too_long_ends_with_its_processes(sglang_engines: Any, tmp_path: Path) -> None:
    child = "import subprocess; print('CHILD', subprocess.Popen(['sleep', '300']).pid, flush=True)\n"
    code = SERVES + child + STARTED + FIGURE + "time.sleep(300)"
    run = engine_run(sglang_engines, tmp_path, "attnreg", code, loads="2k")
    run.wait_for_start(30)
    done, late = run.rows(3)
    assert done["seconds"] == 1.5
    assert late["problem"].startswith("stopped after 3 seconds")
    pid = int(run.text().partition("CHILD ")[2].split()[0])
    status = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        # the child of an ended parent may wait for its new parent, and a killed one for the processor
        if not status.exists() or status.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the child of the engine runs on")


def test_an_engine_that_fails_at_its_start_has_its_last_words_as_problem(sglang_engines: Any, tmp_path: Path) -> None:
    run = engine_run(sglang_engines, tmp_path, "fa3", "raise SystemExit('the factory refuses this GPU')")
    run.wait_for_start(30)
    (row,) = run.rows(30)
    assert row["problem"].endswith("the factory refuses this GPU")
