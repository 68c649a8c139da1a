"""The kernel module that serves a layer of an engine: attnreg's own row for the platform, with its proven claims."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import NamedTuple

import attnreg


class OwnKernels(NamedTuple):
    """attnreg's rows for the layers of an engine.

    backend: the name of attnreg's backend in the engine. rows: by platform, the rows of attnreg's own registry. The
    first that serves a layer runs it; the last serves every layer that the backend claims. log: below the engine's own
    logger, so that its level and its handlers apply. told: the answers that the log has already.
    """

    backend: str
    rows: Mapping[str, tuple[str, ...]]
    log: logging.Logger
    told: set[str]

    def select(
        self, request: attnreg.AttentionRequest, platform: attnreg.Platform, *, to_run: bool = False
    ) -> attnreg.Selection:
        """The selection of the row that computes a layer. Raises ValueError, with every reason, if none does.

        to_run: the kernel module must load; the log gets one line for each new answer.
        """
        registry = own_registry()
        refusals: dict[str | None, Exception] = {}
        for name in self.rows.get(platform.platform, (None,)):
            try:
                selection = attnreg.select(request, platform, registry, name, to_run=to_run)
            except (attnreg.NoBackendError, attnreg.RequestError) as e:
                refusals[name] = e
            else:
                if to_run:
                    self._tell(selection, refusals)
                return selection
        # the last row's refusal, which has the fewest reasons
        *_, last = refusals.values()
        raise ValueError(f"attnreg ({self.backend}): {last}") from last

    def _tell(self, selection: attnreg.Selection, refusals: Mapping[str | None, Exception]) -> None:
        """Logs which row computes a layer, and why the rows before it cannot."""
        against = [f"{name} does not: {_reasons(e)}" for name, e in refusals.items()]
        text = ". ".join((f"{selection.title} computes the layers of {self.backend}", *against))
        if text not in self.told:
            self.told.add(text)
            self.log.info("attnreg: %s", text)


def _reasons(refusal: Exception) -> str:
    if not isinstance(refusal, attnreg.NoBackendError):
        return str(refusal)
    return "; ".join(reason.text for candidate in refusal.selection.candidates for reason in candidate.reasons)


@functools.cache
def own_registry() -> attnreg.Registry:
    """attnreg's own registry, whichever registry decides for the engine."""
    return attnreg.load_registry("default")
