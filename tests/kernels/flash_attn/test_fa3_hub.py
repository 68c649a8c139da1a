"""FLASH_ATTN/FA3-hub against a stand-in for the package `kernels`, over a cache that lies as huggingface_hub has it."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.stand_ins import fake_aiter, fake_varlen

from attnreg import AttentionRequest, Platform, Registry
from attnreg.conformance.verify import verify
from attnreg.kernels.flash_attn import record
from attnreg.kernels.flash_attn.hub import HubKernel
from attnreg.kernels.triton import cache
from attnreg.kernels.upstream import UpstreamError
from attnreg.loader import unloadable
from attnreg.selection.selector import evaluate

MODULE = "attnreg.kernels.flash_attn.fa3_hub"
H200 = Platform(
    platform="cuda", arch="sm90", packages=(("torch", "2.13"), ("triton", ""), ("kernels", "0.17.2"))
)  # fmt: skip
# a repository of the hub, the namespace of its operators (each build has one of its own), and what it registers
BUILDS: dict[str, tuple[str, str, Any]] = {
    record.HUB_VLLM_FA3.repo: ("_vllm_flash_attn3_5b1a", fake_varlen.FA3_VLLM, fake_varlen.fa3),
    record.HUB_FA3.repo: ("_flash_attn3_c0de", fake_varlen.FA3_OWN, fake_varlen.fa3_own),
}
Install = Callable[..., list[tuple[str, str]]]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Install]:
    """Fills the cache with the builds that a test names; returns what is loaded, each with its commit."""
    sys.modules.pop(MODULE, None)
    monkeypatch.setattr(cache, "_write", fake_aiter.write)
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path))
    loaded: list[tuple[str, str]] = []

    def load_kernel(repo_id: str, *, lockfile: Path | None, backend: str | None = None) -> Any:
        assert lockfile is not None
        (lock,) = json.loads(lockfile.read_text())
        assert lock["dependency"] == {"repo-id": repo_id, "version": 1}
        commit = lock["lock"]["commit"]
        folder = tmp_path / f"kernels--{repo_id.replace('/', '--')}" / "snapshots" / commit
        if not (folder / "build").is_dir():
            raise FileNotFoundError(f"Cannot find a build variant for this system in {repo_id}\n\na trace")
        loaded.append((repo_id, commit))
        return SimpleNamespace(_ops=SimpleNamespace(ops=getattr(torch.ops, BUILDS[repo_id][0])))

    package = ModuleType("kernels")
    vars(package)["load_kernel"] = load_kernel
    monkeypatch.setitem(sys.modules, "kernels", package)
    with ExitStack() as stack:

        def fill(*repos: str, schema: Callable[[str], str] = str) -> list[tuple[str, str]]:
            for repo in repos:
                (tmp_path / f"kernels--{repo.replace('/', '--')}" / "snapshots" / "a1" / "build").mkdir(parents=True)
                namespace, words, function = BUILDS[repo]
                stack.enter_context(fake_varlen.registered(namespace, schema(words), "fwd", function))
            return loaded

        yield fill
    sys.modules.pop(MODULE, None)


@pytest.mark.parametrize("repo", BUILDS)
def test_every_claim_holds(install: Install, repo: str) -> None:
    loaded = install(repo)
    importlib.import_module(MODULE)
    (evidence,) = verify(["FLASH_ATTN/FA3-hub"], platform=H200, device="cpu", size="claims")
    assert (evidence.problems, evidence.undecided) == ([], [])
    assert {"sinks", "lse", "softcap", "sliding_window", "non_causal"} <= evidence.claims["features"].keys()
    assert loaded == [(repo, "a1")]


def test_vllms_build_is_taken_first(install: Install) -> None:
    install(*BUILDS)
    assert importlib.import_module(MODULE).build.more == record.FA3_OF_VLLM


def test_nothing_in_the_cache_is_a_reason(install: Install, default: Registry) -> None:
    loaded = install()
    words = (
        r"kernels-community/vllm-flash-attn3 is not in the hub's cache \(.*\), and nothing is downloaded; kernels-com"
    )
    with pytest.raises(UpstreamError, match=words):
        importlib.import_module(MODULE)
    assert loaded == []
    request = AttentionRequest(head_size=64, num_heads=4, num_kv_heads=2, block_size=16)
    refused = evaluate(request, H200, default, "FLASH_ATTN/FA3-hub", unloadable=unloadable).candidates[0]
    assert "nothing is downloaded" in refused.reasons[0].text


def test_the_commit_of_the_version_is_taken(tmp_path: Path) -> None:
    """And where the cache has no name for it, the commit that was added last."""
    kernel = HubKernel("owner/name", 3)
    folder = tmp_path / "kernels--owner--name"
    for age, commit in enumerate(("c2", "a1", "b3")):
        (folder / "snapshots" / commit).mkdir(parents=True)
        os.utime(folder / "snapshots" / commit, (100 - age, 100 - age))
    assert kernel.commit(tmp_path) == "c2"
    (folder / "refs").mkdir()
    (folder / "refs" / "v3").write_text("b3\n")
    assert kernel.commit(tmp_path) == "b3"
    # a name whose snapshot was removed
    (folder / "refs" / "v3").write_text("d4\n")
    assert kernel.commit(tmp_path) == "c2"


def test_a_kernel_that_has_no_build_for_this_machine_is_a_reason(install: Install, tmp_path: Path) -> None:
    install(record.HUB_FA3.repo)
    (tmp_path / "kernels--kernels-community--flash-attn3" / "snapshots" / "a1" / "build").rmdir()
    words = r"flash-attn3 cannot be loaded: FileNotFoundError: Cannot find a build variant for this system in [\w/-]+$"
    with pytest.raises(UpstreamError, match=words):
        importlib.import_module(MODULE)


def test_a_changed_schema_is_a_reason(install: Install) -> None:
    install(record.HUB_FA3.repo, schema=lambda words: words.replace("softcap", "soft_cap"))
    words = r"kernels-community/flash-attn3's fwd has no parameter `softcap` any more \(version 1 was read\)"
    with pytest.raises(UpstreamError, match=words):
        importlib.import_module(MODULE)


def test_a_loader_that_changed_is_a_reason(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(*BUILDS)
    monkeypatch.setattr(sys.modules["kernels"], "load_kernel", lambda repo_id, path: None)
    with pytest.raises(
        UpstreamError, match=r"kernels's load_kernel has no parameter `lockfile` any more, and now requ"
    ):
        importlib.import_module(MODULE)


def test_it_runs_where_it_is_named(install: Install, default: Registry) -> None:
    install(*BUILDS)
    request = AttentionRequest(head_size=72, num_heads=4, num_kv_heads=2, block_size=16)
    named = evaluate(request, H200, default, "FLASH_ATTN/FA3-hub", unloadable=unloadable).chosen
    assert named is not None
    assert named.title == "FLASH_ATTN/FA3-hub"
    automatic = evaluate(request, H200, default, unloadable=unloadable)
    assert automatic.chosen is not None
    assert automatic.chosen.name != "FLASH_ATTN"
    assert any("no GPU has run it yet" in r.text for r in automatic.candidates[0].reasons)
