"""A plugin for vLLM that lets a registry choose attention backends; it does nothing until it is switched on."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from attnreg.environment import REGISTRY_VARIABLE, VLLM_VARIABLE

if TYPE_CHECKING:
    from attnreg.integrations.vllm.decider import Decider
    from attnreg.registry import Registry

_METHOD = "get_attn_backend_cls"
# the attribute that marks a function of this plugin
_MARK = "decided_by_attnreg"


def register() -> None:
    """Lets a registry decide vLLM's automatic choice of attention backends, if $ATTNREG_VLLM names one.

    vLLM calls this in each of its processes, as the entry point ``attnreg`` of the group ``vllm.general_plugins``; a
    second call changes nothing. Where the variable is not set, empty or 0, vLLM stays as it is. 1 stands for
    $ATTNREG_REGISTRY, or else for the bundled registry of the vLLM that runs; any other value is a registry as
    `attnreg.load_registry` takes it, for example an overlay file.

    A backend that the user named (``--attention-backend``, ``backend_per_kind``) is left alone. What the registry
    chooses is handed to vLLM as if it had been named, so that vLLM validates it as well.

    Raises `RegistryError`, which stops vLLM, for a registry that cannot be read or that does not describe vLLM.
    """
    source = os.environ.get(VLLM_VARIABLE, "")
    if source in ("", "0"):
        return
    from vllm.platforms import current_platform

    from attnreg.integrations.vllm.decider import Decider
    from attnreg.integrations.vllm.registries import deciding_registry

    platform = type(current_platform)
    if hasattr(getattr(platform, _METHOD), _MARK):
        return
    decider = Decider(deciding_registry(source))
    _cache_by_role()
    _add_to_compile_key(decider.registry)
    _wrap(platform, decider)
    decider.announce(source)


def _wrap(platform: type, decider: Decider) -> None:
    """Replaces the platform's method: the decider answers calls that name no backend."""
    method = platform.__dict__.get(_METHOD)

    def get_attn_backend_cls(
        cls: type, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        ask = getattr(super(platform, cls), _METHOD) if method is None else method.__get__(None, cls)
        if selected_backend is None:
            return decider.decide(cls, attn_selector_config, num_heads, ask)
        path: str = ask(selected_backend, attn_selector_config=attn_selector_config, num_heads=num_heads)
        return path

    setattr(get_attn_backend_cls, _MARK, True)
    setattr(platform, _METHOD, classmethod(get_attn_backend_cls))


def _cache_by_role() -> None:
    """Gives draft models a cache of their own: vLLM caches answers by layer alone, whichever model it belongs to."""
    from vllm.v1.attention import selector

    from attnreg.integrations.vllm.layers import role

    name = "_cached_get_attn_backend"
    target: Any = getattr(selector, name, None)
    if hasattr(target, _MARK):
        return
    if not hasattr(target, "__wrapped__"):
        raise RuntimeError(
            f"attnreg does not know this version of vLLM: {selector.__name__}.{name} is no cached function. Unset "
            f"{VLLM_VARIABLE} to run without it."
        )
    draft = functools.cache(target.__wrapped__)

    def by_role(*args: Any, **kwargs: Any) -> Any:
        return (draft if role() == "draft" else target)(*args, **kwargs)

    def cache_clear() -> None:
        target.cache_clear()
        draft.cache_clear()

    # answers from before the registry decided
    target.cache_clear()
    vars(by_role).update({_MARK: True, "cache_clear": cache_clear})
    setattr(selector, name, by_role)


def _add_to_compile_key(registry: Registry) -> None:
    """Adds the registry to the key of vLLM's compile cache, and has Ray pass the variables on to its workers.

    Compiled code depends on the backends, and vLLM assumes that its own configuration determines them.
    """
    from vllm import envs

    envs.environment_variables[VLLM_VARIABLE] = lambda: registry.title
    # the registry's title identifies it already
    envs.environment_variables[REGISTRY_VARIABLE] = lambda: None
