"""What the recorder of vLLM's start reads of a layer, and the device on which the layers are built."""

from __future__ import annotations

import enum
from typing import Any


def layer_of(module: Any, backend: Any) -> dict[str, Any]:
    """The facts of a layer of attention: its kind, its backend, and what it says of itself."""
    impl = getattr(module, "impl", None)
    about: dict[str, Any] = {"kind": type(module).__name__, "backend": name_of(backend)}
    for key, owner, attribute in (
        ("kv_dtype", module, "kv_cache_dtype"),
        ("head_size", module, "head_size"),
        ("num_heads", module, "num_heads"),
        ("num_kv_heads", module, "num_kv_heads"),
        ("sliding_window", module, "sliding_window"),
        ("attn_type", module, "attn_type"),
        ("fa_version", impl, "vllm_flash_attn_version"),
    ):
        value = getattr(owner, attribute, None)
        if isinstance(value, int | str | None) and value is not None:
            about[key] = value
    return about


def name_of(backend: Any) -> str:
    """The name of a backend's class in vLLM's registry, which may differ from the class's own name."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if isinstance(backend, enum.Enum):
        return str(backend.name)
    names = {member.value: str(member.name) for member in AttentionBackendEnum}
    # layers in chunks have a subclass of the backend, made for them
    paths = (f"{each.__module__}.{each.__qualname__}" for each in backend.__mro__[:2])
    return next((names[path] for path in paths if path in names), str(backend.get_name()))


def on_meta() -> Any:
    """A mode of torch that puts every new tensor for a GPU on the meta device."""
    import torch
    from torch.overrides import TorchFunctionMode

    def moved(value: Any) -> Any:
        if isinstance(value, str) and value.startswith(("cuda", "xpu")):
            return "meta"
        return torch.device("meta") if isinstance(value, torch.device) and value.type in ("cuda", "xpu") else value

    class OnMeta(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            named = {name: moved(value) for name, value in (kwargs or {}).items()}
            if isinstance(named.get("device"), int):
                named["device"] = "meta"
            return func(*(moved(a) for a in args), **named)

    return OnMeta()
