"""A secret in any place of a file of another kind, or in a variable of the environment, is in no message."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.registries.files import FILES, write

import attnreg
from attnreg.analysis.check.evidence import contradictions
from attnreg.analysis.timings.samples import read_samples
from attnreg.compile.source import yaml_source
from attnreg.compile.source.quoting import (
    MAX_QUOTED,
    FileKind,
    cut,
    is_of,
    may_quote,
    of_shell,
    variables_of,
    with_cuts,
)
from attnreg.compile.source.yaml_source import Document
from attnreg.errors import RegistryError

SECRET = "ghpS3CRETx0123456789"
LLAMA = Path(__file__).resolve().parents[2] / "examples/configs/Llama-3.1-8B"
ASK = ("--arch", "sm90", "--head-size", "128")

# files as a job can read them, whose content is no one's to print
FOREIGN: dict[str, str] = {
    "an environment": "MYTOKEN={0}\0SHELL=/bin/bash\0",
    "the environment's second": "SHELL=/bin/bash\0MYTOKEN={0}\0",
    "an .env": "# {0}\nTOKEN={0}\nOTHER='{0}\n",
    "a private key": "-----BEGIN OPENSSH PRIVATE KEY-----\n{0}\n-----END OPENSSH PRIVATE KEY-----\n",
    "a .netrc": "machine example.com login me password {0}\n",
    "an .npmrc": "//registry.npmjs.org/:_authToken={0}\n",
    "git's credentials": "https://me:{0}@github.com\n",
    "git's config": "[http]\n\textraheader = AUTHORIZATION: basic {0}\n",
    "a text": "{0}",
    "a comment": "# {0}\n",
    "a long text": "x {0} " * 9000,
    "a key": "{0}: 1\n",
    "a value": "password: {0}\n",
    "a nested value": "data:\n  password: [{{a: {0}}}]\n",
    "a list": "- {0}\n- {{b: {0}}}\n",
    "a key twice": "{0}: 1\n{0}: 2\n",
    "a value twice": "a: {0}\na: {0}\n",
    "a tag": "a: !{0} x\n",
    "a tag of a library": "a: !!{0} x\n",
    "an anchor": "a: *{0}\n",
    "an anchor within itself": "a: &{0} [*{0}]\n",
    "a merge": "<<: *{0}\n",
    "a complex key": "? [{0}]\n: 1\n",
    "an open bracket": "a: [{0}\n",
    "an open quote": "a: '{0}\n",
    "two colons": "a: {0}: b\n",
    "a tab": "a:\n\t{0}: b\n",
    "an escape": 'a: "{0}\\q"\n',
    "a directive": "%{0} 1\n---\na: 1\n",
    "a second document": "a: {0}\n---\nb: {0}\n",
    "a long number": "a: 1234567890123456789\nb: {0}\n",
    "a control character": "a: {0}\x07\n",
    "a control character in quotes": 'a: "{0}\\x07"\n',
    "not UTF-8": "a: {0}\xff\n",
    "JSON": '{{"auths": {{"example.com": {{"auth": "{0}", "{0}": ["{0}"]}}}}}}\n',
    "JSON of one value": '"{0}"\n',
    "JSON with a key twice": '{{"{0}": 1, "{0}": 2, "a": "{0}"}}\n',
    "JSON that is cut": '{{"auths": {{"auth": "{0}',
    "JSON lines": '{{"token": "{0}"}}\n{{"{0}": "{0}"}}\n',
    "a compose file": "services:\n  x:\n    environment: [TOKEN={0}]\n",
    "a secret of Kubernetes": "apiVersion: v1\nkind: Secret\ndata: {{token: {0}}}\n",
}


def texts(secret: str = SECRET) -> Iterator[tuple[str, bytes]]:
    for name, text in FOREIGN.items():
        filled = text.format(secret)
        yield name, filled.encode("latin-1" if name == "not UTF-8" else "utf-8")


def held_back(run: Callable[..., Any], *arguments: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(*arguments)
    said = found.out + found.err
    # a line may be broken anywhere
    assert SECRET not in "".join(said.split()), (arguments, said)
    assert "Traceback" not in said
    assert len(said) < 6000


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATTNREG_REGISTRY", raising=False)


# files of another kind -----------------------------------------------------------------------------------------------

READERS: dict[str, tuple[str, ...]] = {
    "x.yaml": ("check", "x.yaml"),
    "x.sh": ("check", "x.sh"),
    "overlay": ("check", "--overlay", "overlay"),
    "registry": ("explain", *ASK, "--registry", "registry"),
    "after": ("diff", "default", "after"),
    "lock": ("check", "--lock", "lock"),
    "config.json": ("explain", "--arch", "sm90", "--model", "config.json"),
    "directory/config.json": ("explain", "--arch", "sm90", "--model", "directory"),
    "samples": ("tune", "--from", "samples", "-o", "o.yaml"),
    "log": ("why", "log"),
}


@pytest.mark.parametrize("file", READERS)
def test_no_content_of_a_file_of_another_kind_is_printed(file: str, run: Callable[..., Any]) -> None:
    Path("directory").mkdir()
    for _, content in texts():
        Path(file).write_bytes(content)
        held_back(run, *READERS[file])


@pytest.mark.parametrize("kind", ["vocabulary", "backends", "priorities", "steps", "invariants", "release"])
def test_nor_of_one_in_the_place_of_a_file_of_a_registry(kind: str, run: Callable[..., Any]) -> None:
    write(Path("mine"))
    for _, content in texts():
        Path(f"mine/{kind}.yaml").write_bytes(content)
        held_back(run, "explain", *ASK, "--registry", "mine")


def test_nor_of_a_snapshot_and_of_families(run: Callable[..., Any]) -> None:
    write(Path("mine"))
    for _, content in texts():
        Path("mine/selections.yaml").write_bytes(content)
        held_back(run, "check", "--registry", "mine")
    Path("mine/selections.yaml").unlink()
    Path("mine/models").mkdir()
    for _, content in texts():
        for name in ("llama", "_sources"):
            Path(f"mine/models/{name}.yaml").write_bytes(content)
            held_back(run, "check", "--registry", "mine")
            Path(f"mine/models/{name}.yaml").unlink()


def test_nor_of_a_file_that_data_name(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("o.yaml").write_text("extends: below\n")
    Path("r.yaml").write_text("engine: vllm\narch: sm90\nmodel: below\ncommand: vllm serve m\n")
    run("lock", *ASK, "-o", "a.lock")
    lock = json.loads(Path("a.lock").read_text())
    Path("a.lock").write_text(json.dumps(lock | {"registry": "below"}))
    Path("b.lock").write_text(json.dumps(lock | {"overlays": ["below"]}))
    monkeypatch.setenv("ATTNREG_REGISTRY", "below")
    for _, content in texts():
        Path("below").write_bytes(content)
        for command in (("--overlay", "o.yaml"), ("--lock", "a.lock"), ("--lock", "b.lock"), ("r.yaml",), ()):
            held_back(run, "check", *command)


def test_nor_by_the_reader_of_yaml_that_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages quote words of the text."""
    monkeypatch.setattr(yaml_source, "_Loader", yaml.SafeLoader)
    kinds = [FileKind("thing", frozenset({"some"})), FileKind("recipe", frozenset({"a", "env"}), quoted=False)]
    said = []
    for name, content in texts():
        for kind in kinds if "twice" not in name else ():
            try:
                Document(content.decode("latin-1"), "f.yaml", kind)
            except RegistryError as error:
                said.append(str(error))
    assert len(said) > len(FOREIGN)
    assert SECRET not in "".join(said)


def test_nor_of_evidence(run: Callable[..., Any]) -> None:
    measured = {"of": "TRITON_ATTN", "over": "FLEX_ATTENTION", "ratio": 2.0, "noise": 1.0, "file": "samples"}
    order = {"name": "x", "when": {"arch": "sm90"}, "order": ["TRITON_ATTN", "FLEX_ATTENTION"], "measured": measured}
    Path("o.yaml").write_text(json.dumps({"orders": {"cuda": [order]}}))
    registry = attnreg.load_registry("default", "o.yaml")
    order_of = next(o for o in registry.orders["cuda"] if o.measured is not None and o.name == "x")
    assert order_of.measured is not None
    for name, content in texts():
        Path("samples").write_bytes(content)
        found = list(map(str, contradictions(registry, order_of, order_of.measured, read_samples)))
        assert found, name
        assert SECRET not in "".join(found)


# variables of the environment ----------------------------------------------------------------------------------------

RECIPES = {
    "a mapping": "env: {{TOKEN: {0}}}\n",
    "a known variable": "env: {{VLLM_BATCH_INVARIANT: {0}}}\n",
    "a variable that is gone": "env: {{VLLM_ATTENTION_BACKEND: {0}, VLLM_USE_V1: {0}}}\n",
    "a list as of compose": "env: [TOKEN={0}]\n",
    "a list of values": "env: [{0}]\n",
    "a list as of Kubernetes": "env:\n  - name: TOKEN\n    value: {0}\n",
    "a list of base64": "env: [{0}==]\n",
    "a text": "env: TOKEN={0}\n",
    "a text of a value": "env: {0}\n",
    "a block": "env: |\n  TOKEN={0}\n",
    "a variable twice": "env:\n  TOKEN: {0}\n  TOKEN: {0}\n",
    "a colon": "env:\n  TOKEN: a: {0}\n",
    "an open quote": "env: {{TOKEN: '{0}}}\n",
    "a tag": "env: {{TOKEN: !{0} x}}\n",
    "an alias": "env: {{TOKEN: *{0}}}\n",
    "an anchor within itself": "env: {{TOKEN: &{0} [*{0}]}}\n",
    "a merge": "env:\n  <<: {{TOKEN: {0}}}\n",
    "a control character": "env: {{TOKEN: {0}\x07}}\n",
    "an unknown key": "TOKEN: {0}\n",
    "a key that assigns": "TOKEN={0}: x\n",
    "a variable that assigns, twice": "env:\n  TOKEN={0}: x\n  TOKEN={0}: x\n",
    "an engine that assigns": "version: TOKEN='a {0}' token={0}\nmodel: TOKEN={0}\n",
    "an architecture that assigns": "env: {{A: TOKEN={0}}}\ncommand: vllm serve m --dtype TOKEN={0} -tp TOKEN={0}\n",
    "a model that is a list": "model: [{0}]\n",
    "an engine that is a mapping": "version: {{a: {0}}}\n",
    "args that are a text": "args: {0}\n",
    "a variable before the command": "command: TOKEN={0} vllm serve m --attention-backend NOPE\n",
    "a known one before the command": "command: VLLM_BATCH_INVARIANT={0} vllm serve m\n",
    "a command that does not end": "command: TOKEN={0} vllm serve 'm\n",
    "a variable of a container": "command: docker run -e TOKEN={0} --env=TOKEN={0} vllm/vllm-openai --dtype nope\n",
    "a default of a variable": "command: vllm serve m ${{TOKEN:-{0}}}\n",
    "a command within": "command: vllm serve m $(echo {0}) `echo {0}`\n",
    "a part of an option": "command: vllm serve m --kv-cache-dtype {0}$X --attention-backend ${{X:-{0}}}\n",
    "a number of an option": "command: vllm serve m -tp {0}$X --attention-config '{{{0}$X'\n",
    "options of nobody": 'args: [--api-key, {0}, --hf-overrides, \'{{"token": "{0}"}}\']\n',
}
SCRIPTS = {
    "an export": "export TOKEN={0}\nvllm serve m --attention-backend NOPE\n",
    "a known one": "export VLLM_BATCH_INVARIANT={0} VLLM_ATTENTION_BACKEND={0}\nvllm serve m\n",
    "before the command": "TOKEN={0} VLLM_BATCH_INVARIANT={0} vllm serve m --dtype nope\n",
    "with env": "env TOKEN={0} vllm serve m --dtype nope\n",
    "an open quote": "export TOKEN='{0}\nvllm serve m --dtype 'nope\n",
    "in another shell": "bash -c 'export TOKEN={0}; vllm serve m \"--dtype nope'\n",
    "a default": 'vllm serve m ${{TOKEN:-{0}}} "$(cat {0})" `echo {0}`\n',
    "part of a word": "vllm serve m Bearer-{0}-$X --kv-cache-dtype {0}$X\n",
    "a declaration": "declare -x VLLM_BATCH_INVARIANT={0}\nvllm serve m\n",
}


@pytest.mark.parametrize("name", [*RECIPES, *(f"script: {name}" for name in SCRIPTS)])
def test_no_value_of_a_variable_is_printed(name: str, run: Callable[..., Any]) -> None:
    if name in RECIPES:
        Path("r.yaml").write_text(f"engine: vllm\narch: sm90\n{RECIPES[name].format(SECRET)}")
        held_back(run, "check", "r.yaml")
        held_back(run, "check", "r.yaml", "--json")
        # one that names its model, and is judged
        Path("r.yaml").write_text(f"engine: vllm\narch: sm90\n{RECIPES[name].format(SECRET)}model: {LLAMA}\n")
        held_back(run, "check", "r.yaml")
        return
    Path("r.sh").write_text(SCRIPTS[name.removeprefix("script: ")].format(SECRET))
    held_back(run, "check", "r.sh")


def test_the_variable_and_its_place_are_named(run: Callable[..., Any]) -> None:
    said = {
        "env: [TOKEN=x, OTHER=y]\n": "r.yaml:2:6: env: expected a mapping of variables, got a list of TOKEN, OTHER",
        "env:\n  - {name: TOKEN, value: x}\n": "r.yaml:3:3: env: expected a mapping of variables, got a list of TOKEN",
        "env: TOKEN=x\n": "r.yaml:2:6: env: expected a mapping of variables, got a text of TOKEN",
        "env:\n  TOKEN: 1\n  TOKEN: 2\n": "r.yaml:4:3: `TOKEN` is given twice (first on line 3)",
        "TOKEN=x: y\n": "r.yaml:2:1: unknown key `TOKEN=…`",
        "model: [x]\n": "r.yaml:2:8: model: expected a text, got a list",
    }
    for text, message in said.items():
        Path("r.yaml").write_text(f"engine: vllm\n{text}")
        assert message in run("check", "r.yaml").err


# what is quoted ------------------------------------------------------------------------------------------------------


def test_files_of_our_own_kinds_are_quoted_and_cut(run: Callable[..., Any]) -> None:
    long = "x" * 5000
    Path("o.yaml").write_text("choices: [{deny: FLASHATTN}]\n")
    assert "    1 | choices: [{deny: FLASHATTN}]\n" in run("check", "--overlay", "o.yaml").err
    for text in (f"choices: {long}\n", f"choices: []\n{long[:900]}: 1\n", f"choices: [{{{long[:900]}: 1}}]\n"):
        Path("o.yaml").write_text(text)
        said = run("check", "--overlay", "o.yaml").err
        assert "x" * 20 in said
        assert "x" * (MAX_QUOTED + 1) not in said


LONG = "Lq7" * 2000
LONG_VALUES = {
    "extends": f"extends: {LONG}\nchoices: []\n",
    "a key": f"choices: []\n? {LONG}\n: 1\n",
    "a backend": f"choices: [{{deny: {LONG}}}]\n",
    "words": f"choices: [{{deny: '{'Lq7 ' * 2000}'}}]\n",
    "a facet": f"choices: [{{deny: FLASH_ATTN, when: {{? {LONG} : 1}}}}]\n",
    "a word": f"choices: [{{deny: FLASH_ATTN, when: {{arch: {LONG}}}}}]\n",
    "no integer": f"choices: [{{deny: FLASH_ATTN, when: {{head_size: {LONG}}}}}]\n",
    "an order": f"orders: {{cuda: [{{name: x, order: [{LONG}]}}]}}\n",
    "a platform": f"orders: {{? {LONG} : [{{name: x, order: [A]}}]}}\n",
    "a row": f"backends: {{? {LONG} : {{summary: x}}}}\n",
    "a key of a row": f"backends: {{TRITON_ATTN: {{? {LONG} : x}}}}\n",
    "a module": f"backends: {{TRITON_ATTN: {{module: {LONG}}}}}\n",
    "a claim": f"backends: {{TRITON_ATTN: {{capabilities: {{dtypes: [{LONG}]}}}}}}\n",
    "a source": f"backends: {{TRITON_ATTN: {{source: {LONG}}}}}\n",
    "a package": f"backends: {{TRITON_ATTN: {{requires: {{packages: [{LONG}]}}}}}}\n",
    "a place": f"place: [{{backend: TRITON_ATTN, before: {LONG}}}]\n",
    "a tag": f"choices: !{LONG} []\n",
    "an alias": f"choices: *{LONG}\n",
    "an invariant": f"invariants: [{{name: {LONG}, says: x, when: {{arch: {LONG}}}, never: {LONG}}}]\n",
    "no list": f"choices: {LONG}\n",
}


@pytest.mark.parametrize("text", LONG_VALUES.values(), ids=LONG_VALUES)
def test_a_long_value_is_cut_wherever_it_stands(text: str) -> None:
    Path("o.yaml").write_text(text)
    with pytest.raises(RegistryError) as caught:
        attnreg.load_registry("default", "o.yaml")
    for problem in caught.value.problems:
        assert max(len(problem.message), len(problem.help)) < 4 * MAX_QUOTED
        assert len(str(problem)) < 8 * MAX_QUOTED


def test_what_has_a_key_of_a_kind_is_of_it() -> None:
    kind = FileKind("thing", frozenset({"some", "other"}))
    for data in ({"some": 1}, {"a": 1, "other": None}):
        assert is_of(kind, data)
        assert is_of(kind, yaml.safe_dump(data))
        assert is_of(kind, json.dumps(data, indent=1))
        assert may_quote(kind, data)
        assert not may_quote(kind._replace(quoted=False), data)
    for data in (None, {}, [], "some", 1, {"a": {"some": 1}}, {"somes": 1}, ["some"]):
        assert not is_of(kind, data) or isinstance(data, str)
        assert not is_of(kind, yaml.safe_dump(data))
    assert is_of(kind._replace(within=True), {"a": [{"some": 1}]})
    assert is_of(kind, '{"a": 1, some: [')
    assert not is_of(kind, '{"a": {"some": ["')
    assert not is_of(kind, "# some: 1\nan other: 1\n  some: 1\nsome:1\n")
    # what nobody says a kind of is the caller's own
    assert may_quote(None, "anything")
    assert all(is_of(FileKind("file", frozenset(yaml.safe_load(text))), text) for text in FILES.values())


@pytest.mark.parametrize("text", ["{" + "a" * 10**6, "a" * 10**6, "{a: [" + "a " * 10**5, ("a" * 99 + "\n") * 9000])
@pytest.mark.parametrize("within", [False, True])
def test_what_is_no_key_takes_no_time(text: str, within: bool) -> None:
    begun = time.process_time()
    assert not is_of(FileKind("thing", frozenset({"some"}), within), text)
    assert with_cuts(f"`{text}` and {text}")
    assert time.process_time() - begun < 2


def test_words_are_cut_and_variables_named() -> None:
    assert cut("a" * MAX_QUOTED) == "a" * MAX_QUOTED
    assert len(cut("a" * 10_000)) < MAX_QUOTED
    assert of_shell("a-${X:-b}c$Y${Z}${ARGS[@]}$@") == "$X, $Y, ${Z}, ${ARGS[@]}, $@"
    assert of_shell("$(cat a) `b`") == "the output of a command"
    assert variables_of([f"A={SECRET}", SECRET, {"name": "B", "value": SECRET}, {"name": SECRET}, 1, None]) == [
        "A",
        "B",
    ]
    assert variables_of(f"A={SECRET}") == ["A"]
