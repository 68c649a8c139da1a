"""attnreg inside Hugging Face transformers: ``attn_implementation="attnreg"``.

    import attnreg.integrations.transformers as attnreg_transformers

    attnreg_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attnreg")
    model.generate(...)
    print(attnreg_transformers.explanation(model))

The registry selects a backend for each layer from its calls: heads and sizes, dtype, device, window, sinks, softcap,
and the meaning of its mask. Models with multi-head latent attention (MLA) attend to the latents that transformers
caches, by MLA's backends. A call whose mask or bias no batch can express runs densely, through PyTorch; such calls
are logged and counted. A request that no backend accepts raises `attnreg.NoBackendError`, and an argument that attnreg
would have to drop raises `attnreg.UnclaimedError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnreg.integrations.registration import validate_name
from attnreg.integrations.transformers.call_cache import LayerRun
from attnreg.integrations.transformers.compressed.layers import PREPARE, stand_in
from attnreg.integrations.transformers.engine import Engine
from attnreg.integrations.transformers.forms.releases import part, tell_newer
from attnreg.integrations.transformers.masks import lazy_mask
from attnreg.integrations.transformers.paged import continuous_batching as _continuous_batching
from attnreg.integrations.transformers.report import explain_runs, plan_of
from attnreg.integrations.transformers.unsupported_classes import DECIDE, stand_aside
from attnreg.runtime.interface import UnclaimedError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from attnreg.explain.answers import Explanation
    from attnreg.platforms import Platform
    from attnreg.registry import Registry

__all__ = ["LayerRun", "continuous_batching", "explain", "explanation", "new_cache", "register", "runs"]

NAME = "attnreg"
_engines: dict[str, Engine] = {}


def register(
    name: str = NAME,
    registry: Registry | None = None,
    *,
    platform: Platform | None = None,
    backend: str | None = None,
    dense: bool = True,
    ignore: tuple[str, ...] = (),
    latent: bool | None = None,
    kv_dtype: str | None = None,
) -> None:
    """Registers attention and masks for ``attn_implementation=name``; a second call replaces the first.

    registry: the default one, if None. platform: the platform of the requests; by default that of the tensors' device.
    backend: the name of the backend to use, instead of a selection. dense: whether a call that no batch can express may
    run densely; if not, it raises. ignore: keyword arguments of attention calls that attnreg does not know and that do
    not change the result.

    latent: whether layers of MLA attend to latents as transformers caches them; by default wherever that is exact.
    True: a layer raises `UnclaimedError` if its keys have to be expanded for another reason than being a prompt's.
    False: keys are always expanded.

    kv_dtype: a packed format, such as "turboquant_4bit_nc". ``generate`` keeps keys and values in it, but for the
    layers that the registry exempts. `new_cache` makes such a cache for calls of the model itself. A call with another
    cache raises `UnclaimedError`.

    Raises ValueError for a name that is taken, and `RequestError` for other invalid arguments.
    """
    validate_name(name)
    if "flash" in name:
        raise ValueError(
            f"the name {name!r} holds `flash`: transformers takes it for a flash-attention kernel; use another"
        )
    if name == "eager" or (name in ALL_ATTENTION_FUNCTIONS.valid_keys() and name not in _engines):
        raise ValueError(f"the name {name!r} is taken in transformers, whose classes read it; use another")
    engine = Engine(
        name,
        registry,
        platform=platform,
        backend=backend,
        dense=dense,
        ignore=ignore,
        latent=latent,
        kv_dtype=kv_dtype,
    )
    # a release without one of the methods that attnreg wraps is refused before anything is changed
    part(PreTrainedModel, DECIDE)
    part(GenerationMixin, PREPARE)
    tell_newer()
    # masks first: attention under a name without a mask function would silently run without masks
    AttentionMaskInterface.register(name, lazy_mask)
    AttentionInterface.register(name, engine.attend)
    _engines[name] = engine
    stand_aside(_engines)
    stand_in(_engines)


def new_cache(model: Any, *, name: str = NAME) -> DynamicCache:
    """An empty cache in the format of ``register(kv_dtype=...)``, for calls of the model with one batch of requests.

    Raises `UnclaimedError` for a model that cannot have one, and ValueError without a ``kv_dtype``.
    """
    compressed = _engine(name).compressed
    if compressed is None:
        raise ValueError(f"{name!r} is registered without kv_dtype: transformers makes its cache")
    return compressed.cache(model.config)


def continuous_batching(model: Any = None, *, name: str = NAME) -> AbstractContextManager[None]:
    """A context in which ``model.generate_batch`` attends through attnreg.

    transformers accepts only its own names there, so attnreg replaces "sdpa" and "paged|eager" and passes calls without
    a paged cache on to the originals. ``model``, if given, is switched to "paged|eager" inside the block, because
    transformers refuses "sdpa" for some models.

    Backends read the paged cache in place, with two exceptions. A cache with pages that no backend reads is copied. So
    is the window of a layer with a sliding window while a request has several new tokens: transformers stores a window
    as a ring, and these tokens overwrite it. CUDA graphs (``ContinuousBatchingConfig(use_cuda_graph=True)``) can be
    captured with backends that read the lengths on the device.
    """
    engine = _engine(name)
    if engine.compressed is not None:
        raise UnclaimedError("continuous batching keeps transformers' own paged cache: register without kv_dtype", name)
    return _continuous_batching(engine, model)


def runs(model: Any, *, name: str = NAME) -> tuple[LayerRun, ...]:
    """The runs of each attention module of a model so far, in the order of the modules."""
    return _engine(name).runs_of(model)


def explain(model: Any, *, name: str = NAME) -> Explanation:
    """The backend of each group of layers and the reasons; before the model has run, those for its config.

    `attnreg.explain.render` prints it, as ``attnreg explain`` does.
    """
    engine = _engine(name)
    return explain_runs(engine, model) if engine.runs_of(model) else plan_of(engine, model)


def explanation(model: Any, *, name: str = NAME, width: int = 100) -> str:
    """The result of `explain` as text."""
    import io

    from rich.console import Console

    from attnreg.explain import render

    out = io.StringIO()
    render(explain(model, name=name), Console(file=out, width=width, color_system=None))
    return out.getvalue().rstrip()


def _engine(name: str) -> Engine:
    if name not in _engines:
        raise LookupError(
            f"{name!r} is not registered; call attnreg.integrations.transformers.register({name!r}) first"
        )
    return _engines[name]
