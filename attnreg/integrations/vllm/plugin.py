"""vLLM's automatic choice of attention backends, made by a registry: a plugin that does nothing until switched on."""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import attnreg
from attnreg.environment import REGISTRY_VARIABLE, VLLM_VARIABLE
from attnreg.selection.wording import answer_sentence, layer_words

_METHOD = "get_attn_backend_cls"
# what a function that this plugin put in place carries
_MARK = "decided_by_attnreg"
# the fields of a model's configuration that vLLM's backends read when they are selected
_MODEL_FIELDS = (
    "attn_logit_softcapping",
    "index_topk",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)


def register() -> None:
    """Let a registry decide vLLM's automatic choice of attention backends, where $ATTNREG_VLLM names one.

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

    platform = type(current_platform)
    if hasattr(getattr(platform, _METHOD), _MARK):
        return
    decider = _Decider(_registry(source))
    _cache_by_role()
    _add_to_compile_key(decider.registry)
    _wrap(platform, decider)
    decider.announce(source)


# the registry --------------------------------------------------------------------------------------------------------


def _registry(source: str) -> attnreg.Registry:
    """The registry that the variable stands for; it knows every facet that the plugin describes a layer by."""
    if source != "1":
        registry = attnreg.load_registry(source)
    elif os.environ.get(REGISTRY_VARIABLE):
        registry = attnreg.load_registry()
    else:
        registry = attnreg.load_registry(_bundled())
    _check_facets(registry)
    return registry


def _bundled() -> str:
    """The name of the bundled registry for the vLLM that runs."""
    import vllm

    from attnreg.errors import did_you_mean

    name, known = f"vllm-{vllm.__version__.partition('+')[0]}", attnreg.bundled_registries()
    if name not in known:
        cure = f"set {VLLM_VARIABLE} to another, or to an overlay; {did_you_mean(name, known)}"
        raise _problem(f"${VLLM_VARIABLE}", f"there is no bundled registry for vLLM {vllm.__version__}", cure)
    return name


def _check_facets(registry: attnreg.Registry) -> None:
    from attnreg.integrations.vllm.inputs import request_from_selector_row
    from attnreg.selection.point import point_of

    layer = {"head_size": 128, "dtype": "bfloat16", "run_kv_cache_dtype": "auto", "flash_attn_version": 2}
    model = {"num_heads": 8, "attn_type": "decoder"}
    row = {**layer, "use_trtllm_attention": False, "model": model, "platform": "cuda", "arch": "sm90"}
    try:
        point_of(*request_from_selector_row(row), registry)
    except attnreg.RequestError as e:
        engines = ", ".join(name for name in attnreg.bundled_registries() if name.startswith("vllm-"))
        cure = f"a registry that decides for vLLM extends one of: {engines}"
        raise _problem(registry.files[-1], f"{registry.title} does not describe vLLM: {e}", cure) from None


def _problem(file: str, message: str, cure: str) -> attnreg.RegistryError:
    from attnreg.errors import Location, Problem

    return attnreg.RegistryError([Problem(Location(file, 1, 1), message, cure)])


# what is put in place in vLLM ----------------------------------------------------------------------------------------


def _wrap(platform: type, decider: _Decider) -> None:
    """Let the decider answer where the platform's own method is asked for no backend by name."""
    own = platform.__dict__.get(_METHOD)

    def get_attn_backend_cls(
        cls: type, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        ask = getattr(super(platform, cls), _METHOD) if own is None else own.__get__(None, cls)
        if selected_backend is None:
            return decider.decide(cls, attn_selector_config, num_heads, ask)
        path: str = ask(selected_backend, attn_selector_config=attn_selector_config, num_heads=num_heads)
        return path

    setattr(get_attn_backend_cls, _MARK, True)
    setattr(platform, _METHOD, classmethod(get_attn_backend_cls))


def _cache_by_role() -> None:
    """Keep the answers for draft models apart: vLLM remembers them by the layer alone, whichever model asks."""
    from vllm.v1.attention import selector

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
        return (draft if _role() == "draft" else target)(*args, **kwargs)

    def cache_clear() -> None:
        target.cache_clear()
        draft.cache_clear()

    # whatever was answered before the registry spoke
    target.cache_clear()
    vars(by_role).update({_MARK: True, "cache_clear": cache_clear})
    setattr(selector, name, by_role)


def _add_to_compile_key(registry: attnreg.Registry) -> None:
    """Make the registry part of the key of vLLM's compile cache, and let Ray pass the variables on to its workers.

    What is compiled depends on the backends, which vLLM takes to follow from its own configuration.
    """
    from vllm import envs

    envs.environment_variables[VLLM_VARIABLE] = lambda: registry.title
    # the title says it all
    envs.environment_variables[REGISTRY_VARIABLE] = lambda: None


# the decision --------------------------------------------------------------------------------------------------------


class _Decider:
    """Asks the registry about vLLM's layers, and says in vLLM's log what it answered."""

    def __init__(self, registry: attnreg.Registry) -> None:
        from vllm.logger import init_logger

        from attnreg.machine.detect import installed_packages

        self.registry = registry
        self.packages = installed_packages(registry.vocabulary.packages)
        self.told: set[Any] = set()
        # below vLLM's own logger, so that its level and its handlers apply
        self.logger = init_logger("vllm.attnreg")

    def announce(self, source: str) -> None:
        """Say at start-up who decides, and what is odd about it."""
        import vllm

        from attnreg.environment import environment_problems

        registry = self.registry
        self.logger.info(
            "attnreg: %s decides which attention backends are chosen automatically (%s=%s)",
            *(registry.title, VLLM_VARIABLE, source),
        )
        made_for = registry.sources["vllm"].version if "vllm" in registry.sources else vllm.__version__
        if made_for != vllm.__version__.partition("+")[0]:
            self.logger.warning("attnreg: %s describes vLLM %s; this is %s", registry.title, made_for, vllm.__version__)
        for problem in environment_problems(os.environ, registry.vocabulary):
            self.logger.warning("attnreg: %s", problem)

    def decide(self, cls: Any, config: Any, num_heads: int | None, ask: Callable[..., str]) -> str:
        """The path of the class that the registry chooses, after ``ask``, which is vLLM, has validated it.

        Raises ValueError, with the whole trace, where the registry accepts nothing, and where vLLM refuses its choice.
        """
        from vllm.utils.import_utils import resolve_obj_by_qualname

        try:
            request, platform = _described(cls, config, num_heads, self.registry, self.packages)
            selection = attnreg.select(request, platform, self.registry)
        except (attnreg.NoBackendError, attnreg.RequestError) as e:
            raise ValueError(f"attnreg ({self.registry.title}): {e}") from e
        backend = self._member(selection)
        self._tell(selection)
        try:
            path = ask(backend, attn_selector_config=config, num_heads=num_heads)
        except ValueError as e:
            raise ValueError(f"attnreg chose {answer_sentence(selection)}, but vLLM refuses it: {e}") from e
        # on some platforms vLLM puts another in the place of one that was named
        if path and not issubclass(resolve_obj_by_qualname(path), backend.get_class()):
            raise ValueError(f"attnreg chose {answer_sentence(selection)}, but vLLM puts {path} in its place")
        return path

    def _member(self, selection: attnreg.Selection) -> Any:
        """What vLLM calls the chosen backend."""
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        from attnreg.errors import Problem, did_you_mean

        chosen = selection.backend
        assert chosen is not None
        known = AttentionBackendEnum.__members__
        if chosen.name not in known:
            message = f"{chosen.name} is no attention backend of this vLLM, nor was it registered with it"
            raise attnreg.RegistryError([Problem(chosen.row.where, message, did_you_mean(chosen.name, known))])
        return known[chosen.name]

    def _tell(self, selection: attnreg.Selection) -> None:
        key = selection.request, selection.platform
        if key in self.told:
            return
        self.told.add(key)
        self.logger.info("attnreg: %s", answer_sentence(selection))
        for warning in selection.warnings:
            self.logger.warning("attnreg: %s", warning)
        if self.logger.isEnabledFor(10):
            self.logger.debug("attnreg: the whole trace\n%s", _trace(selection))


def _described(
    cls: Any, config: Any, num_heads: int | None, registry: attnreg.Registry, packages: dict[str, str]
) -> tuple[attnreg.AttentionRequest, attnreg.Platform]:
    """The layer that vLLM asks about, and the machine that it is on, in the registry's words.

    ``config`` is vLLM's AttentionSelectorConfig; like vLLM's backends this reads the current configuration beside it.
    """
    from vllm.config import get_current_vllm_config_or_none

    from attnreg.integrations.vllm.inputs import request_from_selector_row

    vllm_config = get_current_vllm_config_or_none()
    platform = cls._enum.name.lower()
    row = {
        **{name: getattr(value, "value", value) for name, value in config._asdict().items()},
        "dtype": str(config.dtype).removeprefix("torch."),
        "num_heads": num_heads,
        "platform": platform,
        "arch": _architecture(cls, platform, registry),
    }
    extra: dict[str, Any] = {}
    model_type = None
    if vllm_config is not None:
        run_dtype = getattr(vllm_config.cache_config, "cache_dtype", None)
        row |= {
            "run_kv_cache_dtype": None if run_dtype == config.kv_cache_dtype else run_dtype,
            "flash_attn_version": vllm_config.attention_config.flash_attn_version,
            "use_trtllm_attention": vllm_config.attention_config.use_trtllm_attention,
        }
        model = vllm_config.model_config
        if model is not None:
            ranks, known = vllm_config.parallel_config, registry.vocabulary.facets["attn_type"].words
            heads = model.get_num_attention_heads(ranks)
            hf = {name: getattr(model.hf_text_config, name, None) for name in _MODEL_FIELDS}
            row["model"] = {
                "num_heads": heads,
                "num_kv_heads": model.get_num_kv_heads(ranks),
                "head_size": model.get_head_size(),
                # some models mix several types, or have none
                "attn_type": model.attn_type if model.attn_type in known else None,
                "is_diffusion": model.is_diffusion,
                "hf": hf,
            }
            extra["gathered_heads"] = heads * ranks.decode_context_parallel_size
            model_type = getattr(model.hf_text_config, "model_type", None)
    request, described = request_from_selector_row(row)
    # a recorded row says less of the model and of the machine than vLLM does here
    request = replace(
        request,
        role=_role(),
        model=request.model and (model_type or request.model),
        extra=tuple((dict(request.extra) | extra).items()),
    )
    flags = _flags(platform) & registry.vocabulary.flags.keys()
    return request, replace(described, flags=flags, packages=tuple(packages.items()))


def _architecture(cls: Any, platform: str, registry: attnreg.Registry) -> str:
    if platform == "cuda":
        capability = cls.get_device_capability()
        return f"sm{capability.major}{capability.minor}"
    if platform == "rocm":
        from vllm.platforms.rocm import _GCN_ARCH

        # gfx942:sramecc+:xnack-
        name: str = _GCN_ARCH.partition(":")[0]
        return name
    here = attnreg.Platform.detect_all(registry.vocabulary)
    # a platform that is not found here is one that the registry does not know either, and is refused by name
    return next((p.arch for p in here if p.platform == platform), platform)


def _flags(platform: str) -> frozenset[str]:
    """What the user switched on, as vLLM reads it: its parts for MHA and MLA count where aiter itself is on."""
    from vllm import envs

    flags = set()
    if platform == "rocm" and envs.VLLM_ROCM_USE_AITER:
        flags = {"aiter"}
        flags |= {"aiter_mha"} if envs.VLLM_ROCM_USE_AITER_MHA else set()
        flags |= {"aiter_mla"} if envs.VLLM_ROCM_USE_AITER_MLA else set()
    if platform == "rocm" and os.environ.get("FLASH_ATTENTION_TRITON_AMD_ENABLE") == "TRUE":
        flags.add("flash_attn_triton")
    return frozenset(flags)


def _role() -> str:
    """The part that the model plays whose layers vLLM is building: it tags those that draft."""
    # not imported: where nobody has, no tag was set
    tag = getattr(sys.modules.get("vllm.compilation.backends"), "model_tag", "")
    return "draft" if tag == "draft_model" or tag.endswith("_head") else "target"


def _trace(selection: attnreg.Selection) -> str:
    """Every verdict with its line of data, as ``attnreg explain`` prints it."""
    from rich.console import Console

    from attnreg.explain import Question, explain, render

    out = io.StringIO()
    question = Question(selection.request, label=layer_words(selection.request))
    explanation = explain([question], [selection.platform], selection.registry)
    render(explanation, Console(file=out, width=120, color_system=None))
    return out.getvalue().rstrip()
