"""`decision` against decisions that SGLang's own code made, and what it says of wrong input."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT
from support.sglang_parity import ANSWERED, BACKENDS, CLASSES, classes, difference

from attnreg import AttentionRequest, Platform
from attnreg.analysis.check.findings import check
from attnreg.cli import main
from attnreg.engines import sglang
from attnreg.engines.sglang import decision, models
from attnreg.errors import RegistryError, RequestError
from attnreg.loader import bundled_registries, load_registry
from attnreg.request import with_extra
from attnreg.selection.selector import evaluate

DATA = Path(__file__).parents[1] / "data" / "sglang"
RELEASES = tuple(name.partition("-")[2] for name in bundled_registries() if name.startswith("sglang-"))
BASE = {"platform": "cuda", "arch": "sm90", "model": "LlamaForCausalLM"}


def rows(name: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / name, "rt") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("name", sorted(path.name for path in DATA.glob("*.jsonl.gz")))
def test_every_recorded_decision(name):
    recorded = rows(name)
    assert len(recorded) >= 1000
    assert {row["in"]["version"] for row in recorded} == {name.partition("-")[2].removesuffix(".jsonl.gz")}
    wrong = [(row["in"], found) for row in recorded if (found := difference(row))]
    assert not wrong, f"{len(wrong)} of {len(recorded)}: {wrong[:3]}"


def test_the_comparison_sees_each_answer():
    """A recorded decision that is altered in any one part differs."""
    row = next(
        r
        for r in rows("decisions-0.5.23.jsonl.gz")
        if r["in"].get("attention_backend") == "cutedsl_mla" and not r["out"]["error"]
    )
    assert not difference(row)
    for field in (*BACKENDS, *ANSWERED):
        altered = {"in": row["in"], "out": row["out"] | {field: "something else"}}
        assert difference(altered), field
    assert difference({"in": row["in"], "out": row["out"] | {"trace": [["another", {"page_size": 64}]]}})
    assert difference({"in": row["in"], "out": row["out"] | {"error": {"in": "somewhere"}}})


def test_the_answer_names_steps_and_values_as_sglang_does():
    answer = decision({**BASE, "arch": "sm100", "model": "DeepseekV3ForCausalLM", "attention_backend": "cutedsl_mla"})
    assert answer["error"] is None
    assert (answer["prefill"], answer["decode"], answer["page_size"]) == ("trtllm_mla", "cutedsl_mla", 64)
    assert answer["decided_by"] is None, "the user named it"
    assert ["_cutedsl_prefill_backend_fill", {"prefill_attention_backend": "trtllm_mla"}] in answer["trace"]


def test_a_refusal_is_a_sentence_and_its_step():
    answer = decision({**BASE, "attention_backend": "flex_attention", "speculative_algorithm": "NGRAM"})
    assert answer["error"] == "flex_attention does not support speculative decoding"
    assert answer["decided_by"] == "handle_attention_backend_compatibility"
    assert "prefill" not in answer


def test_what_is_not_known_is_no_refusal():
    said = "not known: SGLang has steps of its own for Intel GPUs, which this table does not hold"
    for release in RELEASES:
        answer = decision({**BASE, "platform": "xpu", "arch": "xe_hpc"}, release)
        assert answer["error"] == said
        assert "prefill" not in answer


def test_what_a_factory_refuses_later_is_said():
    answer = decision({**BASE, "arch": "sm120", "model": "Olmo2ForCausalLM"})
    assert (answer["error"], answer["prefill"]) == (None, "fa3")
    assert [later[:2] for later in answer["refused_later"]] == [["prefill", "fa3"], ["decode", "fa3"]]


# its wrapper of hybrid models accepts flashinfer on Blackwell up to 0.5.15, and on SM 10.x again since 0.5.21
@pytest.mark.parametrize(
    ("release", "fails"),
    [("0.5.14", False), ("0.5.15", False), ("0.5.16", True), ("0.5.18", True), ("0.5.20", True), ("0.5.21", False)],
)
def test_which_releases_run_gated_deltanet_with_flashinfer_on_blackwell(release, fails):
    given = {**BASE, "arch": "sm100", "model": "Qwen3NextForCausalLM", "attention_backend": "flashinfer"}
    answer = decision(given, release)
    assert (answer["prefill"], bool(answer["refused_later"])) == ("flashinfer", fails)
    assert not decision({**given, "arch": "sm120"}, release)["refused_later"]


def test_bf16_and_bfloat16_are_two_words():
    """SGLang's check of trtllm_mla knows the first alone."""
    given = {**BASE, "arch": "sm100", "model": "DeepseekV3ForCausalLM"}
    assert decision({**given, "kv_cache_dtype": "bf16"})["kv_cache_dtype"] == "bf16"
    assert decision({**given, "kv_cache_dtype": "bfloat16"})["decided_by"] == "_mla_kv_cache_dtype_checks"


@pytest.mark.parametrize("release", ["0.5.14", "0.5.15", "0.5.16"])
def test_a_draft_of_dflash_whose_config_is_read_needs_flashinfer(release):
    """The function that reads it is in a module that imports FlashInfer's sampling on NVIDIA GPUs."""
    given = {**BASE, "flags": ["no-flashinfer"], "speculative_algorithm": "DFLASH"}
    assert decision(given, release)["decided_by"] == "<module>"
    assert decision({**given, "speculative_num_draft_tokens": 8}, release)["error"] is None
    assert decision({**given, "flags": []}, release)["error"] is None


def test_heads_are_counted_on_one_rank():
    given = {"platform": "rocm", "arch": "gfx942", "model": "DeepseekV3ForCausalLM"}
    assert {tp: decision({**given, "tp_size": tp})["prefill"] for tp in (1, 2, 8)} == {
        1: "aiter",
        2: "triton",
        8: "aiter",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "LlamaForCausalML"}, "has no facts of 'LlamaForCausalML'"),
        ({"attention_backend": "fa33"}, "attention_backend names 'fa33'"),
        ({"kv_cache_dtype": "fp7"}, "kv_dtype names 'fp7'"),
        ({"speculative_algorithm": "UNO"}, "speculative_algorithm names 'UNO'"),
        ({"page_sizes": 16}, "does not cover page_sizes"),
        ({"block_size": 16}, "does not cover block_size"),
        ({"mm_attention_backend": "fa3"}, "does not cover mm_attention_backend"),
        ({"page_size": "16"}, "block_size is '16'"),
        ({"tp_size": 0}, "tp_size is 0"),
        ({"tp_size": "2"}, "tp_size is '2'"),
        ({"flags": ["no-luck"]}, "no package 'luck'"),
        ({"flags": ["luck"]}, "luck"),
        ({"flags": 5}, "flags is 5"),
        ({"flags": "amx"}, "flags is 'amx'"),
        ({"flags": [5]}, "flags is 5"),
        ({"version": 5}, "version is 5"),
        ({"speculative_num_steps": True}, "speculative_num_steps is True"),
        ({"arch": "sm999"}, "sm999"),
        ({"arch": "gfx942"}, "belongs to platform rocm"),
        ({"arch": None}, "arch is None"),
        ({"platform": None}, "platform is None"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused(change, message):
    with pytest.raises(RequestError, match=message):
        decision({**BASE, **change})


@pytest.mark.parametrize("given", [None, [], "LlamaForCausalLM"])
def test_arguments_that_are_no_mapping_are_refused(given):
    with pytest.raises(RequestError, match="expected a mapping"):
        decision(given)


def test_a_mutated_row_is_answered_whole_or_refused():
    """Keys that are gone or unknown, and values of any type: an answer with all its parts, or a typed error."""
    draw, recorded = random.Random(18), [row["in"] for row in rows("drawn-0.5.23.jsonl.gz")]
    names = (*recorded[0], *draw.choice(recorded), "page-size", "kv_dtype", "phase", "head_size", "named", 3, None)
    odd = (None, True, 0, -1, 1, 3.5, float("nan"), 10**30, "", "auto", "fa3", b"fa3", [], [1], [None], {}, {"a": 1},
           ("amx",), {1, 2}, range(3), object())  # fmt: skip
    seen = Counter()
    for _ in range(600):
        given = {**draw.choice(recorded), draw.choice(names): draw.choice(odd)}
        if draw.random() < 0.2:
            del given[draw.choice(list(given))]
        try:
            answer = decision(given)
        except (RequestError, RegistryError):
            seen["refused"] += 1
            continue
        parts = ("prefill", "decode", "kv_cache_dtype") if answer["error"] is None else ("error", "decided_by")
        assert all(isinstance(answer[part], str) for part in parts), given
        seen["answered"] += 1
    assert min(seen.values()) > 30


def test_a_version_that_is_not_bundled_is_refused():
    with pytest.raises(Exception, match=r"sglang-0\.5\.23"):
        decision({**BASE, "version": "0.4.0"})


def test_what_is_missing_is_named():
    for name in BASE:
        with pytest.raises(RequestError, match=name):
            decision({key: value for key, value in BASE.items() if key != name})


@pytest.mark.parametrize("release", RELEASES)
def test_every_recorded_model_is_known(release):
    recorded = [row for file in DATA.glob(f"*-{release}.jsonl.gz") for row in rows(file.name)]
    assert {row["in"]["model"] for row in recorded} == {*models(release), *(classes() if release == CLASSES else ())}


def test_every_class_that_a_step_names_is_recorded_or_has_its_reason():
    def named(data: Any, condition: bool = False) -> Iterator[str]:
        """The classes in the conditions on `architecture` of a file."""
        if isinstance(data, dict):
            for name, value in data.items():
                yield from named(value, name == "architecture" or (condition and name == "not"))
        elif isinstance(data, list):
            for value in data:
                yield from named(value, condition)
        elif condition and isinstance(data, str):
            yield data

    table = ROOT / "registry/engines" / f"sglang-{CLASSES}"
    files = [yaml.safe_load(path.read_text()) for path in table.glob("*.yaml") if path.name != "architectures.yaml"]
    recorded = {name.partition("#")[0] for name in (*models(CLASSES), *classes())}
    reasons = yaml.safe_load((DATA / "classes.yaml").read_text())
    assert {name for file in files for name in named(file)} - recorded == set(reasons)
    registry = load_registry(f"sglang-{CLASSES}")
    for name in reasons:
        request = AttentionRequest(head_size=128, dtype="bfloat16", **with_extra({"architecture": name}))
        assert evaluate(request, Platform(platform="cuda", arch="sm90"), registry).unknown, name


def test_the_release_is_an_argument_and_by_default_the_newest():
    given = {**BASE, "model": "Exaone4ForCausalLM"}
    assert decision(given)["prefill"] == decision(given, "0.5.23")["prefill"] == "fa3"
    refused = [decision(given, "0.5.14"), decision(given, "sglang-0.5.14"), decision({**given, "version": "0.5.14"})]
    assert {answer["decided_by"] for answer in refused} == {"_handle_model_specific_adjustments"}


def test_the_code_names_no_backend_no_step_and_no_model():
    """All of that is data."""
    code = Path(sglang.__file__).read_text().partition('"""\n\nfrom')[2]
    registry = load_registry("sglang-0.5.23")
    names = {*registry.backends, *(step.name for step in registry.steps), *models()} - {"drafts", "phases", "triton"}
    assert not {name for name in names if f'"{name}"' in code}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_a_model_whose_steps_the_table_does_not_hold_is_not_known(release, arch):
    registry = load_registry(f"sglang-{release}")
    dense = {"architecture": "MiniCPMForCausalLM"}
    apart = [{"architecture": name} for name in ("DeepseekV4ForCausalLM", "DeepseekV4ForCausalLMNextN",
             "GigaChat35ForCausalLM", "GigaChat35ForCausalLMNextN", "MiniCPMSALAForCausalLM",
             "Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLMMTP")]  # fmt: skip
    for given in (*apart, dense | {"sparse_key": 32}, dense | {"first_mixer": "minicpm4"}, dense):
        request = AttentionRequest(head_size=128, dtype="bfloat16", **with_extra(given))
        found = evaluate(request, Platform(platform="cuda", arch=arch), registry)
        assert found.unknown == (given != dense), given


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    "sparse",
    [
        {"sparse_config": {"kernel_size": 32}},
        {"sparse_config": {"topk": 64}},
        {"mixer_types": ["minicpm4", "lightning"]},
    ],
)
def test_the_config_says_whether_minicpm_has_steps_of_its_own(tmp_path, capsys, release, sparse):
    """The line is that of the step: the table's line for the class says that the release serves it."""
    config = {"model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"], "hidden_size": 4096,
              "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 2}  # fmt: skip
    for given, known in ((config, True), (config | sparse, False)):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(given))
        main(["explain", "--engine", f"sglang-{release}", "--arch", "sm90", "--model", str(file), "--json"])
        start = json.loads(capsys.readouterr().out)["answers"][0]["selections"][0]["start"]
        assert (start["refused"] is None) == known
    assert start["refused"]["where"].partition(":")[0].endswith("steps.yaml")


# 0.5.16 and 0.5.17 look at the two phases only if both are named
@pytest.mark.parametrize(
    ("release", "fails"), [("0.5.15", False), ("0.5.16", False), ("0.5.17", False), ("0.5.18", True)]
)
def test_which_releases_ask_gated_deltanet_for_a_phase_that_is_named_alone(release, fails):
    given = {**BASE, "arch": "sm100", "model": "Qwen3NextForCausalLM", "attention_backend": "triton"}
    assert bool(decision({**given, "prefill_attention_backend": "flashinfer"}, release)["refused_later"]) == fails
    both = {"prefill_attention_backend": "flashinfer", "decode_attention_backend": "triton"}
    assert bool(decision({**given, **both}, release)["refused_later"]) == (release != "0.5.15")


# 64 tokens for each key that the indexer pools, since 0.5.22
@pytest.mark.parametrize(
    ("release", "pooled", "page"),
    [("0.5.23", None, 64), ("0.5.23", 1, 64), ("0.5.23", 4, 256), ("0.5.22", 2, 128), ("0.5.21", 4, 64),
     ("0.5.14", 4, 64), ("0.5.23", 3, None)],
)  # fmt: skip
def test_pages_of_sparse_attention_hold_whole_groups_of_pooled_keys(release, pooled, page):
    given = {"architecture": "GlmMoeDsaForCausalLM", "index_kpool": pooled}
    request = AttentionRequest(head_size=576, attention="mla_sparse", **with_extra(given))
    found = evaluate(request, Platform(platform="cuda", arch="sm90"), load_registry(f"sglang-{release}"))
    assert found.unknown == (page is None)
    assert page is None or found.start.facts["block_size"] == page


@pytest.mark.slow(reason="the exact model of eighty steps")
@pytest.mark.parametrize("release", RELEASES)
def test_every_automatic_choice_that_is_refused_is_known(release):
    """Exact for every run in which nobody names a backend; what is known and not found any more is a finding too."""
    assert [str(finding) for finding in check(load_registry(f"sglang-{release}", plugins=()))] == []


@pytest.mark.parametrize(
    ("model", "change", "refused_by"),
    [
        *((model, {"speculative_eagle_topk": 4}, "_handle_eagle_family") for model in
          ("GptOssForCausalLM", "Llama4ForConditionalGeneration", "Olmo2ForCausalLM", "Exaone4ForCausalLM",
           "Gemma4ForConditionalGeneration", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration",
           "LongcatFlashForCausalLM", "DeepseekV32ForCausalLM")),
        ("LlamaForCausalLM", {"speculative_eagle_topk": 4}, None),
        ("GptOssForCausalLM", {"enable_deterministic_inference": True}, "_deterministic_attention_backend"),
        ("LlamaForCausalLM", {"enable_deterministic_inference": True}, None),
    ],
)  # fmt: skip
def test_known_faults_on_blackwell(model, change, refused_by):
    speculation = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 8}
    given = {**BASE, "arch": "sm100", "model": model, **(speculation if "speculative_eagle_topk" in change else {})}
    answer = decision({**given, **change})
    assert (answer["error"] and answer["decided_by"]) == refused_by
