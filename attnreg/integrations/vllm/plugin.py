"""A plugin for vLLM: a registry chooses attention backends, attnreg's own among them. It is off until switched on."""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnreg.environment import REGISTRY_VARIABLE, VLLM_VARIABLE

if TYPE_CHECKING:
    from attnreg.integrations.vllm.decider import Decider
    from attnreg.registry import Registry

_METHOD = "get_attn_backend_cls"
_CACHED = "_cached_get_attn_backend"
# the attribute that marks a function of this plugin
_MARK = "decided_by_attnreg"


def register() -> None:
    """Lets a registry decide vLLM's automatic choice of attention backends, if $ATTNREG_VLLM names one.

    vLLM calls this in each of its processes, as the entry point ``attnreg`` of the group ``vllm.general_plugins``. A
    second call changes nothing. If the variable is not set, empty or 0, vLLM stays as it is. 1 stands for
    $ATTNREG_REGISTRY, or else for the bundled registry of the running vLLM. ``attnreg`` is the bundled registry with
    a row for attnreg's own backend. Any other value is a registry as `attnreg.load_registry` takes it, for example an
    overlay file.

    A backend that the user named (``--attention-backend``, ``backend_per_kind``) is left alone. The plugin hands the
    registry's choice to vLLM as if the user had named it, so vLLM validates it too. If the registry has a row for
    attnreg's own backend, the backend is registered under that row's name.

    In a vLLM whose interfaces differ from the recorded ones, the plugin does nothing but log that. Raises
    `RegistryError`, which stops vLLM, for a registry that cannot be read, that does not describe vLLM, or that requires
    attnreg's backend in such a vLLM. All that can fail is done before anything is changed.
    """
    source = os.environ.get(VLLM_VARIABLE, "")
    if source in ("", "0"):
        return
    from vllm.platforms import current_platform

    from attnreg.integrations.vllm.claims import decide_by
    from attnreg.integrations.vllm.decider import Decider
    from attnreg.integrations.vllm.kernels import why_unusable
    from attnreg.integrations.vllm.record import moved_interfaces
    from attnreg.integrations.vllm.registries import NAME, deciding_registry, is_bundled, refuse_where_required

    platform = type(current_platform)
    if hasattr(getattr(platform, _METHOD, None), _MARK):
        return
    moved = moved_interfaces()
    # a bundled registry requires no backend, and a release with other interfaces may have none
    registry = None if moved and is_bundled(source) else deciding_registry(source, why_unusable)
    if moved:
        refuse_where_required(registry, moved)
        _step_aside(moved)
        return
    assert registry is not None
    # vLLM has started already, so the steps of its start are over: it asks the selector alone
    registry = replace(registry, steps=())
    decider = Decider(registry, source)
    decide_by(registry)
    if NAME in registry.backends:
        own_backend()
    _cache_by_role()
    _add_to_compile_key(registry)
    _wrap(platform, decider)


def _step_aside(moved: list[str]) -> None:
    import vllm

    from attnreg.integrations.vllm.record import VERSION

    # vLLM's logger may not be set up yet; a warning is printed all the same
    logging.getLogger("vllm.attnreg").warning(
        "attnreg: steps aside, and vLLM %s runs as without it: it was written for vLLM %s, since when %s",
        *(vllm.__version__, VERSION, "; ".join(moved)),
    )


def own_backend() -> Any:
    """attnreg's backend as a member of vLLM's enumeration, registered by vLLM's own functions.

    The member is pickled as a call of this function. Other processes, to which vLLM sends its configuration, may not
    have loaded their plugins yet: their enumeration lacks the member.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from attnreg.integrations.vllm.registries import CLASS_PATH, NAME

    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, CLASS_PATH)
    member = AttentionBackendEnum.__members__[NAME]
    member.__reduce_ex__ = _as_call
    return member


def _as_call(protocol: int) -> tuple[Any, ...]:
    return own_backend, ()


def _wrap(platform: type, decider: Decider) -> None:
    """Replaces the platform's method: the decider answers calls that name no backend."""
    method = platform.__dict__.get(_METHOD)

    def get_attn_backend_cls(
        cls: type, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        decider.announce()
        ask = getattr(super(platform, cls), _METHOD) if method is None else method.__get__(None, cls)
        if selected_backend is None:
            return decider.decide(cls, attn_selector_config, num_heads, ask)
        path: str = ask(selected_backend, attn_selector_config=attn_selector_config, num_heads=num_heads)
        return path

    setattr(get_attn_backend_cls, _MARK, True)
    setattr(platform, _METHOD, classmethod(get_attn_backend_cls))


def _cache_by_role() -> None:
    """Gives draft models their own cache of answers: vLLM's cache does not tell the models of layers apart."""
    from vllm.v1.attention import selector

    from attnreg.integrations.vllm.layers import role

    target: Any = getattr(selector, _CACHED)
    if hasattr(target, _MARK):
        return
    draft = functools.cache(target.__wrapped__)

    def by_role(*args: Any, **kwargs: Any) -> Any:
        return (draft if role() == "draft" else target)(*args, **kwargs)

    def cache_clear() -> None:
        target.cache_clear()
        draft.cache_clear()

    # drops vLLM's answers from before the registry decided
    target.cache_clear()
    vars(by_role).update({_MARK: True, "cache_clear": cache_clear})
    setattr(selector, _CACHED, by_role)


def _add_to_compile_key(registry: Registry) -> None:
    """Adds the registry to the key of vLLM's compile cache, and has Ray pass the variables on to its workers.

    Compiled code depends on the backends, and vLLM assumes that its own configuration determines them.
    """
    from vllm import envs

    envs.environment_variables[VLLM_VARIABLE] = lambda: registry.title
    # the registry's title identifies it already
    envs.environment_variables[REGISTRY_VARIABLE] = lambda: None
