"""What each format gives: the findings of one file of each, with their places."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from attnreg.cli import main
from attnreg.engines.deploy.files import launches_in_text, text_of

DATA = ROOT / "tests/data/deploy"
# file -> line:column and code of each finding, on a GPU of --arch h100 where the file names none
FINDINGS = {
    "Dockerfile": ["6:5 removed-variable", "9:7 absent-word"],
    "command.sh": ["2:11 absent-word", "3:8 unknown-option"],
    "compose.yaml": ["10:7 absent-backend", "15:7 removed-variable", "17:31 absent-word"],
    "deployment.yaml": ["5:27 removed-variable", "9:5 absent-backend", "39:67 refused-backend"],
    "graph.yaml": ["9:11 removed-variable", "15:41 restated-default"],
    "leader.yaml": ["17:19 absent-word"],
    "options.yaml": ["3:1 absent-backend"],
    "published.yaml": ["13:18 absent-word", "18:28 unknown-option", "21:17 removed-variable", "23:18 refused-backend"],
    "serve.sh": ["7:3 absent-backend", "10:10 absent-word"],
}
# file -> engine, release, GPU and model of each launch
LAUNCHES = {
    "Dockerfile": [("vllm", "0.33.0", "", "Llama-3.1-8B")],
    "deployment.yaml": [
        ("sglang", "0.5.23", "NVIDIA-B200", "DeepSeek-V3"),
        ("vllm", "0.31.0", "NVIDIA-H100-80GB-HBM3", "Llama-3.1-8B"),
    ],
    # the tag of Dynamo's image is Dynamo's release
    "graph.yaml": [("vllm", "", "NVIDIA-H200", "Llama-3.1-8B")],
    "leader.yaml": [("vllm", "0.33.0", "", "DeepSeek-V3")],
    "compose.yaml": [("vllm", "0.33.0", "", "Llama-3.1-8B")] * 2,
    "serve.sh": [("vllm", "", "", "Llama-3.1-8B")],
    "published.yaml": [
        ("vllm", "", "", "Llama-3.1-8B"),
        ("vllm", "", "", "example/Llama-3.1-8B-FP8"),
        ("vllm", "", "", "Llama-3.1-8B"),
        ("vllm", "", "mi300x", "Llama-3.1-8B"),
        ("vllm", "", "b200", "Llama-3.1-8B"),
    ],
}


@pytest.fixture
def checked(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def call(*words: str) -> tuple[int, str, str]:
        code = main(["check", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.mark.parametrize("name", FINDINGS)
def test_each_finding_has_its_place(name: str, checked: Callable[..., Any]) -> None:
    code, out, _ = checked(str(DATA / name), "--arch", "h100", "--json")
    found = [(f["where"].split(":", 1)[1], f["code"]) for f in json.loads(out)["findings"]]
    assert [" ".join(each) for each in found] == FINDINGS[name]
    assert code == 1


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launch_has_engine_release_gpu_and_model(name: str) -> None:
    launches = launches_in_text(text_of(DATA / name), DATA / name)
    assert [(x.engine, x.version, x.arch, x.named_model) for x in launches] == LAUNCHES[name]


def test_no_value_of_a_variable_is_printed(checked: Callable[..., Any]) -> None:
    for name in [path.name for path in DATA.iterdir()]:
        for form in ("text", "json", "github", "sarif"):
            _, out, err = checked(str(DATA / name), "--output-format", form)
            assert "s3cret" not in "".join((out + err).split()), (name, form)


def test_a_value_of_the_environment_is_named_by_its_variable(tmp_path: Path, checked: Callable[..., Any]) -> None:
    script = tmp_path / "serve.sh"
    script.write_text("export KEY=s3cret\nvllm serve $KEY --dtype $KEY --block-size $KEY --attention-backend x$KEY\n")
    pod = tmp_path / "pod.yaml"
    pod.write_text(
        "apiVersion: v1\nkind: Pod\nspec: {containers: [{image: 'vllm/vllm-openai:v0.33.0', "
        "args: [--dtype=$(KEY)], env: [{name: KEY, value: s3cret}]}]}\n"
    )
    for file in (script, pod):
        for form in ("text", "json", "github", "sarif"):
            code, out, err = checked(str(file), "--output-format", form)
            assert code == 1
            assert "s3cret" not in "".join((out + err).lower().split())
            assert "dtype $KEY" in out.replace("\n ", "")


@pytest.mark.parametrize("name", ["chart.yaml", "loop.yaml"])
def test_a_template_is_not_guessed(name: str, checked: Callable[..., Any]) -> None:
    code, _, err = checked(str(DATA / name))
    assert code == 2
    assert "this is a template" in err
    assert "helm template" in err


def test_an_option_that_a_branch_decides_leaves_the_run_unchecked(checked: Callable[..., Any]) -> None:
    _, out, _ = checked(str(DATA / "serve.sh"), "--arch", "h100", "--json")
    assert any("a branch of the script decides --kv-cache-dtype" in note for note in json.loads(out)["notes"])


def test_one_unreadable_file_of_several_is_reported(tmp_path: Path, checked: Callable[..., Any]) -> None:
    binary = tmp_path / "model.bin"
    binary.write_bytes(b"\0\1\2")
    code, out, err = checked(str(binary), str(DATA / "options.yaml"), str(tmp_path / "absent.sh"))
    assert code == 2
    assert f"{binary}:1:1: the file has a NUL byte" in err
    assert "absent.sh:1:1: cannot be read" in err
    assert "options.yaml:3:1: absent-backend" in out.replace("\n", "")
    assert out.splitlines()[-1] == "3 files, 1 launch: 1 finding; 2 files not read whole"


def test_a_file_without_an_engine_is_a_note_beside_others(tmp_path: Path, checked: Callable[..., Any]) -> None:
    service = tmp_path / "service.yaml"
    service.write_text("apiVersion: v1\nkind: Service\nmetadata: {name: x}\n")
    code, out, _ = checked(str(service), str(DATA / "options.yaml"), "--json")
    answer = json.loads(out)
    assert (code, answer["not_read"]) == (1, [])
    assert f"{service}: nothing in the file runs an engine" in answer["notes"]
    assert checked(str(service))[0] == 2


def test_annotations_name_place_and_code(checked: Callable[..., Any]) -> None:
    _, out, _ = checked(str(DATA / "options.yaml"), "--output-format", "github")
    file = str(DATA / "options.yaml")
    assert out.startswith(f"::error file={file},line=3,col=1,title=absent-backend [--attention-backend%2C fa5]::")
    _, out, _ = checked(str(DATA / "loop.yaml"), "--output-format", "github")
    assert out.startswith(f"::error file={DATA / 'loop.yaml'},line=5,col=1,title=not read::this is a template%3A"[:-3])


def test_sarif_has_rules_results_and_notifications(checked: Callable[..., Any]) -> None:
    code, out, _ = checked(str(DATA / "Dockerfile"), str(DATA / "loop.yaml"), "--output-format", "sarif")
    assert code == 2
    log = json.loads(out)
    [run] = log["runs"]
    assert (log["version"], run["tool"]["driver"]["name"]) == ("2.1.0", "attnreg")
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} == {"removed-variable", "absent-word"}
    assert [(r["ruleId"], r["level"]) for r in run["results"]] == [
        ("removed-variable", "warning"),
        ("absent-word", "error"),
    ]
    region = run["results"][1]["locations"][0]["physicalLocation"]["region"]
    assert region == {"startLine": 9, "startColumn": 7}
    [invocation] = run["invocations"]
    assert not invocation["executionSuccessful"]
    assert len(invocation["toolExecutionNotifications"]) == 1


def test_gpu_and_model_of_the_command_line_fill_what_a_file_lacks(tmp_path: Path, checked: Callable[..., Any]) -> None:
    script = tmp_path / "serve.sh"
    script.write_text("vllm serve acme/model --attention-backend FLASHMLA\n")
    code, out, _ = checked(str(script), "--arch", "H100", "--model", "Llama-3.1-8B", "--json")
    answer = json.loads(out)
    assert (code, [f["code"] for f in answer["findings"]]) == (1, ["refused-backend"])
    assert answer["launches"][0]["arch"] == "sm90"
    assert answer["launches"][0]["checked_whole"]
    # the file's own model counts before the option's
    script.write_text("vllm serve DeepSeek-V3 --attention-backend FLASHMLA --tensor-parallel-size 8\n")
    code, out, _ = checked(str(script), "--arch", "H100", "--model", "Llama-3.1-8B", "--json")
    assert (code, json.loads(out)["launches"][0]["model"].split("/")[-2]) == (0, "DeepSeek-V3")
    code, _, err = checked(str(script), "--arch", "H99")
    assert code == 2
    assert "unknown architecture 'H99'" in err


def test_a_model_of_the_hubs_cache_and_a_directory_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: Callable[..., Any]
) -> None:
    config = (ROOT / "examples/configs/Llama-3.1-8B/config.json").read_text()
    cached = tmp_path / "hub/models--acme--small/snapshots/0123"
    local = tmp_path / "local"
    for folder in (cached, local):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(config)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    script = tmp_path / "serve.sh"
    for model in ("acme/small", str(local)):
        script.write_text(f"vllm serve {model} --attention-backend FLASHMLA\n")
        code, out, _ = checked(str(script), "--arch", "H100", "--json")
        assert (code, [f["code"] for f in json.loads(out)["findings"]]) == (1, ["refused-backend"])


def test_a_release_without_a_table_is_checked_by_the_nearest(tmp_path: Path, checked: Callable[..., Any]) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text("services: {x: {image: 'vllm/vllm-openai:v0.29.5', command: --model m --attention-backend NOPE}}\n")
    code, out, _ = checked(str(file), "--json")
    answer = json.loads(out)
    assert code == 1
    assert answer["launches"][0]["registry"] == "vllm-0.29.0"
    assert any(
        "vllm 0.29.5 has no table: vllm-0.29.0 is the nearest that is bundled" in note for note in answer["notes"]
    )


DRAFTS = {
    "json": '--speculative-config \'{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 3}\'',
    "dotted": "--speculative-config.method eagle3 --speculative-config.model DRAFT",
}


@pytest.mark.parametrize("form", DRAFTS)
def test_a_draft_is_read_and_named_where_it_is_unknown(form: str, tmp_path: Path, checked: Callable[..., Any]) -> None:
    script = tmp_path / "serve.sh"
    script.write_text(f"vllm serve Llama-3.1-8B {DRAFTS[form].replace('DRAFT', 'Qwen3-8B')}\n")
    code, out, _ = checked(str(script), "--arch", "H100", "--json")
    assert (code, json.loads(out)["findings"]) == (0, [])
    script.write_text(f"vllm serve Llama-3.1-8B {DRAFTS[form].replace('DRAFT', 'acme/draft')}\n")
    code, out, _ = checked(str(script), "--arch", "H100", "--json")
    assert any("the config of the draft acme/draft is not here" in note for note in json.loads(out)["notes"])
    [launch] = launches_in_text(text_of(script), script)
    assert ("--speculative-config.model", "acme/draft") in {(o.name, o.value) for o in launch.options}


def test_a_draft_in_yaml_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: a/b\nkv-cache-dtype: fp8\nspeculative-config:\n  method: mtp\n  model: x\n")
    [launch] = launches_in_text(text_of(file), file, "vllm")
    assert {(o.name, o.value) for o in launch.options} >= {
        ("--speculative-config.method", "mtp"),
        ("--speculative-config.model", "x"),
    }


def test_options_of_several_engines_need_a_name(tmp_path: Path, checked: Callable[..., Any]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("kv-cache-dtype: fp9\n")
    code, _, err = checked(str(file))
    assert code == 2
    assert "help: name one: --engine vllm" in err
    code, out, _ = checked(str(file), "--engine", "sglang", "--json")
    assert (code, json.loads(out)["launches"][0]["registry"]) == (1, "sglang-0.5.23")


def test_a_shell_script_needs_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tree_sitter_bash", None)
    code, _, err = checked(str(DATA / "serve.sh"))
    assert code == 2
    assert "pip install tree-sitter tree-sitter-bash" in err
    # a manifest without a shell needs no parser
    assert checked(str(DATA / "deployment.yaml"))[0] == 1


PREDICTOR = """\
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {{name: x}}
spec:
  predictor:
    nodeSelector: {{nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}}
    model:
      modelFormat: {{name: {format}}}
      storageUri: hf://openai/gpt-oss-20b
      args: {args}
"""
POD = "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - image: vllm/vllm-openai:v0.33.0\n    args: {args}\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (PREDICTOR.format(format="huggingface", args="[--attention-backend=FOO]"), ["10:14 absent-backend"]),
        (PREDICTOR.format(format="vllm", args="[--attn_backend=FOO, --backend=vllm]"), ["10:14 unknown-option"]),
        (PREDICTOR.format(format="huggingface", args='["--kv-cache-dtype fp8"]'), ["10:14 unknown-option"]),
        (PREDICTOR.format(format="huggingface", args="[--model_id=openai/gpt-oss-20b, --model_name=x]"), []),
        (POD.format(args='[m, "--attention-backend FLASH_ATTN"]'), ["6:15 unknown-option"]),
        (POD.format(args='[m, "--attn-backend=A B", "--chat-template a b"]'), ["6:15 unknown-option"]),
    ],
)
def test_words_of_containers_are_taken_as_they_are(
    text: str, found: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text(text)
    assert main(["check", str(file), "--json"]) == bool(found)
    data = json.loads(capsys.readouterr().out)
    assert [f"{f['where'].split(':', 1)[1]} {f['code']}" for f in data["findings"]] == found
    [launch] = data["launches"]
    assert (launch["arch"] == "sm90") == ("predictor" in text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            POD.format(args='"--attention-backend FLASH_ATTN"'),
            "6:11: args is a text, and Kubernetes takes a list of words",
        ),
        (PREDICTOR.format(format="sklearn", args="[--attention-backend=FOO]"), "nothing in the file runs an engine"),
        (PREDICTOR.format(format="huggingface", args="[--backend=huggingface]"), "nothing in the file runs an engine"),
    ],
)
def test_a_container_that_cannot_run_an_engine_so_is_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text(text)
    assert main(["check", str(file)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "release"),
    [
        ('docker run --entrypoint bash vllm/vllm-openai:v0.26.0 -c "{}"', "0.26.0"),
        ('docker run vllm/vllm-openai:v0.26.0 bash -c "{}"', "0.26.0"),
        ("docker run rocm/vllm:rocm7.0_vllm_0.26.0 {}", "0.26.0"),
        ("docker run rocm/vllm:rocm7_vllm_0.26.0_20261101 {}", "0.26.0"),
        ("docker run rocm/vllm:latest {}", ""),
    ],
)
def test_the_release_is_that_of_the_image(command: str, release: str, tmp_path: Path) -> None:
    script = tmp_path / "serve.sh"
    script.write_text(command.format("vllm serve Llama-3.1-8B --attention-backend NONE") + "\n", encoding="utf-8")
    assert [launch.version for launch in launches_in_text(text_of(script), script)] == [release]
