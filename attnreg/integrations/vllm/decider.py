"""Decider: selects backends for vLLM's layers, has vLLM validate each choice, and logs it in vLLM's log."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

import attnreg
from attnreg.environment import VLLM_VARIABLE, environment_problems
from attnreg.errors import Problem, did_you_mean
from attnreg.integrations.vllm.layers import describe
from attnreg.integrations.vllm.registries import NAME
from attnreg.packages.installed import installed_packages
from attnreg.selection.trace import answer_sentence
from attnreg.selection.wording import layer_words


class Decider:
    """Decides vLLM's automatic choices by a registry."""

    def __init__(self, registry: attnreg.Registry, source: str) -> None:
        """source: the value of the variable that named the registry."""
        from vllm.logger import init_logger

        self.registry = registry
        self.source = source
        self.announced = False
        self.packages = installed_packages(registry.vocabulary.packages)
        self.told: set[Any] = set()
        # below vLLM's own logger, so that its level and its handlers apply
        self.logger = init_logger("vllm.attnreg")

    def announce(self) -> None:
        """Log once which registry decides, with a warning if it is for another vLLM.

        Called when vLLM first asks for a backend: vLLM loads plugins before it sets its logging up.
        """
        import vllm

        if self.announced:
            return
        self.announced = True
        registry = self.registry
        self.logger.info(
            "attnreg: %s decides which attention backends are chosen automatically (%s=%s)",
            *(registry.title, VLLM_VARIABLE, self.source),
        )
        made_for = registry.sources["vllm"].version if "vllm" in registry.sources else vllm.__version__
        if made_for != vllm.__version__.partition("+")[0]:
            self.logger.warning("attnreg: %s describes vLLM %s; this is %s", registry.title, made_for, vllm.__version__)
        for problem in (*environment_problems(os.environ, registry.vocabulary), *registry.plugin_problems):
            self.logger.warning("attnreg: %s", problem)

    def decide(self, cls: Any, config: Any, num_heads: int | None, ask: Callable[..., str]) -> str:
        """The path of the class that the registry chooses, after vLLM has validated it through ``ask``.

        Raises ValueError, with the whole trace, if the registry accepts nothing or vLLM refuses its choice.
        """
        from vllm.utils.import_utils import resolve_obj_by_qualname

        try:
            request, platform = describe(cls, config, num_heads, self.registry, self.packages)
            selection = attnreg.select(request, platform, self.registry)
        except (attnreg.NoBackendError, attnreg.RequestError) as e:
            raise ValueError(f"attnreg ({self.registry.title}): {e}") from e
        backend = self._member(selection)
        self._tell(selection)
        try:
            path = ask(backend, attn_selector_config=config, num_heads=num_heads)
        except ValueError as e:
            raise ValueError(f"attnreg chose {answer_sentence(selection)}, but vLLM refuses it: {e}") from e
        # on some platforms vLLM replaces a named backend by another
        if path and not issubclass(resolve_obj_by_qualname(path), backend.get_class()):
            raise ValueError(f"attnreg chose {answer_sentence(selection)}, but vLLM puts {path} in its place")
        return path

    def _member(self, selection: attnreg.Selection) -> Any:
        """The chosen backend as a member of vLLM's enumeration."""
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        chosen = selection.backend
        assert chosen is not None
        members = AttentionBackendEnum.__members__
        if chosen.name not in members:
            message = f"{chosen.name} is no attention backend of this vLLM, nor was it registered with it"
            raise attnreg.RegistryError([Problem(chosen.row.where, message, did_you_mean(chosen.name, members))])
        return members[chosen.name]

    def _tell(self, selection: attnreg.Selection) -> None:
        key = selection.request, selection.platform
        if key in self.told:
            return
        self.told.add(key)
        self.logger.info("attnreg: %s", answer_sentence(selection))
        for fact in selection.facts:
            self.logger.info("attnreg: %s takes %s", selection.backend and selection.backend.name, fact)
        # logs why attnreg's own backend is not chosen, if it stands before the chosen one
        chosen = selection.chosen
        for own in selection.candidates[: chosen.rank if chosen else None]:
            if own.name == NAME and not own.accepted:
                reasons = "; ".join(reason.text for reason in own.reasons)
                self.logger.info("attnreg: its own %s does not serve these: %s", NAME, reasons)
        for warning in selection.warnings:
            self.logger.warning("attnreg: %s", warning)
        if self.logger.isEnabledFor(10):
            self.logger.debug("attnreg: the whole trace\n%s", _trace(selection))


def _trace(selection: attnreg.Selection) -> str:
    """Every verdict with its line of data, as ``attnreg explain`` prints it."""
    from rich.console import Console

    from attnreg.explain import Question, explain, render

    out = io.StringIO()
    question = Question(selection.request, label=layer_words(selection.request))
    explanation = explain([question], [selection.platform], selection.registry)
    render(explanation, Console(file=out, width=120, color_system=None))
    return out.getvalue().rstrip()
