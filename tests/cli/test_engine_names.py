"""Engines and GPUs by the names that people use: which release answers, and which GPU the title names."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from attnreg import load_registry

ASK = ("explain", "--head-size", "128", "--brief")
OWN = "note: these are attnreg's own kernels: for an engine's choice give --engine vllm or --engine sglang"


def title(run: Callable[..., Any], *words: str) -> str:
    """The title of an answer."""
    return str(json.loads(run("explain", "--head-size", "128", *words, "--json").out)["title"])


@pytest.fixture(autouse=True)
def no_engine_here(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The engines that are installed: none, until a test adds one."""
    versions: dict[str, str] = {}
    found = importlib.metadata.version

    def version(name: str) -> str:
        if name not in ("vllm", "sglang"):
            return found(name)
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return versions


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm", "vLLM 0.33.0 (data "),
        ("vllm-0.31", "vLLM 0.31.0 (data "),
        ("vllm-0.33.0+attnreg", "vLLM 0.33.0 + attnreg (data "),
        ("sglang", "SGLang 0.5.23 (data "),
        ("VLLM", "vLLM 0.33.0 (data "),
        ("vllm 0.31", "vLLM 0.31.0 (data "),
        ("vLLM==0.31.0", "vLLM 0.31.0 (data "),
        ("vllm-v0.31", "vLLM 0.31.0 (data "),
        ("SGLang 0.5.14", "SGLang 0.5.14 (data "),
        # a local version is the release that it is built from, and a number is a release of the one engine that has it
        ("vllm-0.33.0+cu130", "vLLM 0.33.0 (data "),
        ("vllm==0.31.0+cu129.g1a2b3c4", "vLLM 0.31.0 (data "),
        ("v0.31.0", "vLLM 0.31.0 (data "),
        ("0.31", "vLLM 0.31.0 (data "),
        ("0.5.14+cpu", "SGLang 0.5.14 (data "),
    ],
)
def test_the_title_names_the_engine_and_its_release(run: Callable[..., Any], engine: str, words: str) -> None:
    assert f" · {words}" in title(run, "--engine", engine, "--arch", "sm90")


def test_without_an_engine_the_title_names_attnregs_own_kernels(run: Callable[..., Any]) -> None:
    told = run(*ASK, "--arch", "sm90")
    assert "attnreg's own kernels" in told.out
    assert OWN in told.out.splitlines()
    # whoever names a registry has chosen
    assert OWN not in run(*ASK, "--arch", "sm90", "--registry", "default").out
    assert OWN not in run(*ASK, "--arch", "sm90", "--engine", "vllm").out


def test_an_engine_that_is_installed_is_offered(run: Callable[..., Any], no_engine_here: dict[str, str]) -> None:
    no_engine_here["vllm"] = "0.31.2"
    note = "note: vLLM 0.31.2 is installed here: for its choice give --engine vllm-0.31.0"
    for words in ((), ("--engine", "vllm")):
        assert note in run(*ASK, "--arch", "sm90", *words).out.splitlines()
    for engine in ("vllm-0.31", "vllm-0.33", "sglang"):
        assert "is installed here" not in run(*ASK, "--arch", "sm90", "--engine", engine).out


@pytest.mark.parametrize(
    ("engine", "version", "said"),
    [
        ("vllm", "0.99.0", "which is newer than any table: that of vllm-0.33.0 {}"),
        ("vllm", "0.33.1.dev4+cu129", "which is newer than any table: that of vllm-0.33.0 {}"),
        ("sglang", "0.5.24", "which is newer than any table: that of sglang-0.5.23 {}"),
        ("sglang", "0.5.13", "and no table of attnreg is about it"),
        ("vllm", "0.19.1", "and no table of attnreg is about it"),
        ("vllm", "unknown", "and no table of attnreg is about it"),
    ],
)
def test_a_release_that_no_table_is_about_is_named(
    run: Callable[..., Any], no_engine_here: dict[str, str], engine: str, version: str, said: str
) -> None:
    no_engine_here[engine] = version
    table = re.findall(r"\S+-\d\S+", said)
    for words, cure in ((("--engine", engine), "answers"), ((), f"is the newest: give --engine {''.join(table)}")):
        lines = " ".join(run(*ASK, "--arch", "sm90", *words).out.split())
        assert f"{version} is installed here, {said.format(cure)}" in lines


@pytest.mark.parametrize(
    ("engine", "version", "table"),
    [
        ("sglang", "0.5.20.post1", "sglang-0.5.20"),
        ("vllm", "0.32.0rc1", "vllm-0.32.0"),
        ("vllm", "0.27.1", "vllm-0.27.0"),
    ],
)
def test_an_installed_patch_or_candidate_has_the_table_of_its_release(
    run: Callable[..., Any], no_engine_here: dict[str, str], engine: str, version: str, table: str
) -> None:
    no_engine_here[engine] = version
    assert f"is installed here: for its choice give --engine {table}\n" in run(*ASK, "--arch", "sm90").out


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("--engine", "vlm"), "--engine vlm: no release of an engine has that name", "did you mean `vllm`?"),
        (
            ("--engine", "vllm-0.19"),
            "--engine vllm-0.19: there is no table of vLLM 0.19\n",
            "the nearest is `vllm-0.20.0`",
        ),
        (("--engine", "default"), "--engine default names no engine", "leave it out"),
        (("--engine", "."), "--engine . is a file or a directory", "give --registry ."),
        (("--engine", "vllm", "--registry", "vllm-0.33"), "--engine and --registry both", "give one of them"),
    ],
)
def test_what_is_no_engine_is_refused(run: Callable[..., Any], words: tuple[str, ...], message: str, hint: str) -> None:
    done = run(*ASK, "--arch", "sm90", *words)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"attnreg: {message}")
    assert hint in done.err


@pytest.mark.parametrize("command", ["list", "show FLASH_ATTN", "lock --arch sm90 --head-size 128", "doctor"])
def test_every_command_of_a_registry_takes_an_engine(run: Callable[..., Any], command: str) -> None:
    assert run(*command.split(), "--engine", "vllm-0.33").out == run(*command.split(), "--registry", "vllm-0.33").out


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("L40S", "CUDA sm89 (L40S)"),
        ("rtx4090", "CUDA sm89 (RTX 4090)"),
        ("RTX 4090 D", "CUDA sm89 (RTX 4090 D)"),
        ("NVIDIA H100 80GB HBM3", "CUDA sm90 (H100)"),
        ("H200", "CUDA sm90 (H200)"),
        ("GB200", "CUDA sm100 (GB200)"),
        ("A10G", "CUDA sm86 (A10G)"),
        ("AMD Instinct MI355X", "ROCm gfx950 (MI355X)"),
        # labels of Kubernetes' nodes
        ("AMD_Instinct_MI300X_OAM", "ROCm gfx942 (MI300X)"),
        ("AMD_Instinct_MI355X_OAM", "ROCm gfx950 (MI355X)"),
        ("AMD_Radeon_PRO_W7900_Dual_Slot", "ROCm gfx1100 (PRO W7900)"),
        ("NVIDIA-H100-80GB-HBM3", "CUDA sm90 (H100)"),
        ("NVIDIA-H100-80GB-HBM3-SHARED", "CUDA sm90 (H100)"),
        ("NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition", "CUDA sm120 (RTX PRO 6000)"),
        ("nvidia-h100-mega-80gb", "CUDA sm90 (H100)"),
        ("sm90", "CUDA sm90 (H100, …)"),
        ("9.0", "CUDA sm90 (H100, …)"),
        ("Strix Halo", "ROCm gfx1151 (Strix Halo)"),
        ("A770", "XPU xe_hpg (A770)"),
    ],
)
def test_the_title_names_the_gpu_that_was_asked(run: Callable[..., Any], named: str, words: str) -> None:
    assert f" · {words} · " in title(run, "--arch", named)


def test_products_with_one_answer_are_all_named(run: Callable[..., Any]) -> None:
    two = json.loads(run("explain", "--engine", "vllm", "--arch", "A10G", "--arch", "RTX 3090", "--json").out)
    assert " · CUDA sm86 (A10G, RTX 3090) · " in two["title"]
    assert len(two["answers"]) == 1
    one = title(run, "--arch", "A10G", "--arch", "sm86", "--arch", "A10G", "--arch", "h100")
    assert " · CUDA sm86 (A10G), sm90 (H100) · " in one


def test_a_product_is_its_architecture_and_its_device(run: Callable[..., Any]) -> None:
    one = json.loads(run(*ASK[:-1], "--arch", "h20", "--json").out)
    other = json.loads(run(*ASK[:-1], "--arch", "sm90", "--device-name", "H20", "--json").out)
    assert {**one, "command": ""} == {**other, "command": ""}
    assert one["answers"][0]["selections"][0]["platform"]["device"] == "H20"
    # a card with fewer processors is not the device that is called alike, and a part of a device is none
    for named in ("RTX 4090 D", "NVIDIA H100 MIG 1g.10gb"):
        data = json.loads(run(*ASK[:-1], "--arch", named, "--json").out)
        assert "device" not in data["answers"][0]["selections"][0]["platform"]


@pytest.mark.parametrize("arch", ["gfx1101", "gfx1103", "gfx1150", "gfx1151", "sm107", "MI455X", "xe3", "A770"])
@pytest.mark.parametrize("engine", [(), ("--engine", "vllm"), ("--engine", "sglang")])
def test_an_architecture_that_no_table_was_read_for_is_not_known(
    run: Callable[..., Any], arch: str, engine: tuple[str, ...]
) -> None:
    done = run(*ASK, "--arch", arch, *engine)
    assert done.status == 3
    assert "not known" in done.out
    whole = run(*ASK[:-1], "--arch", arch, *engine)
    assert "? not known" in whole.out
    assert " says nothing of " in whole.out


@pytest.mark.parametrize(
    ("words", "title"),
    [
        (["--from", "0.32"], "vllm-0.32.0@… → vllm-0.33.0@…"),
        (["--from", "v0.32.0", "--to", "0.33"], "vllm-0.32.0@… → vllm-0.33.0@…"),
        (["--from", "vllm-0.32"], "vllm-0.32.0@… → vllm-0.33.0@…"),
        (["--from", "0.5.14", "--to", "sglang"], "sglang-0.5.14@… → sglang-0.5.23@…"),
    ],
)
def test_an_upgrade_takes_releases_without_their_engine(run: Callable[..., Any], words: list[str], title: str) -> None:
    told = run("upgrade", *words, "--arch", "sm90", "--head-size", "128").out.splitlines()[0]
    assert re.sub(r"@\w+", "@…", told).startswith(title)


@pytest.mark.parametrize(
    ("words", "message", "help_"),
    [
        (["--from", "0.19"], "there is no table of a release 0.19", "the nearest are sglang-0.5.23 and vllm-0.20.0"),
        (["--from", "0.19", "--to", "sglang"], "there is no table of SGLang 0.19", "the nearest is `sglang-0.5.23`"),
        (["--from", "0"], "0 is a release of sglang and of vllm", "give the engine too, such as sglang-0"),
        (["--from", "vllm-0.32", "--to", "0.5.14"], "are releases of two engines", "attnreg diff"),
    ],
)
def test_a_release_of_no_engine_or_of_several_is_refused(
    run: Callable[..., Any], words: list[str], message: str, help_: str
) -> None:
    told = run("upgrade", *words)
    assert told.status == 2
    assert message in told.err
    assert help_ in told.err


@pytest.mark.parametrize(("name", "near"), [("0.33.0rc1", "vllm-0.33.0"), ("v0.5.19b1", "sglang-0.5.19")])
def test_a_candidate_is_of_the_engine_that_has_the_release(run: Callable[..., Any], name: str, near: str) -> None:
    refused = run("explain", "--engine", name, "--arch", "sm90", "--head-size", "128")
    assert refused.status == 2
    assert "is no release" in refused.err
    assert f"the nearest release is `{near}`" in refused.err


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("vllm-0.33.0rc1", "vllm-0.33.0"),
        ("vLLM 0.31.0rc2", "vllm-0.31.0"),
        ("vllm-0.33.1.dev4+g1a2b3c4.cu130", "vllm-0.33.0"),
        ("vllm-0.34.0.dev12", "vllm-0.33.0"),
        ("vllm==0.22.1-rc1", "vllm-0.22.1"),
        ("sglang-0.5.19b1", "sglang-0.5.19"),
    ],
)
def test_what_is_built_before_a_release_is_none(run: Callable[..., Any], name: str, near: str) -> None:
    for words in (("explain", "--engine", name), ("explain", "--registry", name), ("upgrade", "--from", name)):
        refused = run(*words, "--arch", "sm90", "--head-size", "128")
        assert (refused.status, refused.out) == (2, "")
        assert "is no release, and what it changes is in no table" in refused.err
        assert refused.err.endswith(f"help: the nearest release is `{near}`\n")


def test_a_word_after_a_plus_is_an_overlay_or_a_build(run: Callable[..., Any]) -> None:
    assert " + attnreg " in title(run, "--engine", "vllm-0.33.0+attnreg", "--arch", "sm90")
    for label in ("atnreg", "mine", "cu"):
        assert run(*ASK, "--arch", "sm90", "--engine", f"vllm-0.33.0+{label}").status == 2
    assert load_registry("vllm-0.33.0+cu130").name == "vllm-0.33.0"


@pytest.mark.parametrize(
    ("before", "after", "compared"),
    [
        ("vllm-0.22", "vllm-0.22.1", ("vllm-0.22.0", "vllm-0.22.1")),
        ("0.22", "0.22.0", ("vllm-0.22.1", "vllm-0.22.0")),
        ("vllm-0.22.1", "vLLM 0.22", ("vllm-0.22.1", "vllm-0.22.0")),
        ("vllm-0.22", "vllm-0.23", ("vllm-0.22.1", "vllm-0.23.0")),
        ("vllm-0.22", "vllm-0.22", ("vllm-0.22.1", "vllm-0.22.1")),
        ("vllm-0.33", "vllm-0.33.0+cu130", ("vllm-0.33.0", "vllm-0.33.0")),
    ],
)
def test_a_minor_release_is_not_the_patch_release_beside_it(
    run: Callable[..., Any], before: str, after: str, compared: tuple[str, str]
) -> None:
    for words in (("upgrade", "--from", before, "--to", after), ("diff", before, after)):
        out = run(*words, "--arch", "sm90", "--head-size", "128").out
        assert tuple(name.partition("@")[0] for name in out.split()[0:3:2]) == compared
        assert ("compared with itself" in out) is (compared[0] == compared[1])
