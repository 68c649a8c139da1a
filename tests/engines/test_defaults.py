"""`attnreg defaults`: the backend that engines take by default, and the form that aiconfigurator reads."""

from __future__ import annotations

import gzip
import json

import support
import yaml

from attnreg.cli import main
from attnreg.engines.defaults import Default, Table, defaults

ARCHS = ("sm90", "sm100")


def test_sglangs_are_those_of_its_recorded_decisions():
    with gzip.open(support.DATA / "sglang" / "decisions-0.5.23.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    place = {"version", "platform", "arch", "flags", "model", "sampling"}
    default = {"tp_size": 1, "kv_cache_dtype": "auto"}
    plain = [
        row
        for row in rows
        if row["in"]["platform"] == "cuda"
        and not row["in"]["flags"]
        and not any(v and v != default.get(k) for k, v in row["in"].items() if k not in place)
        and not row["out"]["error"]
        and not row["out"]["refused_later"]
    ]
    recorded = {
        (row["in"]["arch"], row["in"]["model"]): row["out"]["decode_attention_backend"]
        or row["out"]["attention_backend"]
        for row in plain
    }
    table = {(row.arch, row.architecture): row.decode for row in defaults(["sglang-0.5.23"], ARCHS).rows}
    compared = {key: value for key, value in recorded.items() if key in table}
    assert len(compared) >= 15
    assert {key: table[key] for key in compared} == compared


def test_vllms_prompts_of_mla_are_a_phase_of_their_own():
    [row] = defaults(["vllm-0.33.0"], ["sm90"], ["DeepseekV3ForCausalLM"]).rows
    assert (row.prefill, row.decode) == ("FLASH_ATTN_PREFILL", "FLASH_ATTN_MLA")
    assert row.title == "FLASH_ATTN_PREFILL / FLASH_ATTN_MLA"


def test_an_architecture_that_no_release_knows_is_a_note():
    assert defaults(["sglang-0.5.23"], ["sm90"], ["Nothing"]).notes == ["no release here knows Nothing"]


def test_aiconfigurators_form_has_the_usual_and_what_differs():
    rows = [
        Default("sglang-1.0", arch, model, backend, backend)
        for arch in ("sm90", "sm100")
        for model, backend in (("A", "fa3"), ("B", "fa3"), ("C", "triton" if arch == "sm100" else "fa3"))
    ]
    rows.append(Default("sglang-1.0", "sm90", "D", "flashinfer", "fa3"))
    rows.append(Default("sglang-1.0", "sm100", "D", None, None, "it is refused"))
    text = Table(rows).aiconfigurator()
    assert yaml.safe_load(text) == {
        "sglang": {"1.0": {90: "fa3", 100: "fa3"}},
        "architectures": {
            "C": {"sglang": {"1.0": {90: "fa3", 100: "triton"}}},
            "D": {"sglang": {"1.0": {90: "fa3"}}},
        },
    }
    assert "90: fa3  # prompts: flashinfer" in text
    assert "# 100: none: it is refused" in text


def test_the_command_prints_a_table_json_and_yaml(capsys):
    asked = ["defaults", "--release", "sglang-0.5", "--arch", "sm90", "--architecture", "LlamaForCausalLM"]
    assert main(asked) == 0
    assert "fa3" in capsys.readouterr().out
    assert main([*asked, "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert (row["release"], row["arch"], row["decode"], row["error"]) == ("sglang-0.5.23", "sm90", "fa3", "")
    assert main([*asked, "--aiconfigurator"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == {"sglang": {"0.5.23": {90: "fa3"}}}


def test_bad_input_is_refused(capsys):
    for arguments, message in (
        (["--release", "vllm-9"], "vllm-9 is no bundled release of an engine"),
        # nor is attnreg's own registry, which is no answer to itself, or an overlay
        (["--release", "default"], "default is no bundled release of an engine\n  help: known: sglang-0.5.14"),
        (["--release", "vllm-0.33.0+attnreg"], "the nearest is `vllm-0.33.0`"),
        (["--arch", "gfx942"], "gfx942 is no NVIDIA GPU"),
        (["--arch", "sm91"], "unknown architecture 'sm91'"),
        (["--architecture", "Nothing", "--release", "sglang-0.5"], "no release here knows Nothing"),
        (["--json", "--aiconfigurator"], "give one of them"),
    ):
        assert main(["defaults", *arguments]) == 2
        captured = capsys.readouterr()
        assert (captured.out, message in captured.err) == ("", True), arguments
