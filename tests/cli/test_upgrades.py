"""The commands that say what an upgrade moves: what they print, and with which exit status."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from attnreg.analysis import diagram, revisions

CONFIGS = ROOT / "examples" / "configs"
VLLM = ("vllm-0.20.0", "vllm-0.33.0")
LLAMA, GPT_OSS, BERT = (str(CONFIGS / name) for name in ("Llama-3.1-8B", "gpt-oss-120b", "bert-base-uncased"))
HOPPER = ("--arch", "sm90")
# layers without softmax attention only
MAMBA = {
    "model_type": "mamba",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "state_size": 16,
    "torch_dtype": "bfloat16",
}


def diff(run: Callable[..., Any], *arguments: str) -> Any:
    """The JSON of a comparison of the two releases of vLLM."""
    return json.loads(run("diff", *VLLM, *arguments, "--json").out)


@pytest.fixture
def overlay(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        (tmp_path / "o.yaml").write_text(text)
        return str(tmp_path / "o.yaml")

    return write


def test_a_registry_does_not_change_from_itself(run: Callable[..., Any]) -> None:
    result = run("diff", "default", "default")
    assert result.status == 0
    title, *lines = result.out.splitlines()
    assert re.fullmatch(r"default@(\w+) → default@\1 · every package assumed", title)
    assert lines == [
        "nothing changes: none of 24 known models moves (25 architectures compared)",
        "",
        "all configurations: none gets another backend",
    ]


def test_the_first_answer_says_what_moves_where_and_why(run: Callable[..., Any]) -> None:
    result = run("diff", *VLLM, *HOPPER, "--model", LLAMA, "--model", BERT, "--kv-dtype", "fp8_e5m2")
    assert result.status == 1
    title, *lines = result.out.splitlines()
    assert re.fullmatch(r"vllm-0.20.0@\w+ → vllm-0.33.0@\w+ · KV cache fp8_e5m2 · every package assumed", title)
    assert [re.sub(r"yaml:\d+", "yaml:N", line) for line in lines] == [
        "2 of 2 models move on sm90 (1 architecture compared)",
        "",
        "FLASH_ATTN/FA3 → FLASHINFER/XQA",
        "  also  is no longer known to fail",
        "  after: FLASH_ATTN/FA3-4: kv_dtype is fp8_e5m2; supported: auto, float16, bfloat16, fp8, fp8_e4m3",
        "    [backends.yaml:N]",
        "  sm90: Llama-3.1-8B",
        "",
        # a layer that keeps no cache is asked for with the KV dtype that the user names
        "not known → TRITON_ATTN/paged",
        "  also  is chosen, and then fails: the first forward raises; without a KV cache the class takes no quantised",
        "        kv_cache_dtype; the first forward stops at an assertion, which lets queries be quantised for fp8 and",
        "        fp8_e4m3 only",
        "  before: vLLM 0.20.0 has no class for BertForMaskedLM; its Transformers backend takes it, and what that asks",
        "    for was not recorded (architectures.yaml:N)",
        "  sm90: bert-base-uncased",
        "note: not known of bert-base-uncased in vllm-0.20.0: vLLM 0.20.0 has no class for BertForMaskedLM; its",
        "      Transformers backend takes it, and what that asks for was not recorded (architectures.yaml:N)",
    ]


def test_every_model_is_compared(run: Callable[..., Any]) -> None:
    result = run("diff", *VLLM, "--platform", "rocm", "--model", GPT_OSS, "--model", LLAMA)
    assert result.status == 1
    assert "1 of 2 models moves on gfx1250 (7 architectures compared)" in result.out
    assert "  gfx1250: gpt-oss-120b" in result.out
    releases = ("vllm-0.31.0", "vllm-0.33.0")
    alone = run("diff", *releases, "--platform", "rocm", "--model", BERT)
    assert alone.status == 0
    assert alone.out.splitlines()[1:] == [
        "nothing changes: bert-base-uncased does not move (7 architectures compared)",
    ]


def test_a_variant_with_another_name_and_the_same_kernel_is_renamed(run: Callable[..., Any]) -> None:
    data = diff(run, *HOPPER, "--model", GPT_OSS)
    assert data["moves"] == []
    assert [(m["before"]["variant"], m["after"]["variant"]) for m in data["renamed"]] == [("FA3", "FA3-4")] * 2
    told = run("diff", *VLLM, *HOPPER, "--model", GPT_OSS)
    assert told.status == 0
    assert re.search(
        r"^renamed: FLASH_ATTN/FA3 is FLASH_ATTN/FA3-4 now, the same kernel \(backends.yaml:\d+\): gpt-oss-120b$",
        " ".join(told.out.split()).replace(" renamed:", "\nrenamed:").replace(" note:", "\nnote:"),
        re.MULTILINE,
    )
    everywhere = diff(run, *HOPPER, "--role", "target", "--phase", "any")["all_configurations"]["changes"]
    assert ("FLASH_ATTN/FA3", "FLASH_ATTN/FA3-4") in [(c["before"], c["after"]) for c in everywhere]


EMPTY: list[tuple[str, str, str]] = [
    (
        f"--model {LLAMA} --facet kv_dtype=fp8_e5m2",
        "no layer of Llama-3.1-8B asks for kv_dtype fp8_e5m2, only for auto",
        "to ask as if they did, use --kv-dtype fp8_e5m2",
    ),
    (
        f"--model {LLAMA} --facet role=vision",
        "no layer of Llama-3.1-8B asks for role vision, only for target",
        "to ask as if they did, use --role vision",
    ),
    (
        "--facet kv_dtype=fp8",
        "no layer of the 24 models asks for kv_dtype fp8, only for auto",
        "to ask as if they did, use --kv-dtype fp8",
    ),
    (
        f"--model {LLAMA} --facet feature=sinks",
        "no layer of Llama-3.1-8B asks for features sinks, only for no feature",
        "to ask as if they did, use --feature sinks",
    ),
    (
        f"--model {LLAMA} --facet cache_layout=SPLIT",
        "no layer of Llama-3.1-8B asks for cache_layout SPLIT, only for null",
        "to ask as if they did, use --set cache_layout=SPLIT",
    ),
    (
        f"--model {GPT_OSS} --facet feature=sinks --facet head_size=128",
        "no layer of gpt-oss-120b that asks for features sinks asks for head_size 128, only for 64",
        "to ask as if they did, use --head-size 128",
    ),
    (
        f"--model {LLAMA} --facet model=gpt_oss",
        "no layer of Llama-3.1-8B asks for model gpt_oss, only for llama",
        "name another model with --model",
    ),
    (
        "--facet colour=red --model " + LLAMA,
        "no request has a facet 'colour'",
        "known: all_kv_heads, architecture, asked_kv_dtype, attention, attn_type, auto_dtype, ",
    ),
    ("--facet kv_dtype=fp9 --model " + LLAMA, "unknown kv_dtype 'fp9'", "did you mean `fp8`?"),
    ("--facet arch=sm80 --model " + LLAMA, "--facet arch: no layer asks for it", "use --arch sm80"),
    ("--facet flag=aiter", "--facet flag: no layer asks for it", "use --flag aiter"),
    (
        f"--model {LLAMA} --limit 3",
        "--limit is about all configurations, and --model asks for some",
        "give --boxes too",
    ),
    ("--limit 3", "--limit is about all configurations, and --model asks for some", "give --boxes too"),
    (f"--model {LLAMA} --any-packages", "--any-packages is about all configurations, and --model asks for some", ""),
]


@pytest.mark.parametrize(("line", "message", "hint"), EMPTY, ids=[case[0].replace(str(ROOT), "") for case in EMPTY])
def test_an_empty_question_is_refused_with_its_cure(
    run: Callable[..., Any], line: str, message: str, hint: str
) -> None:
    result = run("diff", *VLLM, *HOPPER, *line.split())
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"attnreg: {message}\n  help: {hint}")


WRONG: list[tuple[str, str]] = [
    ("--arch sm37", "unknown architecture 'sm37'"),
    ("--platform tpu", "unknown platform 'tpu'"),
    ("--platform rocm --arch sm90", "arch is sm90, which belongs to platform cuda, not rocm"),
    (f"--arch sm90 --kv-dtype fp8_foo --model {LLAMA}", "kv_dtype names 'fp8_foo', which vllm-0.20.0@"),
    (f"--arch sm90 --set colour=red --model {LLAMA}", "colour is no facet of vllm-0.20.0@"),
    ("--arch sm90 --flag fast", "unknown flag 'fast'"),
    ("--arch sm90 --package torhc", "unknown package 'torhc'"),
    (f"--arch sm90 --model {LLAMA} --layer 99", "Llama-3.1-8B has no layer 99"),
    (f"--arch sm90 --draft {LLAMA}", "--draft says something of a model"),
    ("--arch sm90 --kv-dtype octave_k3v3 --boxes", "kv_dtype octave_k3v3: only one of the registries knows it"),
    ("--arch sm90 --limit 0 --boxes", "--limit is 0; expected an integer of at least 1"),
    ("--arch sm90 --limit -3 --boxes", "--limit is -3; expected an integer of at least 1"),
    (f"--facet head_size=wide --model {LLAMA}", "--facet head_size: expected an integer, got wide"),
    ("--arch sm90 --tp 2 --tp 4", "--tp given twice: 2, 4"),
]


@pytest.mark.parametrize(("line", "message"), WRONG, ids=[case[0].replace(str(ROOT), "") for case in WRONG])
def test_what_cannot_be_asked_is_refused(run: Callable[..., Any], line: str, message: str) -> None:
    result = run("diff", *VLLM, *line.split())
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"attnreg: {message}")


def test_a_model_without_attention_is_refused(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MAMBA))
    says_of = {"diff": "no layer of", "lock": "nothing to lock of the layers of"}
    for command in (("diff", *VLLM), ("lock",)):
        says = says_of[command[0]]
        result = run(*command, *HOPPER, "--model", str(tmp_path))
        assert (result.status, result.out) == (2, "")
        assert result.err.startswith(f"attnreg: {says} {tmp_path}")
    # beside another model it is no fault
    assert run("diff", *VLLM, *HOPPER, "--model", str(tmp_path), "--model", GPT_OSS).status == 0


def test_a_word_that_only_one_registry_knows_is_no_all_clear(run: Callable[..., Any]) -> None:
    result = run("diff", *VLLM, *HOPPER, "--kv-dtype", "octave_k3v3", "--model", LLAMA)
    assert result.status == 1
    assert "not known → none\n  before: kv_dtype names 'octave_k3v3', which vllm-0.20.0@" in result.out
    known = run("diff", *VLLM, *HOPPER, "--kv-dtype", "octave_k3v3")
    assert known.status == 1
    note = "note: kv_dtype octave_k3v3: only one of the registries knows it, so there is nothing to compare\n"
    assert known.out.endswith(note)


def test_a_flag_that_only_one_registry_has_is_left_out_and_named(run: Callable[..., Any]) -> None:
    result = run("diff", *VLLM, *HOPPER, "--flag", "trtllm_prefill", "--model", LLAMA)
    assert "note: vllm-0.33.0 has no flag trtllm_prefill: compared without it\n" in result.out
    assert " · flag trtllm_prefill · every package assumed\n" in result.out


def test_one_request_is_compared_without_a_model(run: Callable[..., Any]) -> None:
    result = run("diff", *VLLM, *HOPPER, "--head-size", "128", "--kv-dtype", "fp8_e5m2")
    assert "the request moves on sm90 (1 architecture compared)" in result.out
    assert "  sm90: head size 128 · bfloat16 · KV cache fp8_e5m2\n" in result.out


def test_a_draft_and_ranks_are_asked_as_explain_asks_them(run: Callable[..., Any]) -> None:
    draft = str(CONFIGS / "Qwen3-8B-DFlash-b16")
    asked = ("--model", str(CONFIGS / "Qwen3-8B"), "--draft", draft, "--tp", "2")
    data = json.loads(run("diff", "vllm-0.21.0", "vllm-0.33.0", *HOPPER, *asked, "--json").out)
    requests = [move["request"] for move in data["renamed"]]
    assert [(r.get("role", "target"), r["num_heads"]) for r in requests] == [("target", 16), ("draft", 16)]


def test_a_known_model_that_cannot_be_shared_out_is_left_out_by_name(run: Callable[..., Any]) -> None:
    # it is the models that are asked about: between a registry and itself, so that nothing else is compared
    same = ("vllm-0.33.0", "vllm-0.33.0")
    result = run("diff", *same, *HOPPER, "--tp", "8")
    assert result.status == 0
    assert (
        "\nnote: left out: bert-base-uncased: layer 0 has 12 query heads, which do not divide over 8 ranks;"
        in result.out
    )
    named = run("diff", *same, *HOPPER, "--tp", "8", "--model", LLAMA, "--model", BERT)
    assert named.status == 2
    assert named.err.startswith("attnreg: bert-base-uncased: layer 0 has 12 query heads, which do not divide over 8")
    nobody = run("diff", *same, *HOPPER, "--tp", "1009")
    assert nobody.status == 2
    assert nobody.err.startswith("attnreg: none of the 24 models can be asked so")


def test_models_of_one_name_are_told_apart(run: Callable[..., Any], tmp_path: Path) -> None:
    paths = []
    for name in ("Llama-3.1-8B", "gpt-oss-120b"):
        (tmp_path / name / "model").mkdir(parents=True)
        shutil.copy(CONFIGS / name / "config.json", tmp_path / name / "model")
        paths.append(str(tmp_path / name / "model"))
    data = diff(run, *HOPPER, "--model", paths[0], "--model", paths[1], "--model", paths[0])
    assert data["models"] == paths


def test_a_gpu_that_changes_stands_first_however_few_its_configurations(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "registry", tmp_path / "merged")
    file = tmp_path / "merged" / "priorities.yaml"
    before, rocm, after = file.read_text().partition("\nrocm:\n")
    order = "[ROCM_ATTN, ROCM_AITER_FA, ROCM_AITER_UNIFIED_ATTN, TRITON_ATTN, TURBOQUANT]"
    rdna4 = f"  - {{name: rdna4, when: {{attention: mha, arch: [gfx1200, gfx1201]}}, because: b, order: {order}}}\n"
    file.write_text(before + rocm + after.replace("  - name: value-width\n", rdna4 + "  - name: value-width\n", 1))
    result = run("diff", "default", str(tmp_path / "merged"), "--platform", "rocm")
    assert result.status == 1
    headline = (
        "none of 24 known models moves (7 architectures compared); other configurations change on gfx1200, gfx1201"
    )
    assert headline in " ".join(result.out.split())
    assert "  ROCM_AITER_UNIFIED_ATTN → ROCM_ATTN\n    on gfx1200, gfx1201 · attention mha" in result.out
    assert "%" not in result.out
    flagged = run("diff", "default", str(tmp_path / "merged"), "--platform", "rocm", "--flag", "aiter")
    assert re.search(
        r"\nROCM_AITER_UNIFIED_ATTN → ROCM_ATTN\n.*"
        r"after: ROCM_ATTN: 1st choice of 5 \(order rocm/rdna4.*"
        r"gfx1200, gfx1201: .*bert-base-uncased",
        flagged.out,
        re.DOTALL,
    )


def test_an_overlay_for_any_registry_is_compared_on_the_first(
    run: Callable[..., Any], overlay: Callable[[str], str], tmp_path: Path
) -> None:
    after = overlay("choices: [{deny: [FLASH_ATTN], because: a test}]\n")
    told = run("diff", "vllm-0.33.0", after, *HOPPER, "--model", GPT_OSS).out
    assert re.match(r"vllm-0\.33\.0@\w+ → vllm-0\.33\.0\+o@", told)
    # nothing moves but what is denied
    assert "FLASH_ATTN/FA3-4 → " in told
    assert told.count("→") == 2
    # one that says what it extends is compared as that, and so is one beside another overlay
    overlay("extends: default\nchoices: [{deny: [FLASH_ATTN], because: a test}]\n")
    assert re.match(r".* → default\+o@", run("diff", "vllm-0.33.0", after, *HOPPER, "--model", GPT_OSS).out)
    overlay("choices: [{deny: [FLASH_ATTN], because: a test}]\n")
    before = tmp_path / "first.yaml"
    before.write_text("extends: vllm-0.33.0\n")
    told = run("diff", str(before), after, *HOPPER, "--model", GPT_OSS).out
    assert re.match(r"vllm-0\.33\.0@\w+ → default\+o@", told)


def test_boxes_come_last_and_on_demand(run: Callable[..., Any], overlay: Callable[[str], str]) -> None:
    after = overlay("choices: [{deny: [FLASHINFER], when: {arch: sm120}}]\n")
    result = run("diff", "default", after, "--arch", "sm120", "--boxes")
    assert result.status == 1
    models, _, boxes = result.out.partition("all configurations: ")
    assert "\nFLASHINFER/XQA → TRITON_ATTN\n" in models
    assert "denied by the overlay" in models
    counted = r"[\d,]+ of [\d,]+ distinguishable configurations change, between \d+ pairs of backends"
    assert re.match(counted, " ".join(boxes.split()))
    assert re.search(r"^FLASHINFER/native → TRITON_ATTN   changes · [\d,]+ configurations$", boxes, re.MULTILINE)
    assert "configurations" not in models
    data = json.loads(run("diff", "default", after, "--arch", "sm120", "--json", "--boxes", "--limit", "2").out)
    changes = data["all_configurations"]["changes"]
    assert data["all_configurations"]["changed"] == sum(change["count"] for change in changes)
    assert max(len(change["regions"]) for change in changes) == 2
    assert run("diff", "default", after, "--arch", "sm90").status == 0


def git(directory: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=directory, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the registry on its branch main, in which the command runs."""
    shutil.copytree(ROOT / "registry", tmp_path / "registry")
    for arguments in (("init", "-q", "-b", "main"), ("add", "."), ("commit", "-qm", "one")):
        git(tmp_path, *arguments)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_two_revisions(run: Callable[..., Any], checkout: Path) -> None:
    file = checkout / "registry" / "priorities.yaml"
    first, swapped = (
        "order: [HOPPER_ATTN, FLASH_ATTN/FA3, FLASHINFER",
        "order: [FLASHINFER, HOPPER_ATTN, FLASH_ATTN/FA3",
    )
    file.write_text(file.read_text().replace(first, swapped))
    result = run("diff", "main:registry", "registry", *HOPPER, "--model", LLAMA)
    assert result.status == 1
    assert "\nHOPPER_ATTN → FLASHINFER/" in result.out
    assert ": 1st choice of" in result.out
    assert "model families" not in result.out
    wrong = run("diff", "nowhere:registry", "registry")
    assert wrong.status == 2
    assert "git ls-tree" in wrong.err
    assert "revision main has no YAML files in docs" in run("diff", "main:docs", "registry").err
    # a registry that comes with attnreg is one with a colon too, and no revision
    assert run("diff", "default:", "default", *HOPPER, "--model", LLAMA).status == 0


def test_an_installed_attnreg_looks_for_revisions_here(
    run: Callable[..., Any], checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Path(revisions.__file__).parent.parent
    monkeypatch.setattr(revisions, "registry_root", lambda: package / "registry")
    assert run("diff", "main:", "registry", *HOPPER, "--model", LLAMA).status == 0
    monkeypatch.chdir(checkout.parent)
    wrong = run("diff", "main:", "default", *HOPPER, "--model", LLAMA)
    assert wrong.status == 2
    assert wrong.err.startswith(f"attnreg: git ls-tree in {checkout.parent}: fatal: not a git repository")
    assert "\n  help: name a revision of a git checkout" in wrong.err


def test_a_family_that_changes_moves_the_layers_of_its_models(run: Callable[..., Any], checkout: Path) -> None:
    assert run("diff", "main:registry", "registry", *HOPPER).status == 0
    with (checkout / "registry/models/granite_swa.yaml").open("a") as file:
        file.write("softcap: 30\n")
    result = run("diff", "main:registry", "registry", *HOPPER, "--model", LLAMA)
    assert result.status == 1
    assert "Llama-3.1-8B does not move" in result.out
    assert "granite_swa: softcap; and 1 like it: granitemoe_swa" in result.out
    data = json.loads(run("diff", "main:registry", "registry", *HOPPER, "--json").out)["families"]
    assert [(c["file"], c["what"], c["families"]) for c in data["changes"]] == [
        ("granite_swa", ["softcap"], ["granite_swa", "granitemoe_swa"])
    ]
    with (checkout / "registry/models/llama.yaml").open("a") as file:
        file.write("alibi: true\n")
    moved = json.loads(run("diff", "main:registry", "registry", *HOPPER, "--model", LLAMA, "--json").out)
    (move,) = moved["moves"]
    assert (move["before"]["backend"], move["request"]["features"]) == ("HOPPER_ATTN", ["alibi"])


def test_the_title_of_a_difference_is_the_question(run: Callable[..., Any]) -> None:
    one = ["diff", "default", "default", "--arch", "gfx942"]
    asked = [
        "--head-size",
        "64",
        "--num-heads",
        "8",
        "--num-kv-heads",
        "2",
        "--feature",
        "sinks",
        "--set",
        "cache_layout=SPLIT",
    ]
    title = run(*one, *asked, "--flag", "aiter", "--package", "none").out.split("\n\n")[0].replace("\n", " ")
    what = "8/2 heads of 64 · bfloat16 · KV cache auto · cache_layout SPLIT · sinks · flag aiter · no package"
    assert title.partition(" · ")[2].startswith(what)
    model = ["--model", BERT, "--tp", "2", "--dtype", "float16", "--feature", "sinks", "--package", "torch==2.11"]
    title = run(*one, *model).out.split("\n\n")[0].replace("\n", " ")
    assert title.partition(" · ")[2].startswith("TP 2 · float16 · with sinks · only packages torch==2.11")


def test_what_is_compared_for_models_alone_is_named(run: Callable[..., Any], overlay: Callable[[str], str]) -> None:
    # no well-known model has such heads
    file = overlay("backends: {FLASH_ATTN: {consequences: [{when: {head_size: 8}, workspace: 4 MiB}]}}\n")
    result = run("diff", "default", file)
    assert result.status == 0
    printed = " ".join(result.out.split())
    what = "known failures, kernels, workspaces or block sizes differ; only those of the models were compared"
    assert f"note: FLASH_ATTN: {what}" in printed
    result = run("diff", "default", file, "--arch", "sm90", "--head-size", "8")
    assert result.status == 1
    assert "workspace: not stated → 4.0 MiB" in result.out


def test_where_all_configurations_are_too_many_models_are_compared(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagram, "MAX_NODES", 1000)
    told = "only models are compared: the conditions are too entangled: over 1,000 parts"
    found = run("diff", *VLLM, *HOPPER)
    assert (found.status, told in " ".join(found.out.split())) == (1, True)
    data = diff(run, *HOPPER)
    assert data["moves"]
    assert any(told in note for note in data["notes"])
    assert "all_configurations" not in data
    refused = run("diff", *VLLM, *HOPPER, "--boxes")
    assert (refused.status, "too entangled" in refused.err) == (2, True)


SINCE = ("explain", "--engine", "vllm-0.33", "--arch", "sm120", "--model", GPT_OSS)


def test_explain_tells_what_changed_since_a_release(run: Callable[..., Any]) -> None:
    text, alone = run(*SINCE, "--since", "0.20").out, run(*SINCE).out
    assert text.startswith(alone)
    upgrade = ("upgrade", "--from", "vllm-0.20", "--to", "vllm-0.33", "--arch", "sm120", "--model", GPT_OSS)
    told = run(*upgrade).out
    assert text.endswith(told)
    assert "FLASHINFER/XQA in vllm-0.28.0, and not in vllm-0.27.0" in told
    since = json.loads(run(*SINCE, "--since", "0.20", "--json").out)["since"]
    assert since.items() <= json.loads(run(*upgrade, "--json").out).items()
    assert since["moved"] == len(since["moves"]) > 0


def test_explain_tells_what_changed_of_one_request(run: Callable[..., Any]) -> None:
    text = run("explain", "--engine", "vllm-0.33", "--arch", "gfx942", "--head-size", "128", "--since", "0.20").out
    assert "nothing changes: the request does not move" in text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--since", "0.20", "--brief"), "--brief prints the winners alone"),
        (("--since", "0.20", "--prefer", "TRITON_ATTN"), "compares what two releases choose by themselves"),
        (("--since", "0.20", "--selector"), "compares what two releases choose by themselves"),
        (("--since", "0.33"), "vllm-0.33.0 is no later release"),
        (("--since", "0.19"), "there is no table of vLLM 0.19"),
        (("--since", "sglang-0.5.14"), "releases of two engines"),
    ],
)
def test_since_refuses_what_it_cannot_compare(run: Callable[..., Any], options: tuple[str, ...], told: str) -> None:
    refused = run(*SINCE, *options)
    assert refused.status == 2
    assert told in refused.err


def test_since_needs_a_release_of_an_engine(run: Callable[..., Any]) -> None:
    refused = run("explain", "--arch", "sm90", "--since", "0.20")
    assert refused.status == 2
    assert "--since needs a release of an engine" in refused.err
