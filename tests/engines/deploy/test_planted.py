"""Each option of launch.yaml, misspelt once in each format: a finding with its place, and never an all-clear."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from attnreg.engines.deploy.files import launches_in_text, text_of
from attnreg.engines.launches import check_launch
from attnreg.engines.settings import known_engines
from attnreg.engines.surroundings import LaunchSurroundings

COMMANDS = {"vllm": ["vllm", "serve", "m"], "sglang": ["python3", "-m", "sglang.launch_server"]}
IMAGES = {"vllm": "vllm/vllm-openai:v0.33.0", "sglang": "lmsysorg/sglang:v0.5.23"}
# an option by which a file of options is known to be the engine's
OWN = {"vllm": "block-size", "sglang": "tp-size"}
OPTIONS = [(engine, option) for engine, about in known_engines().items() for option in about["options"]]


def misspelt(engine: str, option: str) -> str:
    """The option with two letters of its last word in the wrong order."""
    about = known_engines()[engine]
    taken = {*about["options"], *about.get("others", ())}
    start = max(option.rfind("."), option.rfind("-")) + 1
    for i in [*range(start, len(option) - 1), *range(2, start - 1)]:
        swapped = option[:i] + option[i + 1] + option[i] + option[i + 2 :]
        if swapped != option and swapped not in taken and option[i : i + 2].isalpha():
            return swapped
    raise AssertionError(option)


def container(engine: str, words: list[str]) -> dict[str, object]:
    return {"name": "main", "image": IMAGES[engine], "command": COMMANDS[engine], "args": words}


def pod(kind: str, spec: dict[str, object]) -> str:
    return yaml.safe_dump({"apiVersion": "v1", "kind": kind, "metadata": {"name": "x"}, "spec": spec})


def nested(option: str) -> dict[str, object]:
    *objects, last = option.removeprefix("--").split(".")
    value: object = {last: 1}
    for name in reversed(objects):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def line(engine: str, option: str) -> str:
    return " ".join([*COMMANDS[engine], option, "1"])


FORMATS: dict[str, tuple[str, Callable[[str, str], str]]] = {
    "a script": ("serve.sh", lambda e, o: f"#!/bin/sh\n{line(e, o)}\n"),
    "an array": ("serve.sh", lambda e, o: f'CMD=(\n  {" ".join(COMMANDS[e])}\n)\nCMD+=({o} 1)\n"${{CMD[@]}}"\n'),
    "a branch": (
        "serve.sh",
        lambda e, o: f'ARGS=""\nif [ $1 ]; then ARGS="$ARGS {o} 1"; fi\n{" ".join(COMMANDS[e])} $ARGS\n',
    ),
    "a function": ("serve.sh", lambda e, o: f'run() {{ {" ".join(COMMANDS[e])} "$@"; }}\nrun {o} 1\n'),
    "a here-document": ("serve.sh", lambda e, o: f"bash <<'EOF'\n{line(e, o)}\nEOF\n"),
    "a Deployment": (
        "d.yaml",
        lambda e, o: pod("Deployment", {"template": {"spec": {"containers": [container(e, [o, "1"])]}}}),
    ),
    "a Pod with a shell": (
        "p.yaml",
        lambda e, o: pod("Pod", {"containers": [{"image": IMAGES[e], "command": ["sh", "-c", f"exec {line(e, o)}"]}]}),
    ),
    "a LeaderWorkerSet": (
        "l.yaml",
        lambda e, o: pod(
            "LeaderWorkerSet",
            {"leaderWorkerTemplate": {"leaderTemplate": {"spec": {"containers": [container(e, [f"{o}=1"])]}}}},
        ),
    ),
    "a graph of Dynamo": (
        "g.yaml",
        lambda e, o: pod(
            "DynamoGraphDeployment",
            {
                "services": {
                    "w": {
                        "extraPodSpec": {
                            "mainContainer": {"command": ["python3", "-m", f"dynamo.{e}"], "args": [o, "1"]}
                        }
                    }
                }
            },
        ),
    ),
    "a compose file": (
        "compose.yaml",
        lambda e, o: yaml.safe_dump({"services": {"x": {"image": IMAGES[e], "command": line(e, o)}}}),
    ),
    "a compose list": (
        "compose.yaml",
        lambda e, o: yaml.safe_dump({"services": {"x": {"entrypoint": COMMANDS[e], "command": [o, "1"]}}}),
    ),
    "a Dockerfile": ("Dockerfile", lambda e, o: f"FROM {IMAGES[e]}\nCMD {json.dumps([*COMMANDS[e], o, '1'])}\n"),
    "a Dockerfile's shell": ("Dockerfile", lambda e, o: f"FROM {IMAGES[e]}\nCMD exec {line(e, o)}\n"),
    "a recipe": ("r.yaml", lambda e, o: yaml.safe_dump({"engine": e, "args": [o, "1"]})),
    "a recipe's mapping": ("r.yaml", lambda e, o: yaml.safe_dump({"engine": e, "args": {o: 1}})),
    "a file of options": ("c.yaml", lambda e, o: yaml.safe_dump({OWN[e]: 2, **nested(o)})),
    "a ConfigMap": (
        "m.yaml",
        lambda e, o: (
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "ConfigMap",
                    "metadata": {"name": "c"},
                    "data": {"c.yaml": yaml.safe_dump({OWN[e]: 2, **nested(o)})},
                }
            )
            + "---\n"
            + pod("Pod", {"containers": [container(e, ["--config", "/etc/c.yaml"])]})
        ),
    ),
    "a published recipe": (
        "v.yaml",
        lambda e, o: yaml.safe_dump(
            {"meta": {"title": "x"}, "model": {"model_id": "x/y"}, "variants": {"a": {"extra_args": [o, "1"]}}}
        ),
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_no_misspelt_option_is_an_all_clear(name: str, tmp_path: Path) -> None:
    file, text = FORMATS[name]
    path, silent = tmp_path / file, list[tuple[str, str]]()
    for engine, option in OPTIONS:
        if engine != "vllm" and name == "a published recipe":
            continue
        wrong = misspelt(engine, option)
        path.write_text(text(engine, wrong))
        launches = launches_in_text(text_of(path), path)
        found = [finding for launch in launches for finding in check_launch(launch, LaunchSurroundings()).findings]
        if [(finding.code, finding.subject) for finding in found] != [("unknown-option", (wrong,))]:
            silent.append((option, wrong))
        assert all(finding.where.line > 0 for finding in found)
    assert not silent
