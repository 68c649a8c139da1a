"""Which models a release serves: the lists of the releases, and what the commands say of a model that is not served."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

import attnreg
from attnreg.compile.inputs.bundled import bundled_registries
from attnreg.language.engine.architectures import Architectures
from attnreg.models.reader import families_of, requests_from_model

RELEASES = [name for name in bundled_registries() if name != "default"]
MPT, LLAMA = (str(ROOT / "examples/configs" / name) for name in ("mpt-7b", "Llama-3.1-8B"))
LINE = "vLLM 0.33.0 does not serve MPTForCausalLM (it did until 0.28.0)"


def table(release: str) -> Architectures:
    found = attnreg.load_registry(release, plugins=()).architectures
    assert found is not None
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_each_release_of_an_engine_has_its_list(release: str) -> None:
    names = table(release).names
    assert len([name for name, (how, *_) in names.items() if how == "native"]) > 200
    assert names["LlamaForCausalLM"][0] == "native"
    root = bundled_registries()[release].parents[2]
    for name in ("LlamaForCausalLM", *(n for n, (how, *_) in names.items() if how == "refused")):
        _, _, file, line = names[name]
        assert (root / file).read_text(encoding="utf-8").splitlines()[line - 1].strip() == name


@pytest.mark.parametrize(
    ("names", "remote", "how"),
    [
        (["MPTForCausalLM"], False, "until"),
        (["BartForConditionalGeneration"], False, "plugin"),
        (["T5ForConditionalGeneration"], False, "fails"),
        (["FSMTForConditionalGeneration"], False, "refused"),
        (["Olmo3ForCausalLM"], False, "transformers"),
        # converted: vLLM makes a classifier of the model's class for text
        (["LlamaForSequenceClassification"], False, "native"),
        (["NoSuchForCausalLM"], False, "unlisted"),
        (["NoSuchForCausalLM"], True, "remote"),
        # the first that the engine has a class for
        (["NoSuchForCausalLM", "LlamaForCausalLM"], False, "native"),
    ],
)
def test_how_vllm_serves_a_class(names: list[str], remote: bool, how: str) -> None:
    served = table("vllm-0.33.0").of(names, remote=remote)
    assert served is not None
    assert served.how == how


def test_a_release_has_what_a_later_one_took_away() -> None:
    hows = {release: table(release).names["MPTForCausalLM"][:2] for release in RELEASES if release.startswith("vllm")}
    native, gone = ("native", ""), ("until", "0.28.0")
    assert hows == {release: native if release < "vllm-0.29" else gone for release in hows}
    assert {*hows.values()} == {native, gone}


def test_every_command_says_it(run: Callable[..., Any], tmp_path: Path) -> None:
    table_of = ("--registry", "vllm-0.33.0", "--arch", "sm90", "--model", MPT)
    for more in ((), ("--brief",)):
        result = run("explain", *table_of, *more)
        assert (result.status, LINE in " ".join(result.out.split())) == (1, True)
    assert '"backend": null' in run("explain", *table_of, "--json").out
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f'engine: vllm\nversion: "0.33"\nmodel: {MPT}\narch: sm90\n')
    result = run("check", str(recipe))
    assert (result.status, LINE in " ".join(result.out.split())) == (1, True)
    assert run("lock", *table_of).status == 1
    # a lock of an earlier release, compared with this one
    lock = tmp_path / "attnreg.lock"
    assert run("lock", "--registry", "vllm-0.28.0", *table_of[2:], "-o", str(lock)).status == 0
    result = run("check", "--lock", str(lock), "--registry", "vllm-0.33.0")
    assert (result.status, result.out.splitlines()[0]) == (1, f"mpt-7b no longer starts: {LINE}")


def test_an_upgrade_counts_it_first(run: Callable[..., Any]) -> None:
    models = ("--model", LLAMA, "--model", MPT, "--arch", "sm90")
    result = run("upgrade", "--from", "vllm-0.28", "--to", "vllm-0.33", *models)
    assert result.status == 1
    assert result.out.splitlines()[2] == f"mpt-7b no longer starts: {LINE}"
    data = json.loads(run("diff", "vllm-0.28.0", "vllm-0.33.0", *models, "--json").out)
    assert data["refused"] == [{"text": LINE, "models": ["mpt-7b"]}]
    assert run("upgrade", "--from", "vllm-0.30", "--to", "vllm-0.33", *models).status == 0


@pytest.mark.parametrize(
    ("release", "architecture", "more", "status", "says"),
    [
        ("vllm-0.33.0", "T5ForConditionalGeneration", {}, 1, "fails to build it: its decoder takes no position_ids"),
        (
            "vllm-0.33.0",
            "BartForConditionalGeneration",
            {},
            1,
            "only with the plug-in at https://github.com/vllm-project",
        ),
        ("vllm-0.33.0", "FSMTForConditionalGeneration", {}, 1, "does not take the class of transformers"),
        ("vllm-0.33.0", "MllamaForConditionalGeneration", {}, 3, "what that asks for was not recorded"),
        ("vllm-0.33.0", "NoSuchForCausalLM", {}, 3, "whether its Transformers backend serves it is not known"),
        ("vllm-0.33.0", "NoSuchForCausalLM", {"auto_map": {"AutoModelForCausalLM": "x.Y"}}, 3, "--trust-remote-code"),
        ("sglang-0.5.23", "MptForCausalLM", {}, 1, "SGLang 0.5.23 does not serve MptForCausalLM"),
        ("sglang-0.5.23", "NoSuchForCausalLM", {}, 3, "whether its Transformers backend serves it is not known"),
        # a config without the key is asked as before
        ("vllm-0.33.0", None, {}, 0, "FLASH_ATTN"),
    ],
)
def test_what_is_not_served_is_said(
    run: Callable[..., Any],
    tmp_path: Path,
    release: str,
    architecture: str | None,
    more: dict[str, Any],
    status: int,
    says: str,
) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 1024, **more}
    config |= {"dtype": "bfloat16"} | ({"architectures": [architecture]} if architecture else {})
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    result = run("explain", "--registry", release, "--arch", "sm90", "--model", str(file))
    assert (result.status, says in " ".join(result.out.split())) == (status, True), result.out


def test_what_is_not_known_has_no_total(run: Callable[..., Any], tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 1024}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | {"architectures": ["NoSuchForCausalLM"]}))
    cache = json.loads(
        run("explain", "--registry", "vllm-0.33.0", "--arch", "sm90", "--model", str(file), "--json").out
    )
    assert cache["kv_cache"]["bytes_per_token"] is None
    assert cache["kv_cache"]["bytes_at"] == {"8192": None}
    assert cache["kv_cache"]["groups"][0]["bytes_per_token"] is None


# fields of an unknown family: blocks, groups, loops, shared keys, sinks, heads under another name, an encoder's
@pytest.mark.parametrize(
    "field",
    [
        {"block_configs": [{"attention": {}}]},
        {"num_attention_groups": 4},
        {"total_ut_steps": 4},
        {"n_recurrent_loops": 3, "layer_types": ["mlp"] * 4},
        {"use_cla": True},
        {"learnable_sink_init": 0.5},
        {"sink_init": 0.0},
        {"multi_query_group_num": 2},
        {"num_mel_bins": 80},
    ],
    ids=lambda field: next(iter(field)),
)
def test_an_unknown_family_with_such_a_field_is_not_known(
    run: Callable[..., Any], tmp_path: Path, field: dict[str, Any]
) -> None:
    config = {"model_type": "stranger", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 1024}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | field))
    asked = ("--arch", "sm90", "--model", str(file))
    result = run("explain", *asked)
    assert (result.status, "4 layers (0–3) not known" in " ".join(result.out.split())) == (3, True)
    assert f"{next(iter(field))} is in the config" in " ".join(result.out.split())
    data = json.loads(run("explain", *asked, "--json").out)
    assert data["kv_cache"]["bytes_per_token"] is None
    assert run("diff", "vllm-0.30.0", "vllm-0.33.0", *asked).status == 3
    assert run("lock", *asked).status == 2
    assert run("lock", *asked, "--model", LLAMA).status == 3
    # a field that is off says nothing
    file.write_text(json.dumps(config | dict.fromkeys(field, False)))
    assert run("explain", *asked).status == (2 if "layer_types" in field else 0)


@pytest.mark.parametrize("engine", ["vllm-0.33.0", "vllm-0.26.0", "sglang-0.5.23"])
def test_the_families_of_an_engine_are_right(engine: str) -> None:
    assert families_of(engine).check() == []
    assert families_of(engine).where("mimo_v2_flash") is not None
    assert families_of("default") is families_of("")


COHERE = {
    "model_type": "cohere2",
    "architectures": ["Cohere2ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}


@pytest.mark.parametrize(("engine", "size"), [("vllm-0.28.0", 128), ("vllm-0.24.0", 128), ("vllm-0.29.0", 64)])
def test_an_earlier_release_reads_a_family_in_its_own_way(engine: str, size: int) -> None:
    model = requests_from_model(COHERE, families=families_of(engine))
    assert {layer.head_size for layer in model.layers} == {size}


GROUPED_MPT = {"model_type": "mpt", "n_layers": 2, "d_model": 4096, "n_heads": 32, "attn_config": {"kv_n_heads": 8}}


@pytest.mark.parametrize(("engine", "heads"), [("vllm-0.28.0", 8), ("vllm-0.20.0", 8), ("default", 32)])
def test_vllm_reads_grouped_heads_of_mpt_and_transformers_has_none(engine: str, heads: int) -> None:
    model = requests_from_model(GROUPED_MPT, families=families_of(engine))
    assert {layer.num_kv_heads for layer in model.layers} == {heads}


@pytest.mark.parametrize("release", ["vllm-0.20.0", "vllm-0.23.0", "vllm-0.28.0"])
@pytest.mark.parametrize(
    ("fields", "serves"),
    [
        ({"attn_config": {"alibi": True, "prefix_lm": False}, "norm_type": "low_precision_layernorm"}, True),
        ({"attn_config": {"alibi": True, "prefix_lm": True}}, False),
        ({"attn_config": {"alibi": False}}, False),
        ({"embedding_fraction": 0.5}, False),
    ],
)
def test_what_vllm_asserts_of_the_config_of_mpt(
    release: str, fields: dict[str, Any], serves: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(json.loads((Path(MPT) / "config.json").read_text()) | fields))
    plan = attnreg.plan(tmp_path, "sm90", release)
    assert plan.starts is serves
    assert serves or "vLLM's code for this model asserts" in plan.conflicts[0].facts[0].sentence


MIMO = {
    "model_type": "mimo_v2_flash",
    "architectures": ["MiMoV2FlashForCausalLM"],
    "num_hidden_layers": 4,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "v_head_dim": 128,
    "sliding_window_size": 128,
    "dtype": "bfloat16",
}


# 4 and 8 KV heads of 192 and 128 elements: 2,560 and 5,120 bytes; SGLang's window does not count the query's own key
@pytest.mark.parametrize(("registry", "window"), [("vllm-0.33.0", 128), ("sglang-0.5.23", 129)])
def test_mimo_is_read_by_the_fields_that_the_engine_reads(
    run: Callable[..., Any], tmp_path: Path, registry: str, window: int
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MIMO))
    data = json.loads(run("explain", "--registry", registry, "--arch", "sm90", "--model", str(file), "--json").out)
    groups = data["kv_cache"]["groups"]
    stored = [(g["layers"], g["bytes_per_token"], g["keeps_tokens"]) for g in groups]
    assert stored == [([0, 3], 2 * 2560, None), ([1, 2], 2 * 5120, window)]


def test_what_vllm_does_not_read_is_refused(run: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MIMO | {"hybrid_layer_pattern": None}))
    result = run("explain", "--registry", "vllm-0.33.0", "--arch", "sm90", "--model", str(file))
    assert result.status == 2
    assert "hybrid_layer_pattern is None; vLLM reads from it which layers slide" in result.err


@pytest.mark.parametrize(("release", "status"), [("0.33.0", 1), ("0.31.0", 0)])
def test_vllm_does_not_start_without_the_number_of_kv_heads(
    run: Callable[..., Any], tmp_path: Path, release: str, status: int
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "nemotron", "num_key_value_heads": None}))
    result = run("explain", "--registry", f"vllm-{release}", "--arch", "sm90", "--model", str(file))
    assert result.status == status
    assert ("vLLM needs the number of KV heads in this model's config" in result.out) == bool(status)


def test_page_and_layout_of_layers_that_are_not_known_are_not_known(run: Callable[..., Any], tmp_path: Path) -> None:
    config = {"model_type": "nobodys", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config | {"compress_ratios": [4, 128, 4, 128]}))
    printed = run("plan", "--engine", "vllm-0.33.0", "--arch", "sm90", "--model", str(tmp_path))
    assert printed.status == 3
    found = [line.split()[:3] for line in printed.out.splitlines() if line.startswith(("page", "layout"))]
    assert found == [["page", "not", "known,"], ["layout", "not", "known,"]]
