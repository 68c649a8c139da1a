"""The registry that decides inside vLLM: the one that $ATTNREG_VLLM names, or the bundled one of the running vLLM."""

from __future__ import annotations

import os
from collections.abc import Callable

import attnreg
from attnreg.compile.inputs.bundled import bundled_overlays, help_for_registry, release_name
from attnreg.engines.vllm_requests import request_from_selector_row
from attnreg.environment import REGISTRY_VARIABLE, VLLM_VARIABLE
from attnreg.errors import Location, Problem
from attnreg.selection.point import point_of

# attnreg's own backend: the name of its row, which is also its name in vLLM; and its class
NAME = "ATTNREG"
CLASS_PATH = "attnreg.integrations.vllm.backend.AttnregBackend"
# the value of the variable that puts attnreg's own backend into vLLM's order
OWN_BACKEND = "attnreg"


def deciding_registry(source: str, unusable: Callable[[], str] = str) -> attnreg.Registry:
    """The registry of the variable's value; it declares every facet in which the plugin describes a layer.

    unusable: returns the reason why attnreg's own backend cannot be used here, or "". With a reason the registry denies
    the backend.
    """
    if source == OWN_BACKEND:
        name = attnreg_overlay()
    elif source != "1":
        name = source
    else:
        name = os.environ.get(REGISTRY_VARIABLE) or _bundled()
    registry = attnreg.load_registry(name)
    if NAME in registry.backends and (because := unusable()):
        registry = attnreg.load_registry(name, {"choices": [{"deny": NAME, "because": because}]})
    _check_facets(registry)
    _check_choices(registry)
    return registry


def is_bundled(source: str) -> bool:
    """Whether a value of the variable stands for a registry bundled for the running vLLM, without naming one."""
    return source == OWN_BACKEND or (source == "1" and not os.environ.get(REGISTRY_VARIABLE))


def refuse_where_required(registry: attnreg.Registry | None, moved: list[str]) -> None:
    """Raises `RegistryError` for a choice that requires attnreg's backend, if vLLM's interfaces have ``moved``."""
    for choice in registry.choices if registry else ():
        if choice.strength == "require" and NAME in choice.backends:
            message = f"{NAME} is required, and this vLLM is not the one that it is written for: {'; '.join(moved)}"
            raise attnreg.RegistryError([Problem(choice.where, message, "prefer it, and vLLM runs without it")])


def _bundled() -> str:
    """The name of the bundled registry for the running vLLM. Raises `RegistryError` if there is none."""
    import vllm

    name, bundled = release_name(f"vllm-{vllm.__version__.partition('+')[0]}"), attnreg.bundled_registries()
    if name not in bundled:
        cure = f"set {VLLM_VARIABLE} to another, or to an overlay; {help_for_registry(name)}"
        raise _problem(f"${VLLM_VARIABLE}", f"there is no bundled registry for vLLM {vllm.__version__}", cure)
    return name


def attnreg_overlay() -> str:
    """The name of the bundled overlay with attnreg's backend. Raises `RegistryError` if this vLLM has none."""
    name, overlays = f"{_bundled()}+{OWN_BACKEND}", bundled_overlays()
    if name not in overlays:
        there = ", ".join(overlays)
        raise _problem(f"${VLLM_VARIABLE}", f"attnreg's backend is not written for {name}", f"there is {there}")
    return name


def _check_facets(registry: attnreg.Registry) -> None:
    """Raises `RegistryError` for a registry that lacks a facet in which the plugin describes a layer."""
    layer = {"head_size": 128, "dtype": "bfloat16", "run_kv_cache_dtype": "auto", "flash_attn_version": 2}
    model = {"num_heads": 8, "attn_type": "decoder"}
    row = {**layer, "use_trtllm_attention": False, "model": model, "platform": "cuda", "arch": "sm90"}
    try:
        point_of(*request_from_selector_row(row), registry)
    except attnreg.RequestError as e:
        engines = ", ".join(name for name in attnreg.bundled_registries() if name.startswith("vllm-"))
        cure = f"a registry that decides for vLLM extends one of: {engines}"
        raise _problem(registry.files[-1], f"{registry.title} does not describe vLLM: {e}", cure) from None


def _check_choices(registry: attnreg.Registry) -> None:
    """Raises `RegistryError` for a choice or an order's entry that names a variant.

    vLLM takes the name of a backend, and picks the variant itself.
    """
    entries = (entry for orders in registry.orders.values() for order in orders for entry in order.entries)
    named = [(name, choice.where) for choice in registry.choices for name in choice.backends]
    for name, where in (*named, *((entry.backend, entry.where) for entry in entries)):
        if name not in registry.backends:
            message = f"{name} names a variant, and vLLM chooses the variant of a backend itself"
            backend = name.partition("/")[0]
            raise attnreg.RegistryError([Problem(where, message, f"name {backend}, or use vLLM's own options")])


def _problem(file: str, message: str, cure: str) -> attnreg.RegistryError:
    return attnreg.RegistryError([Problem(Location(file, 1, 1), message, cure)])
