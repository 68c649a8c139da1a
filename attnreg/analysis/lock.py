"""`attnreg lock`: the selections that a deployment relies on, written to a file and compared with later data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnreg.errors import Location, Problem, RegistryError, RequestError
from attnreg.files import FileError, read_json
from attnreg.platforms import Platform
from attnreg.request import AttentionRequest
from attnreg.selection.refusal import full_dict
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import trace_lines

if TYPE_CHECKING:
    from attnreg.registry import Registry
    from attnreg.selection.question import Question
    from attnreg.selection.trace import Selection

FORMAT = 1
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Drift:
    """One locked selection that has changed: the lock's entry, and the selection now or its problem."""

    entry: Mapping[str, Any]
    now: Selection | None
    problem: str = ""

    @property
    def before(self) -> str:
        return _title(self.entry["backend"], self.entry.get("variant"))

    @property
    def after(self) -> str:
        chosen = self.now.backend if self.now else None
        return _title(chosen.name if chosen else None, chosen.variant if chosen else None)

    def lines(self) -> list[str]:
        """The drift in plain text: both backends, the reasons against the old one, and how the new one was chosen."""
        platform, where = self.entry["platform"], " · ".join(filter(None, (self.entry["model"], self.entry["label"])))
        lines = [f"{where} · {platform['platform']} {platform['arch']}: {self.before} → {self.after}"]
        if self.problem:
            lines.append(f"  {self.problem}")
        if self.now is not None:
            names = {self.entry["backend"], self.now.backend and self.now.backend.name}
            lines += [f"  {line}" for line in trace_lines(self.now, names)]
        return lines

    def to_dict(self) -> dict[str, Any]:
        after = full_dict(self.now) if self.now else None
        return {"before": dict(self.entry), "after": after, "problem": self.problem}


def write_lock(
    registry: Registry, source: str, models: Iterable[tuple[str, Sequence[Question]]], platforms: Sequence[Platform]
) -> dict[str, Any]:
    """The lock of every question of every model on every platform, as JSON-ready values."""
    selections = []
    for model, questions in models:
        for question in questions:
            if (request := question.request) is None:
                continue
            for platform in platforms:
                chosen = evaluate(request, platform, registry).backend
                selections.append(
                    {
                        "model": model,
                        "layers": question.layers,
                        "label": question.label,
                        "platform": platform.to_dict(),
                        "request": request.to_dict(),
                        "backend": chosen.name if chosen else None,
                        "variant": chosen.variant if chosen else None,
                    }
                )
    return {"format": FORMAT, "registry": source, "fingerprint": registry.fingerprint, "selections": selections}


def read_lock(path: Path) -> dict[str, Any]:
    """The contents of a lock file. Raises `RegistryError` for a file that is not one."""
    try:
        data = read_json(path, MAX_BYTES)
    except FileError as e:
        raise RegistryError([e.problem]) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("selections"), list):
        raise _problem(path, f"no lock file of format {FORMAT}")
    return data


def drift(lock: Mapping[str, Any], registry: Registry, path: Path) -> list[Drift]:
    """The locked selections that ``registry`` decides otherwise. Raises `RegistryError` for a lock it cannot read."""
    out = []
    for number, entry in enumerate(lock["selections"], 1):
        try:
            request = AttentionRequest.from_dict(entry["request"])
            platform = Platform(**entry["platform"])
            before = entry["backend"], entry.get("variant")
        except (KeyError, TypeError, RequestError) as e:
            raise _problem(path, f"selection {number} cannot be read: {e}") from None
        try:
            now = evaluate(request, platform, registry)
        except RequestError as e:
            out.append(Drift(entry, None, str(e)))
            continue
        after = (now.backend.name, now.backend.variant) if now.backend else (None, None)
        if after != before:
            out.append(Drift(entry, now))
    return out


def _title(name: str | None, variant: str | None) -> str:
    return "no backend" if name is None else f"{name}/{variant}" if variant else name


def _problem(path: Path, message: str) -> RegistryError:
    return RegistryError([Problem(Location(str(path), 1, 1), message, "write it with `attnreg lock`")])
