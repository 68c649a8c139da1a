"""The default backends of engines: a table of release x compute capability x architecture of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attnreg.compile.inputs.bundled import bundled_configs
from attnreg.engines import sglang
from attnreg.loader import bundled_registries, load_registry
from attnreg.models.fields import read_config
from attnreg.models.questions import ModelOptions, model_questions
from attnreg.platforms import Platform
from attnreg.registry import Registry
from attnreg.selection.selector import evaluate

ENGINES = ("sglang", "vllm")


@dataclass(frozen=True)
class Default:
    """The default backends of one release for one architecture of a model on one GPU.

    ``prefill`` and ``decode`` are None if the engine refuses, for the reason in ``error``. If the model's layers get
    several backends, the text has all of them, in the order of the layers.
    """

    release: str
    arch: str
    architecture: str
    prefill: str | None
    decode: str | None
    error: str = ""

    @property
    def title(self) -> str:
        """``fa3``, ``fa3 / flashmla`` for two phases, or the reason for no backend."""
        if self.decode is None:
            return f"none ({self.error})"
        return self.decode if self.prefill == self.decode else f"{self.prefill} / {self.decode}"


@dataclass
class Table:
    """The defaults of some releases."""

    rows: list[Default] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def aiconfigurator(self) -> str:
        """The table in aiconfigurator's form: engine -> release -> SM -> backend; then by architecture.

        The first map has the backends that most architectures get. Below `architectures` are the whole rows of
        architectures that differ on some SM. The backend is that of generated tokens; a comment has the backend of
        prompts if it differs.
        """
        lines = [
            "# The default attention backend by engine, release and SM: written by `attnreg defaults --aiconfigurator`."
        ]
        special: dict[str, dict[str, dict[str, dict[str, Default]]]] = {}
        for engine, releases in _tree(self.rows).items():
            lines.append(f"{engine}:")
            for release, by_architecture in releases.items():
                usual = _usual(by_architecture.values())
                lines.append(f'  "{release}":')
                lines += [f"    {sm.removeprefix('sm')}: {value}" for sm, value in usual.items()]
                for name, row in by_architecture.items():
                    if any(d.decode != usual.get(sm) for sm, d in row.items()):
                        special.setdefault(name, {}).setdefault(engine, {})[release] = row
        lines += ["architectures:"] if special else []
        for name, engines in sorted(special.items()):
            lines.append(f"  {name}:")
            for engine, releases_of in engines.items():
                lines.append(f"    {engine}:")
                for release, row in releases_of.items():
                    lines.append(f'      "{release}":')
                    lines += [f"        {_lane(default)}" for default in row.values()]
        return "\n".join(lines) + "\n"


def defaults(releases: Sequence[str], archs: Sequence[str], architectures: Iterable[str] = ()) -> Table:
    """The defaults of bundled releases on NVIDIA GPUs, for some architectures or for all known ones.

    SGLang's architectures are those of its recorded models; vLLM's come from the configs of well-known models.
    """
    wanted, table = set(architectures), Table()
    for name in releases:
        engine, _, version = name.rpartition("-")
        found = _sglang(version, archs, wanted) if engine == "sglang" else _vllm(name, archs, wanted)
        table.rows += found
    missing = sorted(wanted - {row.architecture for row in table.rows})
    table.notes += [f"no release here knows {name}" for name in missing]
    return table


def known_releases() -> list[str]:
    """The bundled releases of engines."""
    return [name for name in bundled_registries() if name.rpartition("-")[0] in ENGINES]


def _sglang(version: str, archs: Sequence[str], wanted: set[str]) -> list[Default]:
    out = []
    for model in sglang.models(version):
        # `#` marks a second set of dimensions of an architecture
        if "#" in model or (wanted and model not in wanted):
            continue
        for arch in archs:
            answer = sglang.decision({"version": version, "platform": "cuda", "arch": arch, "model": model})
            later = answer.get("refused_later") or []
            error = answer["error"] or (later[0][2] if later else "")
            prefill, decode = (None if error else answer[phase] for phase in ("prefill", "decode"))
            out.append(Default(f"sglang-{version}", arch, model, prefill, decode, error))
    return out


def _vllm(name: str, archs: Sequence[str], wanted: set[str]) -> list[Default]:
    registry = load_registry(name)
    out, seen = [], set[str]()
    for config in bundled_configs().values():
        [architecture, *_] = read_config(str(config))[1].get("architectures") or [config.parent.name]
        if architecture in seen or (wanted and architecture not in wanted):
            continue
        seen.add(architecture)
        out += [_of_model(registry, name, config, str(architecture), arch) for arch in archs]
    return out


def _of_model(registry: Registry, release: str, config: Path, architecture: str, arch: str) -> Default:
    """The defaults of a vLLM release for a model's layers; one layer without a backend is an error for all."""
    chosen: dict[str, dict[str, None]] = {"prefill": {}, "decode": {}}
    questions = model_questions(str(config), ModelOptions(), registry).questions
    for request in (question.request for question in questions):
        if request is None or request.role != "target":
            continue
        selection = evaluate(request, Platform(platform="cuda", arch=arch), registry)
        if selection.backend is None or selection.fails:
            start = selection.start
            error = start.refusal.effect.refuses if start and start.refusal else selection.silence
            error = error or "no backend accepts its layers"
            error = f"not known: {error}" if selection.unknown else error
            return Default(release, arch, architecture, None, None, error)
        # MLA has a separate question for prompts
        of_any = ["decode"] if request.attention.startswith("mla") else [*chosen]
        for phase in of_any if request.phase == "any" else [request.phase]:
            chosen[phase][selection.backend.name] = None
    prefill, decode = (" + ".join(chosen[phase]) or None for phase in ("prefill", "decode"))
    return Default(release, arch, architecture, prefill or decode, decode, "" if decode else "it has no attention")


def _tree(rows: Iterable[Default]) -> dict[str, dict[str, dict[str, dict[str, Default]]]]:
    """Engine -> version -> architecture -> SM -> default."""
    out: dict[str, dict[str, dict[str, dict[str, Default]]]] = {}
    for row in rows:
        engine, _, version = row.release.rpartition("-")
        out.setdefault(engine, {}).setdefault(version, {}).setdefault(row.architecture, {})[row.arch] = row
    return out


def _usual(rows: Iterable[Mapping[str, Default]]) -> dict[str, str]:
    """SM -> the backend that most architectures get there; of several the alphabetically first."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        for sm, default in row.items():
            counts.setdefault(sm, Counter()).update([default.decode] if default.decode else [])
    return {sm: min(count, key=lambda name: (-count[name], name)) for sm, count in counts.items() if count}


def _lane(default: Default) -> str:
    sm = default.arch.removeprefix("sm")
    if default.decode is None:
        return f"# {sm}: none: {default.error}"
    return f"{sm}: {default.decode}" + (f"  # prompts: {default.prefill}" if default.prefill != default.decode else "")
