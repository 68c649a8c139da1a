"""The records of FlashInfer and FlashAttention 4, held against the packages that the stacks of tox.toml install."""

from __future__ import annotations

import os
import re
import tomllib
from inspect import Parameter

import pytest
import torch
import yaml
from support import ROOT
from support.stand_ins.installed import stand_in, version_of

from attnreg.kernels.flash_attn import record as flash_attn
from attnreg.kernels.flashinfer import record as flashinfer
from attnreg.kernels.sdpa import record as sdpa
from attnreg.kernels.upstream import Function, UpstreamOperator

TOX = tomllib.loads((ROOT / "tox.toml").read_text(encoding="utf-8"))
# a method and its class, or a function
RECORDS: dict[str, list[tuple[Function, Function | None]]] = {
    "flashinfer-python": [
        (flashinfer.TRTLLM_RAGGED, None),
        (flashinfer.TRTLLM_CONTEXT, None),
        (flashinfer.TRTLLM_MLA, None),
        (flashinfer.XQA, None),
        (flashinfer.WRAPPER, None),
        (flashinfer.PLAN, flashinfer.WRAPPER),
        (flashinfer.PLAN_MHA, flashinfer.WRAPPER),
        (flashinfer.RUN, flashinfer.WRAPPER),
        (flashinfer.PAGED_WRAPPER, None),
        (flashinfer.PAGED_PLAN, flashinfer.PAGED_WRAPPER),
        (flashinfer.PAGED_RUN, flashinfer.PAGED_WRAPPER),
    ],
    "flash-attn-4": [(flash_attn.FA4, None)],
}
CASES = [
    pytest.param(package, function, owner, id=f"{package}, {(owner or function).modules[0]}.{function.name}")
    for package, pairs in RECORDS.items()
    for function, owner in pairs
]
OPERATORS = [sdpa.FLASH, sdpa.CUDNN, sdpa.EFFICIENT]
VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def pinned(stack: str) -> dict[str, str]:
    """Package -> version of what a stack pins."""
    pins = [pin for pin in TOX["env"].get(stack, {}).get("deps", ()) if isinstance(pin, str)]
    return dict(pin.split("==") for pin in pins)


def read(function: Function) -> str:
    """The release of a package that a record was read at."""
    found = re.search(r"/blob/v([^/]+)/|/flash-attn-4/([^/]+)$", function.source)
    assert found, function.source
    return found[1] or found[2]


def installed(package: str) -> str:
    """The version of a package. A stack that pins it has it; elsewhere its tests are skipped."""
    version = version_of(package)
    here = pinned(os.environ.get("TOX_ENV_NAME", "")).get(package)
    if here is None and version is None:
        stacks = ", ".join(name for name in TOX["env"] if package in pinned(name))
        pytest.skip(f"{package} is not installed; the stacks that have it: {stacks}")
    assert here in (None, version)
    assert version
    return version


@pytest.mark.parametrize(("package", "function", "owner"), CASES)
def test_an_installed_function_is_as_recorded(package: str, function: Function, owner: Function | None) -> None:
    version = installed(package)
    found = stand_in(function, owner)
    assert [*function.changes(found)] == []
    if version == read(function):
        parameters = [p.name for p in found.__signature__.parameters.values() if p.kind not in VARIABLE]  # type: ignore[attr-defined]
        assert {*parameters} == {*function.passes, *function.defaults}


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda o: o.name)
def test_an_operator_of_this_pytorch_has_no_parameter_beside_the_recorded(operator: UpstreamOperator) -> None:
    """One that the record has may be missing: torch 2.11's flash attention has no `num_splits`."""
    parameters = {argument.name for argument in operator.load()._schema.arguments}  # type: ignore[attr-defined]
    assert parameters <= {*operator.passes, *operator.defaults}
    if torch.__version__.partition("+")[0] == read(operator):
        assert parameters == {*operator.passes, *operator.defaults}


def test_the_newest_stack_has_the_releases_that_were_read() -> None:
    newest = pinned("newest")
    for package, pairs in RECORDS.items():
        assert {read(function) for function, _ in pairs} == {newest[package]}
    assert {read(operator) for operator in OPERATORS} == {newest["torch"]}
    sources = yaml.safe_load((ROOT / "registry/backends.yaml").read_text(encoding="utf-8"))["sources"]
    assert sources["flashinfer"]["version"] == newest["flashinfer-python"]
    assert sources["pytorch"]["version"] == newest["torch"]
