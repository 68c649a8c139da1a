"""How far a script is followed: the options that its engine gets, and what only a running shell knows."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from attnreg.cli import main
from attnreg.engines.deploy.files import launches_in_text, text_of
from attnreg.engines.deploy.launch import EngineLaunch, LaunchError
from attnreg.engines.deploy.shell import syntax

SERVE = "vllm serve m"


def launches(script: str, tmp_path: Path) -> list[EngineLaunch]:
    file = tmp_path / "serve.sh"
    file.write_text(script)
    return launches_in_text(text_of(file), file)


@pytest.mark.parametrize(
    "words",
    [
        "vllm/vllm-openai:v0.33.0 m",
        "--entrypoint vllm vllm/vllm-openai:v0.33.0 serve m",
        "--entrypoint vllm rocm/vllm:rocm7.0_vllm_0.33.0 serve m",
        "--entrypoint=/usr/local/bin/vllm --name serve registry.local/own:v1 serve m",
        '--entrypoint "" vllm/vllm-openai:v0.33.0 vllm serve m',
    ],
)
def test_an_image_of_vllm_takes_its_model_as_the_command_does(words: str, tmp_path: Path) -> None:
    [launch] = launches(f"docker run --gpus all {words} --dtype half\n", tmp_path)
    assert (launch.named_model, options(launch)[0].split()[0]) == ("m", "--dtype=half")


def options(launch: EngineLaunch) -> list[str]:
    return [f"{o.name}={o.value}{'?' if o.maybe else ''} {o.where.line}:{o.where.column}" for o in launch.options]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("D=half\nvllm serve m --dtype $D\n", ["--dtype=half 2:14"]),
        ('D=half\nvllm serve m --dtype="$D"\n', ["--dtype=half 2:14"]),
        ("A='--dtype half'\nvllm serve m $A --block-size 16\n", ["--dtype=half 1:4", "--block-size=16 2:17"]),
        ("A=(--dtype half)\nA+=(--block-size 16)\nvllm serve m ${A[@]}\n", ["--dtype=half 1:4", "--block-size=16 2:5"]),
        ('A="--dtype half"\nA="$A --block-size 16"\nvllm serve m $A\n', ["--dtype=half 1:4", "--block-size=16 2:7"]),
        ('A="--dtype half"\nA+=" --block-size 16"\nvllm serve m $A\n', ["--dtype=half 1:4", "--block-size=16 2:6"]),
        # a function gets the arguments of its call
        ('run() { vllm serve "$1" --dtype "$2"; }\nrun m half\n', ["--dtype=half 1:25"]),
        ('function run { exec vllm serve "$@"; }\nrun m --dtype half\n', ["--dtype=half 2:7"]),
        ('main() { vllm serve m --dtype half; }\nmain "$@"\n', ["--dtype=half 1:23"]),
        # one that nobody calls is read, too
        ("main() { vllm serve m --dtype half; }\n", ["--dtype=half 1:23"]),
        ("bash <<EOF\nvllm serve m --dtype half\nEOF\n", ["--dtype=half 2:14"]),
        ("bash -s <<< 'vllm serve m --dtype half'\n", ["--dtype=half 1:27"]),
        ("echo 'vllm serve m --dtype half' | bash\n", ["--dtype=half 1:20"]),
        ("bash -c 'true\nvllm serve m --dtype half'\n", ["--dtype=half 2:14"]),
        ("srun -N 1 uv run vllm serve m --dtype half\n", ["--dtype=half 1:31"]),
        ("vllm serve m \\\n  --dtype half \\\n  --block-size 16\n", ["--dtype=half 2:3", "--block-size=16 3:3"]),
        ('vllm serve m --attention-config \'{"backend": "X"}\'\n', ["--attention-config.backend=X 1:35"]),
        # what an array or a text holds and nothing runs is read once
        ("CMD=(vllm serve m --dtype half)\n", ["--dtype=half 1:19"]),
    ],
)
def test_each_option_has_its_value_and_its_place(script: str, expected: list[str], tmp_path: Path) -> None:
    [launch] = launches(script, tmp_path)
    assert options(launch) == expected


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("if x; then A=(--dtype half); fi\nvllm serve m ${A[@]}\n", ["--dtype=half? 1:15"]),
        ("A=(--dtype half)\nif x; then A+=(--block-size 16); fi\nvllm serve m ${A[@]}\n",
         ["--dtype=half 1:4", "--block-size=16? 2:16"]),
        ("A=()\ncase $1 in a) A+=(--dtype half);; b) A+=(--dtype float);; esac\nvllm serve m ${A[@]}\n",
         ["--dtype=half? 2:19", "--dtype=float? 2:42"]),
        ("[ -n \"$D\" ] || D=half\nvllm serve m --dtype $D\n", ["--dtype=half? 2:14"]),
        ("for i in 1 2; do A+=(--dtype half); done\nvllm serve m ${A[@]}\n", ["--dtype=half? 1:22"]),
        # both branches give the same
        ("if x; then D=half; else D=half; fi\nvllm serve m --dtype $D\n", ["--dtype=half 2:14"]),
        # two values: only the shell knows
        ("if x; then D=half; else D=float; fi\nvllm serve m --dtype $D\n", ["--dtype=$D 2:14"]),
        ("D=half\nif x; then D=float; fi\nvllm serve m --dtype $D\n", ["--dtype=$D 3:14"]),
        # in the branch itself the value is certain
        ("if x; then D=half; vllm serve m --dtype $D; fi\n", ["--dtype=half 1:33"]),
        ("D=${D:-half}\nvllm serve m --dtype $D\n", ["--dtype=${D:-half} 2:14"]),
        ("D=$(cat x)\nvllm serve m --dtype $D\n", ["--dtype=$(cat x) 2:14"]),
        ("D=half; unset D\nvllm serve m --dtype $D\n", ["--dtype=$D 2:14"]),
        ("(D=half)\nvllm serve m --dtype $D\n", ["--dtype=$D 2:14"]),
        ("read D\nvllm serve m --dtype $D\n", ["--dtype=$D 2:14"]),
        ("D=half\nread -r D\nvllm serve m --dtype $D\n", ["--dtype=$D 3:14"]),
    ],
)  # fmt: skip
def test_what_a_branch_decides_is_marked(script: str, expected: list[str], tmp_path: Path) -> None:
    [launch] = launches(script, tmp_path)
    assert options(launch) == expected


def test_a_model_that_a_branch_decides_is_not_known(tmp_path: Path) -> None:
    for script in (
        '[ -n "$M" ] || M=DeepSeek-V3\nvllm serve $M\n',
        "if x; then A=(--model Qwen3-8B); else A=(--model DeepSeek-V3); fi\nvllm serve ${A[@]}\n",
    ):
        [launch] = launches(script, tmp_path)
        assert launch.named_model == "$model"


def test_a_here_document_for_a_file_is_no_command(tmp_path: Path) -> None:
    for script in (f"cat > x <<EOF\n{SERVE}\nEOF\n", f"tee x <<'EOF'\n{SERVE}\nEOF\n", f"cat <<EOF\n{SERVE}\nEOF\n"):
        with pytest.raises(LaunchError, match="nothing in the file runs an engine"):
            launches(script, tmp_path)


# scripts that took minutes, and what another reader could take minutes for: each is read, or refused with the reason
HEAVY = {
    "eval in eval": "eval " + "$(eval " * 40 + SERVE + ")" * 40,
    "open arithmetic": "vllm serve $((((((\n" * 400,
    "open brackets": "(vllm serve m $(\n" * 800,
    "an option of a shell": f"{SERVE}\n' -" + "c" * 6000,
    "many options": SERVE + " --x-opt 1" * 9000,
    "many launches": f"{SERVE} --attention-backend NOPE\n" * 2000,
    "arrays in arrays": f"{SERVE}\n" + "a=(" * 3000,
    "open here-documents": f"{SERVE} <<E\n" * 500,
    "a text that doubles": "A0=x\n" + "".join(f'A{i}="$A{i - 1}$A{i - 1}"\n' for i in range(1, 40)) + "vllm serve $A39",
    "an array that grows": "A=(vllm serve m)\n" + "A+=(--x)\n" * 6000 + '"${A[@]}"\n',
    "functions that double": f"{SERVE}\nf0() {{ :; }}\n"
    + "".join(f"f{i}() {{ f{i - 1}; f{i - 1}; }}\n" for i in range(1, 50))
    + "f49\n",
    "a long list": f"{SERVE}\n" + "true && " * 6000 + "true",
    "a word of many quotes": "a" + '"b"a' * 8000 + " vllm serve\n",
}


@pytest.mark.parametrize("name", HEAVY)
def test_a_heavy_script_is_read_or_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0

    def spend(budget: syntax.Budget, count: int = 1, *place: Any) -> None:
        nonlocal steps
        steps += count
        real(budget, count, *place)

    real = syntax.Budget.spend
    monkeypatch.setattr(syntax.Budget, "spend", spend)
    with suppress(LaunchError):
        assert launches(HEAVY[name], tmp_path)
    assert steps < syntax.MOST_STEPS + 20_000


def test_a_parser_that_takes_too_long_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syntax, "PARSE_SECONDS", -1.0)
    with pytest.raises(LaunchError, match="seconds to parse"):
        launches(f"{SERVE}\n" * 100, tmp_path)


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("vllm serve m \\ \n  --dtype half\n", ["1:14 broken-line"]),
        ("vllm serve m --dtype half \\\t\n  --block-size 16\n", ["1:27 broken-line"]),
        ("bash -c 'vllm serve m \\ \n --dtype half'\n", ["1:23 broken-line"]),
        ("vllm serve m \\\n  --enforce-eager \\ \n  --attn-backend X\n", ["2:19 broken-line"]),
        ("vllm serve m > log \\ \n", ["1:20 broken-line"]),
        ("vllm serve m --chat-template '\\ '\n", []),
        ("vllm serve m\necho a \\ \n", []),
        ("vllm serve m \u2013attention-backend FLASH_ATTN\n", ["1:14 unknown-option"]),
        ("vllm serve m \u2014kv-cahce-dtype fp8\n", ["1:14 unknown-option"]),
        ("vllm serve m -attention-backend FLASH_ATTN\n", ["1:14 unknown-option"]),
        ("vllm serve m --dtype half \u2013port 1\n", []),
        ('vllm serve m --attention-config \'{"backnd": "X"}\'\n', ["1:35 unknown-option"]),
        ('vllm serve m -ac=\'{"use_non_causal": true, "backnd": "X"}\'\n', ["1:44 unknown-option"]),
        ("vllm serve m --attention-config.backnd X\n", ["1:14 unknown-option"]),
    ],
)
def test_what_the_engine_would_not_take_is_reported_at_its_place(
    script: str, found: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.sh"
    file.write_text(script)
    main(["check", str(file), "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [f"{f['where'].split(':', 1)[1]} {f['code']}" for f in findings] == found


@pytest.mark.parametrize(
    ("script", "version"),
    [
        ("uvx --from vllm==0.31.0 vllm serve m\n", "0.31.0"),
        ("uvx --from 'vllm[flashinfer]==0.31.0' vllm serve m\n", "0.31.0"),
        ("uv run --with=vllm==0.31.0 vllm serve m\n", "0.31.0"),
        # what is built before or after a release is none: the nearest table answers, and a note says so
        ("uvx --from vllm==0.31.0.post1 vllm serve m\n", "0.31.0.post1"),
        ("uvx --from vllm==0.31.0rc2 vllm serve m\n", "0.31.0rc2"),
        ("uvx --from vllm==0.31.0+cu129 vllm serve m\n", "0.31.0"),
        ("docker run vllm/vllm-openai:v0.31.0-rc1 --model m\n", "0.31.0-rc1"),
        ("docker run vllm/vllm-openai:v0.31.0-cu129 --model m\n", "0.31.0"),
        ("uv run --with sglang==0.5.14 python -m sglang.launch_server --model-path m\n", "0.5.14"),
        ("uv run --with torch==2.11.0 vllm serve m\n", ""),
        ("uvx --from 'vllm>=0.31' vllm serve m\n", ""),
        ("pip install vllm==0.26.0\nvllm serve m\n", "0.26.0"),
        ("uv pip install -U 'vllm[flashinfer]==0.26.0' ray && vllm serve m\n", "0.26.0"),
        ("python3 -m pip install vllm==0.24.0\npip3 install vllm==0.26.0\nvllm serve m\n", "0.26.0"),
        ("pip install vllm==0.26.0\nuvx --from vllm==0.31.0 vllm serve m\n", "0.31.0"),
        ("pip install vllm==0.26.0\ndocker run vllm/vllm-openai:latest --model m\n", ""),
        ('if [ "$OLD" ]; then pip install vllm==0.26.0; fi\nvllm serve m\n', ""),
        ("pip install sglang==0.5.14\nvllm serve m\n", ""),
        ("pip uninstall -y vllm==0.26.0\nvllm serve m\n", ""),
        ("vllm serve m\npip install vllm==0.26.0\n", ""),
    ],
)
def test_a_pinned_requirement_is_the_release(script: str, version: str, tmp_path: Path) -> None:
    [launch] = launches(script, tmp_path)
    assert launch.version == version


@pytest.mark.parametrize(
    "script",
    [
        "T=harmless-value\nvllm serve m --attention-backend $T\n",
        "export T=harmless-value\nvllm serve m --attention-backend $T\n",
        "T=harmless-value vllm serve m --attention-backend harmless-value\n",
        'T=harmless-value\nvllm serve "$T" --kv-cache-dtype="$T" --block-size x$T\n',
        'T=harmless-value\nARGS="--attention-backend $T"\nT=other\nvllm serve m $ARGS\n',
        "T=harmless-value\nARGS=(--attention-backend $T)\nvllm serve m ${ARGS[@]}\n",
        'T=harmless-value\nbash -c "vllm serve m --attention-backend $T"\n',
        'T=harmless-value\nrun() { vllm serve m --attention-backend "$1"; }\nrun $T\n',
        "T=harmless-value\nvllm serve m --speculative-config.method $T --$T 1 --attn-$T 1\n",
    ],
)
def test_no_message_has_the_value_of_a_variable(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.sh"
    file.write_text(script)
    for form in ("text", "json", "github", "sarif"):
        assert main(["check", str(file), "--arch", "h100", "--output-format", form]) in (0, 1, 2)
        printed = "".join(capsys.readouterr())
        assert "harmless-value" not in printed
        assert "$T" in printed


def test_a_variable_that_the_engine_reads_is_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.sh"
    file.write_text(
        "export VLLM_ATTENTION_BACKEND=FLASHINFER_MLA\nvllm serve m --attention-backend FLASHINFER_MLA_SPARS\n"
    )
    assert main(["check", str(file), "--output-format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert ["--attention-backend", "FLASHINFER_MLA_SPARS"] in [finding["subject"] for finding in found]
