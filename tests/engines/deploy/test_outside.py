"""Options of an engine in what attnreg does not follow: a note names their lines, so that nothing passes in silence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

from attnreg.engines.reports import check_files
from attnreg.engines.surroundings import LaunchSurroundings

RUN = "vllm serve Qwen/Qwen3-8B --block-size 16\n"
SERVICE = "services:\n  a:\n    image: vllm/vllm-openai:v0.33.0\n    command: [--model, Qwen/Qwen3-8B]\n"
POD = """apiVersion: v1
kind: Pod
spec:
  containers:
  - {name: a, image: "vllm/vllm-openai:v0.33.0", args: [--model, Qwen/Qwen3-8B]}
"""
# name of a file -> its text, and the lines of the note
FILES = {
    "alias.sh": (f"{RUN}alias v='vllm serve'\nv Qwen/Qwen3-8B --attention-backend NOPE\n", "line 3 has"),
    "read.sh": (f"{RUN}read -r -d '' CMD <<'EOF'\nvllm serve M --kv-cache-dtype fp88\nEOF\n$CMD\n", "line 3 has"),
    "default.sh": (f"{RUN}${{VLLM_BIN:-vllm}} serve M --attention-backend NOPE\n", "line 2 has"),
    "comment.sh": (f"{RUN}# vllm serve M --attention-backend NOPE\n", ""),
    "other.sh": (f"{RUN}curl --config x --mode y\n", ""),
    "compose.yaml": (
        SERVICE
        + "  b:\n    image: ours/serve:1\n    command: [--kv-cache-dtype, fp88]\n"
        + "  c:\n    extends: a\n    command: [--attention-backend, NOPE]\n",
        "lines 7, 10 have",
    ),
    "pod.yaml": (
        POD
        + "  - {name: b, image: quay.io/acme/inference:1.0, args: [--attention-backend, NOPE]}\n"
        + "  initContainers:\n  - {name: c, image: x, args: [--kv-cache-dtype, fp88]}\n",
        "lines 6, 8 have",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_note_names_the_lines_outside(name: str, tmp_path: Path) -> None:
    text, lines = FILES[name]
    (tmp_path / name).write_text(text)
    [report] = check_files([str(tmp_path / name)], LaunchSurroundings(), lambda engine: None)
    assert report.launches
    notes = [note for note in report.notes if "outside each launch" in note]
    assert [lines in note for note in notes] == ([True] if lines else [])


def test_an_image_with_a_variable_for_its_tag_is_read(tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(SERVICE.replace("v0.33.0", "${TAG:-v0.24.0}").replace("Qwen3-8B]", "Qwen3-8B, --block-size, x]"))
    [report] = check_files([str(file)], LaunchSurroundings(), lambda engine: None)
    assert len(report.launches) == 1
    assert any("no release is named" in note for note in report.notes)


def test_docker_runs_the_engine_as_its_entry(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text("docker run --entrypoint vllm vllm/vllm-openai:v0.33.0 serve M --attention-backend NOPE\n")
    [report] = check_files([str(file)], LaunchSurroundings(), lambda engine: None)
    assert [finding.code for finding in report.findings] == ["absent-backend"]


def test_a_pipe_is_read_once() -> None:
    text, lines = FILES["alias.sh"]
    command = [sys.executable, "-m", "attnreg", "check", "/dev/stdin"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, cwd=ROOT)
    assert lines in " ".join(done.stdout.split())


def test_sidecars_and_shared_gpus_are_read(tmp_path: Path) -> None:
    file = tmp_path / "pod.yaml"
    side = "{name: b, image: 'vllm/vllm-openai:v0.33.0', args: [--model, M, --attention-backend, NOPE]}"
    file.write_text(
        POD + f"  initContainers:\n  - {side}\n  nodeSelector: {{nvidia.com/gpu.product: NVIDIA-L40S-SHARED}}\n"
    )
    [report] = check_files([str(file)], LaunchSurroundings(), lambda engine: None)
    assert [launch.arch for launch, _ in report.launches] == ["NVIDIA-L40S"] * 2
    assert [finding.code for finding in report.findings] == ["absent-backend"]


def test_compose_takes_line_breaks_of_a_command_for_spaces(tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    lines = "|\n      --model Qwen/Qwen3-8B\n      --block-size 16\n      --attention-backend NOPE\n"
    file.write_text(SERVICE.replace("[--model, Qwen/Qwen3-8B]\n", lines))
    [report] = check_files([str(file)], LaunchSurroundings(), lambda engine: None)
    assert [(finding.code, finding.where.line) for finding in report.findings] == [("absent-backend", 7)]
    assert report.outside == ""
