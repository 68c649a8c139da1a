"""attnreg inside Hugging Face transformers: ``attn_implementation="attnreg"``.

    import attnreg.integrations.transformers as attnreg_transformers

    attnreg_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attnreg")
    model.generate(...)
    print(attnreg_transformers.explanation(model))

Each layer runs by the backend that the registry selects for what its calls ask: heads and sizes, dtype, device, window,
sinks, softcap, and what its mask means. Masks and biases that no batch can say run densely, through PyTorch, which is
logged and counted. What no backend serves raises `attnreg.NoBackendError`, and what attnreg would otherwise have to
drop `attnreg.UnclaimedError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import AttentionInterface, AttentionMaskInterface

from attnreg.integrations.transformers.engine import Engine, Run
from attnreg.integrations.transformers.masks import lazy_mask
from attnreg.integrations.transformers.outside import stand_aside
from attnreg.integrations.transformers.paged import continuous_batching as _continuous_batching
from attnreg.integrations.transformers.report import explain_runs, plan_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from attnreg.explain.answers import Explanation
    from attnreg.platforms import Platform
    from attnreg.registry import Registry

__all__ = ["Run", "continuous_batching", "explain", "explanation", "register", "runs"]

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
) -> None:
    """Make ``attn_implementation=name`` available, its attention and its masks; a second call replaces the first.

    registry: the default one, if None. platform: where layers are said to run; by default the device of their tensors.
    backend: asks for one by name. dense: whether what no batch can say may run densely; if not, it raises. ignore:
    keyword arguments of attention calls that attnreg does not know and that carry no meaning for attention.
    """
    if "flash" in name:
        raise ValueError(
            f"the name {name!r} holds `flash`: transformers takes it for a flash-attention kernel; use another"
        )
    engine = Engine(name, registry, platform=platform, backend=backend, dense=dense, ignore=ignore)
    # one without the other would run without masks, silently
    AttentionMaskInterface.register(name, lazy_mask)
    AttentionInterface.register(name, engine.attend)
    _engines[name] = engine
    stand_aside(_engines)


def continuous_batching(model: Any = None, *, name: str = NAME) -> AbstractContextManager[None]:
    """Within the block ``model.generate_batch`` attends through attnreg.

    transformers takes only names of its own there: attnreg stands in for "sdpa" and "paged|eager", and gives way to
    them for every call without a paged cache. ``model``, if given, is switched to "paged|eager" for the block, which
    unlike "sdpa" is for every model. CUDA graphs have to be off: ``ContinuousBatchingConfig(use_cuda_graph=False)``.
    """
    return _continuous_batching(_engine(name), model)


def runs(model: Any, *, name: str = NAME) -> tuple[Run, ...]:
    """What each attention module of a model has run so far, in the order of the modules."""
    return _engine(name).runs_of(model)


def explain(model: Any, *, name: str = NAME) -> Explanation:
    """Which backend each group of layers got, and why; before the model has run, what its config asks for.

    `attnreg.explain.render` prints it, as ``attnreg explain`` does.
    """
    engine = _engine(name)
    return explain_runs(engine, model) if engine.runs_of(model) else plan_of(engine, model)


def explanation(model: Any, *, name: str = NAME, width: int = 100) -> str:
    """What `explain` says, as text."""
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
