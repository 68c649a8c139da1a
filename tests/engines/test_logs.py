"""`attnreg why`: the lines that engines log about their attention backends, one by one."""

from __future__ import annotations

import io
import json
import os
import time
from typing import get_args

import pytest

from attnreg import load_registry
from attnreg.cli import main
from attnreg.compile.inputs.bundled import bundled_registries, nearest_release, registry_root
from attnreg.compile.schema.logs import LoggedLineData, LogsFile
from attnreg.compile.source.yaml_source import Document
from attnreg.engines.logs.explanations import backend_of
from attnreg.engines.logs.reading.known import SAYS, KnownLogs, known_logs, read_known
from attnreg.engines.logs.reading.lines import ReadLine, Words, plain
from attnreg.engines.logs.reading.templates import Template
from attnreg.engines.logs.reading.values import values
from attnreg.engines.logs.refusals import held, refusals
from attnreg.engines.logs.runs import model_ids
from attnreg.engines.logs.tables import TableView
from attnreg.errors import RegistryError

KNOWN = known_logs()
CHOSEN = "INFO Using TRITON_ATTN attention backend out of potential backends: ['TRITON_ATTN', 'FLEX_ATTENTION']."
LINES = [
    (CHOSEN, "vllm", "TRITON_ATTN"),
    ("Using ROCM_ATTN backend out of potential backends: ['ROCM_ATTN', 'TRITON_ATTN'].", "vllm", "ROCM_ATTN"),
    ("Overriding with TRITON_ATTN out of potential backends: ['TRITON_ATTN'].", "vllm", "TRITON_ATTN"),
    ("Using AttentionBackendEnum.FLASHINFER backend.", "vllm", "FLASHINFER"),
    ("Using ROCM_ATTN backend (selected via --attention-backend).", "vllm", "ROCM_ATTN"),
    (
        "Selected backend AttentionBackendEnum.FLASHINFER is not valid for this configuration. Reason: ['x']",
        "vllm",
        "FLASHINFER",
    ),
    (
        "WARNING --block-size 16 precluded higher-priority backend(s) FLASHMLA. Using TRITON_MLA instead, which",
        "vllm",
        "TRITON_MLA",
    ),
    ("INFO Using fp8_ds_mla KV cache format for FLASHMLA_SPARSE backend.", "vllm", "FLASHMLA_SPARSE"),
    ("INFO [flash_attn.py:1123] Using FlashAttention version 3", "vllm", "FLASH_ATTN"),
    ("Using AttentionBackendEnum.TORCH_SDPA for MMEncoderAttention.", "vllm", "TORCH_SDPA"),
    ("Using backend AttentionBackendEnum.FLASH_ATTN for vit attention", "vllm", "FLASH_ATTN"),
    ("Using TRTLLM_RAGGED MLA prefill backend.", "vllm", "TRTLLM_RAGGED"),
    ("Attention backend not specified. Use trtllm_mha backend by default.", "sglang", "trtllm_mha"),
    ("Attention backend not explicitly specified. Use fa3 backend by default.", "sglang", "fa3"),
    ("Attention backend not specified. Falling back to 'fa3' for deterministic inference. You", "sglang", "fa3"),
    ("Using fa3 as attention backend for Olmo2ForCausalLM.", "sglang", "fa3"),
    ("Use triton as default attention backend for Gemma4", "sglang", "triton"),
    ("Use trtllm_mla as attention backend on sm100 for DeepseekV3ForCausalLM", "sglang", "trtllm_mla"),
    ("Use dsa attention backend for DeepSeek with DSA.", "sglang", "dsa"),
    ("Auto-select fa4 attention backend for Step3p7 on Blackwell.", "sglang", "fa4"),
    ("Use flashinfer as default prefill attention backend for Moss-VL", "sglang", "flashinfer"),
    ("FlashAttention3 only supports fp8_e4m3 if using FP8; Setting attention backend to triton.", "sglang", "triton"),
    ("FlashMLA only supports a page_size of 64, change page_size to 64.", "sglang", "flashmla"),
]


def found_in(text: str):
    return next(iter(KNOWN.matches(text)), None)


def why(capsys, *arguments: str, status: int = 0) -> str:
    assert main(["why", *arguments]) == status
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("line", "engine", "backend"), LINES)
def test_lines_of_engines_are_read_and_explained(line, engine, backend, capsys):
    known, match = found_in(line)
    assert (known.engine, backend_of(known, match)) == (engine, backend)
    out = why(capsys, line)
    newest = {"vllm": "vllm-0.33.0", "sglang": "sglang-0.5.23"}[engine]
    assert f"by {newest}, which is assumed, the newest here: no line names the release" in out


def test_the_orders_that_give_the_potential_backends_are_named(capsys):
    text = why(capsys, CHOSEN, "--arch", "sm90")
    assert "TRITON_ATTN is the first of 2 backends that accept the layer" in text
    assert "the order cuda/mha (priorities.yaml:" in text
    assert "before it FLASH_ATTN and FLASHINFER refused the layer" in text
    # an entry with a condition of its own may not have been asked
    assert "in which TRITON_FLASH_ATTN comes first where mm_prefix and arch sm90" in text
    odd = CHOSEN.replace("'TRITON_ATTN', 'FLEX_ATTENTION'", "'FLEX_ATTENTION', 'FLASHINFER'")
    assert "the line is of another release" in why(capsys, odd)


def test_a_backend_that_is_named_may_be_named_by_the_code_of_a_model(capsys):
    text = why(capsys, "Using AttentionBackendEnum.TRITON_ATTN backend.")
    assert "was named by the user (--attention-backend), or by the code of a model: " in text
    assert "Gemma4Config (steps.yaml:" in text
    assert "by the code of a model" not in why(capsys, "Using AttentionBackendEnum.FLASHINFER backend.")


@pytest.mark.parametrize(
    ("backend", "stored", "said"),
    [
        ("FLASHMLA_SPARSE", "fp8_ds_mla", "the KV cache as fp8_ds_mla, where kv_dtype fp8 (backends.yaml:"),
        ("FLASHINFER_MLA_SPARSE_SM120", "fp8_ds_mla", "fp8_ds_mla, whatever it is asked for (backends.yaml:"),
        ("FLASHMLA_SPARSE", "fp8_e4m3", "does not say that FLASHMLA_SPARSE stores a cache as fp8_e4m3"),
        ("FLASHMLA", "fp8_ds_mla", "the line is of another release"),
    ],
)
def test_the_format_of_a_cache_is_explained_by_what_the_backend_stores(backend, stored, said, capsys):
    assert said in why(capsys, f"Using {stored} KV cache format for {backend} backend.")


def test_a_line_without_a_backend_that_accepts_is_none_of_vllms(capsys):
    assert main(["why", "Using TRITON_ATTN attention backend out of potential backends: none"]) == 2
    assert "is not one that engines are known to log" in capsys.readouterr().err


@pytest.mark.parametrize("release", ["sglang-0.5.14", "sglang-0.5.23"])
@pytest.mark.parametrize(
    ("line", "step", "other"),
    [
        ("Attention backend not specified. Use fa3 backend by default.", "default_backend", "GptOss"),
        ("Using fa3 as attention backend for Olmo2ForCausalLM.", "Olmo2ForCausalLM", "GptOss"),
        ("Use trtllm_mla as attention backend on sm100 for DeepseekV3ForCausalLM", "deepseek_family true", "cutedsl"),
        (
            "Attention backend not specified. Falling back to 'fa3' for deterministic inference.",
            "deterministic",
            "Olmo",
        ),
        ("TensorRT-LLM MHA only supports page_size of 16, changing page_size from 1 to 64.", "trtllm_mha", "flashmla"),
        ("Use fa3 attention backend for Nothing", "the line is of another release", "GptOss"),
    ],
)
def test_only_the_steps_that_log_a_line_of_sglang_are_named(release, line, step, other, capsys):
    text = why(capsys, line, "--registry", release)
    assert step in text
    assert other not in text


LEADS = "Using FLASHINFER attention backend out of potential backends: ['FLASHINFER', 'FLASH_ATTN']."
DEFAULT = "Attention backend not specified. Use fa3 backend by default."


@pytest.mark.parametrize(
    ("line", "release", "arch", "said", "unsaid"),
    [
        (LEADS, "vllm-0.33", "sm100", "order cuda/blackwell-mha", "another release"),
        (LEADS, "vllm-0.33", "sm90", "in this sequence on sm90: the line is of another release or GPU", "order cuda/"),
        (LEADS, "vllm-0.33", "gfx942", "the line is of cuda, and gfx942 is not", "another release"),
        (DEFAULT, "sglang-0.5", "sm90", "default_backend (vocabulary.yaml:", "another release"),
        (
            DEFAULT,
            "sglang-0.5",
            "gfx942",
            "does so on gfx942: the line is of another release or GPU",
            "default_backend",
        ),
        # whatever else is asked for, another case is reached first
        (DEFAULT.replace("fa3", "flashinfer"), "sglang-0.5", "gfx942", "WhisperForConditional", "flashinfer-python"),
        (DEFAULT.replace("fa3", "triton"), "sglang-0.5", "gfx942", "where mla true", "nothing before holds"),
    ],
)
def test_what_an_architecture_rules_out_is_not_named(line, release, arch, said, unsaid, capsys):
    text = why(capsys, line, "--registry", release, "--arch", arch)
    assert said in text
    assert unsaid not in text


def test_a_model_type_that_transformers_does_not_know_is_the_registrys_only_if_it_names_it(capsys):
    line = (
        "ValueError: The checkpoint you are trying to load has model type `{}` but Transformers does not recognize "
        "this architecture. This could be because of an issue with the checkpoint"
    )
    assert "GraniteSWAForCausalLM" in why(capsys, line.format("granite_swa"), "--registry", "sglang-0.5.21")
    assert "GraniteMoeSWAForCausalLM" in why(capsys, line.format("granitemoe_swa"), "--registry", "sglang-0.5.21")
    assert main(["why", line.format("acme"), "--registry", "sglang-0.5.21"]) == 2
    assert "GraniteSWA" not in capsys.readouterr().out


NONE = "ValueError: No valid attention backend found for cuda with AttentionSelectorConfig({})."
LAYER = (
    "head_size=100, dtype=torch.float32, kv_cache_dtype=turboquant_k8v4, block_size=None, use_mla=False, "
    "has_sink=True, attn_type=decoder"
)


def test_the_configuration_in_a_refusal_is_asked_anew(capsys):
    text = why(capsys, NONE.format(LAYER), "--registry", "vllm-0.33", "--arch", "sm90")
    assert "vllm-0.33.0@" in text
    assert "kv_dtype is turboquant_k8v4" in text
    assert ": accepts" not in text
    # without a GPU the line's own configuration is all that there is
    assert "no backend accepts a layer with head_size 100" in why(capsys, NONE.format(LAYER))


def test_a_member_of_an_enumeration_in_a_refusal_is_its_word(capsys):
    line = NONE.format(
        "head_size=192, dtype=torch.bfloat16, kv_cache_dtype=auto, block_size=None, use_mla=True, has_sink=False, "
        "use_sparse=True, use_mm_prefix=False, use_per_head_quant_scales=False, attn_type=AttentionType.{}"
    )
    for member, word in {"DECODER": "decoder", "ENCODER_ONLY": "encoder_only"}.items():
        asked = ("--registry", "vllm-0.33", "--arch", "sm120")
        texts = [line.format(member), line.format(member).replace(f"AttentionType.{member}", word)]
        logged, plain_word = (why(capsys, text, *asked) for text in texts)
        assert logged == plain_word
        assert "vllm-0.33.0@" in logged


def test_an_answer_that_is_another_than_the_lines_says_so(capsys):
    line = NONE.format(
        "head_size=128, dtype=torch.bfloat16, kv_cache_dtype=None, block_size=16, use_mla=False, has_sink=False, "
        "use_tomorrow=True, use_other=False"
    )
    text = why(capsys, line, "--registry", "vllm-0.33", "--arch", "sm90")
    assert "it was not asked for use_tomorrow, which no request has here" in text
    assert "vllm-0.33.0 would accept this layer on sm90, but your engine refused it: is its GPU another?" in text
    # the others were not needed, or would fail
    assert text.count(": accepts") == text.count("FLASH_ATTN/FA3-4: accepts") == 1


@pytest.mark.parametrize(
    ("config", "lacks"),
    [("head_size=128", "no dtype"), ("", "no head_size and no dtype"), ("dtype=torch.float16, x", "no head_size")],
)
def test_a_line_that_is_cut_off_is_refused(config, lacks, capsys):
    text = why(capsys, NONE.format(config), "--arch", "sm90", status=2)
    assert f"not explained: the line holds {lacks}; give the whole line, as the engine logs it" in text


def test_a_backend_of_another_release_is_refused(capsys):
    text = why(capsys, "Using ROCM_OCTAVE backend.", "--registry", "vllm-0.31", status=2)
    assert "has no backend ROCM_OCTAVE; the line is of another release or of a plug-in" in text


def test_a_line_that_is_refused_does_not_hide_the_others(capsys):
    default = "Attention backend not specified. Use fa3 backend by default."
    lines = ["Using TRITON_ATTN backend.", "Using FOO backend.", "Using FLASH_ATTN backend.", default]
    assert main(["why", "--json", "--registry", "vllm-0.33", *lines]) == 2
    out, err = capsys.readouterr()
    told = json.loads(out)["logs"][0]["lines"]
    assert [entry["understood"] for entry in told] == [True, False, True, False]
    assert "has no backend FOO; the line is of another release" in told[1]["reason"]
    assert told[3]["reason"].endswith("is no release of sglang, which logged the line; name one with --engine")
    assert err == "attnreg: 2 of 4 lines are not explained\n  help: the reason stands below each\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "standard input is empty"),
        (["", " "], "the lines given are empty"),
        (["hello"], "the line is not one that engines are known to log"),
        (["/nonexist.log"], "/nonexist.log: no such file"),
        (["logs/server"], "logs/server: no such file"),
        (["server.log"], "server.log: no such file"),
        (["ready at /v1/models"], "the line is not one that engines are known to log"),
        (["hello", "there"], "none of the 2 lines is one that engines are known to log"),
        ([CHOSEN, "--registry", "sglang-0.5"], "1 of 1 lines is not explained"),
        ([CHOSEN, "--arch", "sm91"], "unknown architecture 'sm91'"),
        ([CHOSEN, "--model", "no/such"], "no/such: no such file"),
    ],
)
def test_bad_input_is_refused(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["why", *arguments]) == 2
    assert message in capsys.readouterr().err


# the data -------------------------------------------------------------------------------------------------------------


def all_lines(known: KnownLogs = KNOWN):
    for engine in known.engines.values():
        yield from (*engine.facts, *engine.lines, *engine.refusals)
    yield from known.gpus


@pytest.mark.parametrize("line", list(all_lines()), ids=lambda line: line.template.text[:50])
def test_each_known_line_is_read_and_names_its_source(line):
    """A line without a word would never be looked at."""
    assert line.source
    assert [w for w in KNOWN.words if any(w in literal for literal in line.template.literals)], line.template.text
    for name in line.means.replace("}", "{").split("{")[1::2]:
        assert name in line.template.names


def test_the_data_are_of_the_schema():
    LogsFile.model_validate(Document.load(registry_root() / "logs.yaml").data)
    assert set(get_args(LoggedLineData.model_fields["says"].annotation)) == set(SAYS)


def test_each_refusal_of_a_registry_is_found_by_the_engines_own_words():
    """Or the data says that the engine has none."""
    missing = []
    for name in bundled_registries():
        engine = KNOWN.engines.get(name.partition("-")[0])
        if engine is None:
            continue
        known = [text for line in engine.refusals for text in line.refuses] + list(engine.unlogged)
        missing += [
            f"{name}: {refusal.sentence} ({refusal.where.short})"
            for refusal in refusals(TableView(load_registry(name)))
            # a class gives the facet that it refuses: "block_size not supported"
            if not refusal.sentence.startswith(tuple(known)) and not {*refusal.facets} & {*engine.reasons.values()}
        ]
    assert missing == []


def test_each_refusal_of_an_engine_is_held_by_a_registry():
    for engine in KNOWN.engines.values():
        tables = [TableView(load_registry(name)) for name in bundled_registries() if name.startswith(engine.name)]
        for line in engine.refusals:
            for text in line.refuses:
                assert any(held([text], None, table) for table in tables), text


def test_a_value_that_is_computed_follows_from_no_architecture():
    known = TableView(load_registry("vllm-0.33.0"), "sm100").known
    assert "fa4_usable" in known
    assert not {"queries_per_kv_head", "model_queries_per_kv_head"} & known.keys()


def test_the_registrys_own_sentence_is_found_too(capsys):
    table = TableView(load_registry("sglang-0.5.23"))
    refusal = next(r for r in refusals(table) if r.sentence.startswith("trtllm_mla requires"))
    text = why(capsys, f"INFO server_args={{'model_path': 'x'}}\nValueError: attention: {refusal.sentence}")
    assert refusal.sentence in text
    assert "line 2" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{text: 'Using {colour} x', says: note}", "unknown kind of field"),
        ("{text: '{word} x', says: note}", "begins with a literal"),
        ("{text: 'x {word}{word_2}', says: note}", "has one between two fields"),
        ("{text: x, says: nothing}", "is no kind of line"),
        ("{text: x, says: note, meanz: y}", "unknown key `meanz`"),
    ],
)
def test_a_fault_of_the_data_is_found_with_its_place(text, message):
    rest = "title: X, settings: {}, facts: [], refusals: [], reasons: {}, unlogged: []"
    document = Document(f"x: {{{rest}, lines: [{text}]}}\nwords: []\nerrors: []\nmessages: []\ngpus: []\n", "logs.yaml")
    with pytest.raises(RegistryError, match=message) as e:
        read_known(document)
    assert e.value.problems[0].where.line == 1


# templates, values and names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "line", "fields"),
    [
        ("Using {backend} backend.", "x Using AttentionBackendEnum.A_B backend. y", {"backend": "A_B"}),
        ("Using {BACKEND} backend.", "Using Flash backend.", None),
        ("Using {BACKEND} backend.", "Using a b backend. Using FLASH backend.", {"BACKEND": "FLASH"}),
        ("of {backends}.", "of ['A', 'B'].", None),
        ("of [{backends}]", "of ['A_B', 'CD'].", {"backends": "A_B, CD"}),
        # text of another kind, such as a part of a prompt, is no backend
        ("of [{backends}]", "of ['A_B', 'sk-12'].", None),
        ("version {number}", "version 3.", {"number": "3"}),
        ("version {release}", "version v0.26.0+cu129, x", {"release": "0.26.0+cu129"}),
        ("version {release}", "version 12", None),
        ("a {text} z", "a " + "b" * 5000 + " z", None),
        ("to {number}", "to sixty", None),
    ],
)
def test_a_template_takes_the_fields_of_its_kinds(template, line, fields):
    match = Template(template).match(line)
    assert (match and match.fields) == fields


@pytest.mark.parametrize("line", list(all_lines()), ids=lambda line: line.template.text[:40])
def test_no_line_makes_a_template_go_back(line):
    literals = line.template.literals
    hostile = [literal * (200_000 // max(len(literal), 1)) for literal in literals if literal]
    hostile += [literals[0] + "a" * 200_000, literals[0] + "a " * 100_000 + literals[-1], "-" * 200_000]
    begun = time.process_time()
    for text in hostile:
        line.template.match(text)
    assert time.process_time() - begun < 1


def test_values_are_read_out_of_either_form_and_of_a_part():
    keys = ("model", "model_path", "tp_size", "dtype", "kv_cache_dtype", "x")
    logged = "model='a/b', tokenizer='c', dtype=torch.bfloat16, kv_cache_dtype=auto, speculative_config=None"
    assert values(logged, keys) == {"model": "a/b", "dtype": "torch.bfloat16", "kv_cache_dtype": "auto"}
    assert values("{'model_path': \"a/b\", 'tp_size': 8, 'x': None, 'y': {'dtype': 'z'}", keys) == {
        "model_path": "a/b",
        "tp_size": "8",
        "dtype": "z",
    }
    assert values("model='cut", keys) == {}


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("openai/gpt-oss-20b", ["openai/gpt-oss-20b", "gpt-oss-20b"]),
        ("/root/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/2069b3", ["Qwen/Qwen3-8B", "Qwen3-8B"]),
        ("/data/models/Qwen3-8B/", ["Qwen3-8B"]),
        ("s3://bucket/Qwen3-8B", []),
        ("https://me:secret@host/x", []),
        ("", []),
    ],
)
def test_a_model_is_known_by_its_id(text, ids):
    assert model_ids(text) == ids


@pytest.mark.parametrize(
    ("engine", "release", "name"),
    [
        ("vllm", "0.29.5", "vllm-0.29.0"),
        ("vllm", "0.6.3.post1", "vllm-0.20.0"),
        ("vllm", "0.40.0rc1.dev3+gabc123", "vllm-0.33.0"),
        ("vllm", "1.0.0", "vllm-0.33.0"),
        ("vllm", "nightly", "vllm-0.33.0"),
        ("sglang", "0.5.13.post1", "sglang-0.5.14"),
        ("sglang", "0.5.15.post1", "sglang-0.5.15"),
        ("sglang", "0.5.18.post1", "sglang-0.5.18"),
        ("sglang", "0.5.24", "sglang-0.5.23"),
    ],
)
def test_the_nearest_release_is_the_nearest_by_number(engine, release, name):
    assert nearest_release(engine, release) == name


# reading --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\x1b[1;32mINFO\x1b[0m Using \x1b]8;;x\x07A\x1b]8;;\x07", "INFO Using A"),
        ('{"level": "info", "message": "Using A"}', "Using A"),
        ('{"log":"Using A\\n","stream":"stderr"}', "Using A"),
        ('2026-01-01T00:00:00Z {"event": "Using A"}', "Using A"),
        ('{"other": "Using A"}', '{"other": "Using A"}'),
        ("{'model': 'x'}", "{'model': 'x'}"),
        ("10%\r50%\rUsing A", "Using A"),
        ("Using A\r", "Using A"),
    ],
)
def test_the_message_of_a_line_is_plain(text, message):
    assert plain(ReadLine(1, text), KNOWN.messages).text == message


def test_lines_with_a_word_are_read_with_their_numbers():
    words = Words(["ab", "cd"])
    assert [(line.number, line.text) for line in words.lines(b"x\nab\n\ny cd z\nab", 5)] == [
        (6, "ab"),
        (8, "y cd z"),
        (9, "ab"),
    ]


def test_the_command_reads_arguments_files_and_pipes(capsys, monkeypatch, tmp_path):
    out = why(capsys, CHOSEN)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{CHOSEN}\nready\n"))
    assert why(capsys) == out
    log = tmp_path / "server.log"
    log.write_bytes(f"{CHOSEN}\nready \xff\n".encode("latin-1"))
    assert why(capsys, str(log)) == out
    read, write = os.pipe()
    os.write(write, f"{CHOSEN}\n".encode())
    os.close(write)
    try:
        assert why(capsys, f"/dev/fd/{read}") == out
    finally:
        os.close(read)


def test_a_log_that_is_there_is_never_said_not_to_be(capsys, tmp_path):
    log = tmp_path / "server.log"
    log.write_text("loading\nready\n")
    assert main(["why", str(log)]) == 2
    assert capsys.readouterr().err.startswith("attnreg: none of the 2 lines is one that engines are known to log")
    assert main(["why", str(tmp_path)]) == 2
    assert "cannot be read: Is a directory" in capsys.readouterr().err
