"""What options and variables of a launch set, in the data and in what `attnreg check recipe` says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support import ROOT

from attnreg.cli import main
from attnreg.compile.inputs.bundled import bundled_registries
from attnreg.compile.source.yaml_source import Document
from attnreg.engines.settings import known_engines, read_settings, settings_of
from attnreg.errors import RegistryError
from attnreg.loader import load_registry

CONFIGS = ROOT / "examples" / "configs"
LLAMA = f'engine: vllm\nversion: "0.33"\nmodel: {CONFIGS / "Llama-3.1-8B"}\narch: sm90\n'
DEEPSEEK = f'engine: vllm\nversion: "0.33"\nmodel: {CONFIGS / "DeepSeek-V3"}\narch: gfx942\n'


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_word_that_is_set_is_one_of_a_release(engine: str) -> None:
    releases = [load_registry(name).vocabulary for name in bundled_registries() if name.startswith(f"{engine}-")]
    settings = settings_of(engine)
    for name, setting in {**settings.options, **settings.variables}.items():
        for word, known in ((setting.facet, "facets"), (setting.feature, "features"), (setting.flag, "flags")):
            assert not word or any(word in getattr(v, known) for v in releases), name
    groups = known_engines()[engine].get("exclusive", [])
    assert all(settings.options[option].kind == "backend" for group in groups for option in group)


def test_every_mistake_in_the_data_is_reported_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text("""\
vllm:
  options:
    --a: 3
    --b: {fetures: dcp}
    --c: {feature: dcp, takes: nmber}
    --d: {facet: pooling, like: pooling}
  settings:
    X: {flag: aiter, behind: Y}
""")
    with pytest.raises(RegistryError) as caught:
        read_settings(Document.load(file, "launch.yaml"), "vllm")
    assert [f"{p.where.line}: {p.message}" for p in caught.value.problems] == [
        (
            "3: --a: expected one of backend, prefill_backend, vision_backend, draft_backend, ranks, model, draft, "
            "unread, a facet, or a mapping"
        ),
        "4: --b: sets no facet, no feature and no flag",
        "4: --b: unknown key `fetures`",
        "5: --c.takes: expected one of switch, number, name, count",
        "6: --d.like: expected a mapping of texts to values, got 'pooling'",
        "8: X: unknown variable `Y`",
    ]


RESTATED = "--attention-backend {} only restates the default of vllm-0.33.0"
REFUSED = "--attention-backend {}: vllm-0.33.0 refuses it"


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ("{}", True),
        ("{VLLM_ROCM_USE_AITER: 1}", False),
        ("{VLLM_ROCM_USE_AITER: true, VLLM_ROCM_USE_AITER_MLA: 1}", False),
        ("{VLLM_ROCM_USE_AITER: 1, VLLM_ROCM_USE_AITER_MHA: 0}", False),
        ("{VLLM_ROCM_USE_AITER: 1, VLLM_ROCM_USE_AITER_MLA: 0}", True),
        ("{VLLM_ROCM_USE_AITER: 'False'}", True),
        ("{VLLM_ROCM_USE_AITER: null}", True),
        ("{VLLM_ROCM_USE_AITER_MLA: 1}", True),
        ("{VLLM_MLA_DISABLE: 0}", True),
    ],
)
def test_a_variable_switches_a_flag_with_those_behind_it(check, env, said):
    status, found = check(f"{DEEPSEEK}env: {env}\nargs: [--attention-backend, TRITON_MLA]\n")
    assert (status, [m.startswith(RESTATED.format("TRITON_MLA")) for _, m in found]) == (said, [True] * said)


def test_a_variable_of_a_command_counts_as_that_of_its_environment(check):
    command = "vllm serve m --attention-backend TRITON_MLA"
    for text in ("VLLM_ROCM_USE_AITER=1 ", "export VLLM_ROCM_USE_AITER=0; export VLLM_ROCM_USE_AITER=1; "):
        assert check(f"{DEEPSEEK}command: {text}{command}\n") == (0, [])
    assert check(f"{DEEPSEEK}command: VLLM_ROCM_USE_AITER=0 {command}\n")[0] == 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("--attention-backend, FLASH_ATTN, --kv-cache-dtype, fp8", RESTATED.format("FLASH_ATTN")),
        (
            "--attention-backend, FLASH_ATTN, --kv-cache-dtype, fp8, --attention-config.flash_attn_version, '2'",
            REFUSED.format("FLASH_ATTN"),
        ),
        (
            "--attention-backend, FLASH_ATTN, --kv-cache-dtype, fp8, -ac, '{\"flash_attn_version\": 2}'",
            REFUSED.format("FLASH_ATTN"),
        ),
        ("--attention-backend, TRITON_ATTN", None),
        ("--attention-backend, TRITON_ATTN, -dcp, '1'", None),
        ("--attention-backend, TRITON_ATTN, -dcp, '2'", REFUSED.format("TRITON_ATTN")),
        ("--attention-backend, TRITON_ATTN, --decode-context-parallel-size=2", REFUSED.format("TRITON_ATTN")),
        ("-pcp, '2'", "vllm-0.33.0 does not start this model on sm90: "),
        ("-pcp, many", "--prefill-context-parallel-size: expected a number of at least 1, got many"),
        ('--kv-transfer-config, \'{"kv_connector": "NixlConnector"}\', --attention-backend, FLEX_ATTENTION', None),
        ("--attention-backend, FLASHINFER, -ac.use_trtllm_attention=true", None),
        ("--runner, pooling, --attention-backend, FLASH_ATTN", RESTATED.format("FLASH_ATTN")),
    ],
)
def test_an_option_sets_what_decides(check, args, said):
    status, found = check(f"{LLAMA}args: [{args}]\n")
    assert (status, len(found)) == ((1, 1) if said else (0, 0))
    assert all(message.startswith(said) for _, message in found)


def test_batch_invariance_is_a_variable(check):
    recipe = f"{LLAMA.replace('sm90', 'sm100')}args: [--attention-backend, FLASHINFER]\n"
    assert check(recipe)[1][0][1].startswith(RESTATED.format("FLASHINFER"))
    _, found = check(f"{recipe}env: {{VLLM_BATCH_INVARIANT: 1}}\n")
    assert found[0][1].endswith("for this model on sm100: batch_invariant is not supported")


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("env: {VLLM_ROCM_USE_AITER: $X}", "only the shell knows VLLM_ROCM_USE_AITER"),
        ("env: {VLLM_BATCH_INVARIANT: maybe}", "attnreg does not read the value of VLLM_BATCH_INVARIANT"),
        ("env: {VLLM_MLA_DISABLE: 1}", "attnreg does not read the value of VLLM_MLA_DISABLE"),
        ("args: [-dcp, $N]", "only the shell knows --decode-context-parallel-size"),
        ("args: {hf-overrides: {a: {b: 1}}}", "attnreg does not read --hf-overrides.a.b"),
        ("args: [--config, x.yaml]", "attnreg does not read --config"),
        ("args: [-ac.use_trtllm_attention=so]", "attnreg does not read --attention-config.use_trtllm_attention so"),
        ("args: [-ac.disable_flashinfer_q_quantization=true]", "attnreg does not read --attention-config.disable_"),
        ("args: [--disable-sliding-window]", "attnreg does not read --disable-sliding-window"),
        ("args: [--attention-backend, CUSTOM]", "--attention-backend CUSTOM is a plug-in's backend"),
        ("args: [-ac.backend=triton_msa]", "attnreg does not read --attention-config.backend"),
    ],
)
def test_what_matters_and_is_not_understood_is_not_judged(tmp_path, capsys, recipe, reason):
    file = tmp_path / "r.yaml"
    # the model would not start
    file.write_text(f"{LLAMA.replace('sm90', 'sm75')}{recipe}\n")
    assert main(["check", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["findings"] == []
    assert [note.startswith(f"{file}: what the run gets is not checked: {reason}") for note in told["notes"]] == [True]


@pytest.mark.parametrize("version", ["0.33", "0.26"])
def test_the_name_of_a_sparse_kernel_is_a_backend_to_one_option_and_in_later_releases(check, version):
    of = LLAMA.replace("0.33", version)
    assert check(f"{of}args: [--attention-backend, TRITON_MSA]\n")[1]
    assert bool(check(f"{of}args: [-ac.backend=TRITON_MSA]\n")[1]) == (version == "0.26")


@pytest.mark.parametrize(
    "option", ["--dcp-size 2", "--attn-cp-size=2", "--enable-hisparse", "--dsa-decode-backend fa3"]
)
def test_what_sglang_resolves_by_and_is_not_covered_is_not_judged(tmp_path, capsys, option):
    file = tmp_path / "r.yaml"
    refused = LLAMA.replace("vllm", "sglang").replace("0.33", "0.5.23").replace("sm90", "sm120")
    file.write_text(f"{refused}command: sglang serve --model x --attention-backend fa3 {option}\n")
    assert main(["check", str(file), "--json"]) == 0
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert note.endswith(f"what the run gets is not checked: attnreg does not read {re.split('[ =]', option)[0]}")


def test_what_a_config_asks_of_every_layer_is_read(check):
    recipe = f"{LLAMA.replace('sm90', 'sm100')}args: [--attention-backend, FLASHINFER"
    # FlashInfer leads there for causal attention alone
    assert check(f"{recipe}]\n")[1][0][1].startswith(RESTATED.format("FLASHINFER"))
    assert check(f"{recipe}, -ac.use_non_causal=true]\n")[1] == []
    _, found = check(f"{recipe.replace('FLASHINFER', 'TRITON_FLASHINFER')}, -sc.enable_adaptive_verification=true]\n")
    assert "adaptive_verification is not supported" in found[0][1]


def test_a_variable_that_a_release_still_reads_is_not_judged(tmp_path, capsys):
    file = tmp_path / "r.yaml"
    file.write_text(f"{LLAMA.replace('0.33', '0.32')}env: {{VLLM_ROCM_MONO_DECODE: 1}}\n")
    assert main(["check", str(file)]) == 0
    assert "not checked: attnreg does not read VLLM_ROCM_MONO_DECODE" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "args",
    [
        "[--attention-backend, FLASH_ATTN, -ac.backend=TRITON_ATTN]",
        '[--attention-backend, FLASH_ATTN, -ac, \'{"backend": "FLASH_ATTN"}\']',
        "{attention-backend: FLASH_ATTN, attention_config: {backend: FLASH_ATTN}}",
    ],
)
def test_two_names_for_one_backend_exclude_each_other(check, args):
    both = "--attention-backend and --attention-config.backend are both given: vllm-0.33.0 refuses the run"
    status, found = check(f"{LLAMA}args: {args}\n")
    assert (status, [message for _, message in found]) == (1, [both])


def test_a_run_that_does_not_start_names_the_backend_that_is_nearest(check):
    _, [(_, message)] = check(f"{LLAMA}args: [--block-size, '8']\n")
    nearest = "no backend accepts it; of the nearest, FLASH_ATTN/FA3-4: block_size is 8; supported: multiples of 16"
    assert message == f"vllm-0.33.0 does not start this model on sm90: {nearest}"


VISION = f'engine: vllm\nversion: "0.33"\nmodel: {CONFIGS / "Qwen2.5-VL-7B-Instruct"}\narch: sm90\n'
LATENT = DEEPSEEK.replace("gfx942", "sm90")


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (f"{VISION}args: [--mm-encoder-attn-backend, TORCH_SDPA]", None),
        (f"{VISION}args: [--mm-encoder-attn-backend, FLASH_ATTN]", "restates"),
        (f"{VISION}args: [--mm-encoder-attn-backend, FLASH_ATTN_MLA]", "refuses it"),
        # the name for the language model is none of its tower's
        (f"{VISION}args: [--attention-backend, TRITON_ATTN]", None),
        (f"{LATENT}args: {{attention-config: {{mla_prefill_backend: FLASH_ATTN}}}}", "restates"),
        (f"{LATENT}args: {{attention-config: {{mla_prefill_backend: TRTLLM_RAGGED}}}}", "refuses it"),
        (f"{LATENT}args: [--attention-backend, FLASHMLA]", None),
    ],
)
def test_options_name_backends_of_the_layers_that_they_reach(check, recipe, says):
    _, found = check(recipe)
    assert [says is not None and says in message for _, message in found] == ([] if says is None else [True])


def speculative(**config: object) -> str:
    return f"engine: vllm\nargs: [--speculative-config, {json.dumps(json.dumps(config))}]\n"


@pytest.mark.parametrize(
    ("release", "config", "said"),
    [
        ("0.33", {"method": "ngram", "num_speculative_tokens": 3}, []),
        ("0.33", {"method": "step5_mtp", "num_speculative_tokens": 1}, []),
        ("0.33", {"method": "eagel"}, ["absent-word"]),
        ("0.33", {"method": "medusa"}, ["absent-word"]),
        ("0.32", {"method": "medusa"}, []),
        ("0.32", {"method": "step5_mtp"}, ["absent-word"]),
        ("0.24", {"method": "dspark"}, ["absent-word"]),
        ("0.33", {"method": "mtp", "num_speculative_tokens": 0}, ["malformed-option"]),
        ("0.33", {"method": "mtp", "num_speculative_tokens": -3}, ["malformed-option"]),
        # the release's table has no facet for it, and the engine refuses it all the same
        ("0.24", {"method": "mtp", "num_speculative_tokens": "many"}, ["malformed-option"]),
    ],
)
def test_a_method_of_speculation_is_one_of_the_release(release, config, said, tmp_path, capsys):
    file = tmp_path / "recipe.yaml"
    file.write_text(f'version: "{release}"\n{speculative(**config)}')
    main(["check", str(file), "--json"])
    assert [finding["code"] for finding in json.loads(capsys.readouterr().out)["findings"]] == said


@pytest.mark.parametrize("words", ["-dcp", "-dcp --dtype half", "-dcp 0", "-dcp -2", "-dcp=", "-tp -1"])
def test_ranks_are_a_number_of_at_least_one(words, check):
    status, [(_, message)] = check(f"engine: vllm\ncommand: vllm serve m {words}\n")
    assert status == 1
    assert "expected a number of at least 1" in message
