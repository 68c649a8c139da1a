"""The generated blocks of docs/models.md and of the site's page of model families."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from attnreg.loader import bundled_registries
from attnreg.models.facts import MIXERS, LayerFacts
from attnreg.models.groups import LayerGroup, group_layers
from attnreg.models.questions import ModelOptions, model_layers
from attnreg.models.reader import ConfigError, ModelLayers, bundled_families, requests_from_model
from attnreg.platforms import Platform
from attnreg.registry import Registry
from attnreg.selection.selector import evaluate
from docs.markdown import plain, table
from docs.registries import bundled

# the architectures of the matrix, in the order of its columns
ARCHS = ("sm80", "sm90", "sm100", "sm120", "gfx942", "gfx1100", "x86_64")
# a need beyond plain causal attention -> whether a layer has it
NEEDS = {
    "sliding windows": lambda x: x.sliding_window is not None,
    "chunks": lambda x: x.chunk is not None,
    "attention sinks": lambda x: x.sinks,
    "softcap": lambda x: x.softcap is not None,
    "ALiBi": lambda x: x.alibi,
    "score bias": lambda x: x.bias,
    "MLA": lambda x: x.attention == "mla",
    "sparse MLA": lambda x: x.attention == "mla_sparse",
    "sparse blocks": lambda x: x.sparse_blocks is not None,
    "a multimodal prefix": lambda x: x.causal == "prefix",
    "bidirectional layers": lambda x: x.kind == "encoder",
    "cross-attention": lambda x: x.kind == "cross",
    "a vision tower": lambda x: x.kind == "vision",
    "keys and values of an earlier layer": lambda x: x.kv_shared_from is not None,
    "head sizes that differ between layers": None,
    "mixers beside attention": lambda x: x.kind in MIXERS,
}


def family_blocks() -> dict[str, str]:
    """Name of each generated block of the page of model families -> its Markdown."""
    families = bundled_families()
    models = dict(_defaults())
    rows = []
    for name in families:
        groups = models[name].groups if name in models else ()
        lines = "<br>".join(plain(f"{group_layers(g)}: {g.label}") for g in groups)
        like = families.like(name)
        rows.append([f"`{name}`", f"`{like}`" if like else "", lines or "its files say everything", _symbol(name)])
    titles = ("model_type", "like", "layers that its class has by default", "read in transformers")
    columns = tuple(zip(titles, (30, 20, 80, 60), strict=True))
    return {"count": f"{len(families)} families.", "needs": _needs(models), "families": table(columns, rows)}


def _defaults() -> Iterator[tuple[str, ModelLayers]]:
    """Each family with the layers of a config that has only the field model_type, if such a config can be read."""
    for name in bundled_families():
        try:
            yield name, requests_from_model({"model_type": name})
        except ConfigError:
            continue


def _symbol(name: str) -> str:
    path, _, symbol = bundled_families().source(name).partition("#")
    return f"`{path.rpartition('/')[2]}` {plain(symbol)}"


def _needs(models: dict[str, ModelLayers]) -> str:
    lines = []
    for need, has_need in NEEDS.items():
        names = [f"`{name}`" for name, model in models.items() if _has(model.layers, has_need)]
        lines.append(f"- **{need}**: {', '.join(names) or 'none'}")
    return "\n".join(lines)


def _has(layers: Sequence[LayerFacts], has_need) -> bool:  # type: ignore[no-untyped-def]
    if has_need is not None:
        return any(has_need(layer) for layer in layers)
    sizes = {(x.part, x.head_size, x.head_size_v) for x in layers if x.head_size is not None and x.mla is None}
    return len(sizes) > len({part for part, *_ in sizes})


@cache
def matrix_blocks(root: Path) -> dict[str, str]:
    """Name of a bundled registry -> the matrix of models as Markdown. docs/models.md has a block of each name."""
    paths = sorted((root / "examples" / "configs").glob("*/"), key=_by_name)
    registries = {name: bundled(name) for name in bundled_registries(releases=False)}
    # steps without orders choose for a whole server, and not for each layer, so they have no matrix
    ordered = {name: registry for name, registry in registries.items() if registry.orders}
    asked = {n: [model_layers(str(p), ModelOptions(), registry) for p in paths] for n, registry in ordered.items()}
    return {name: _matrix(registry, asked[name]) for name, registry in ordered.items()}


def _by_name(path: Path) -> str:
    return path.name.lower()


def _matrix(registry: Registry, models: Sequence[ModelLayers]) -> str:
    archs = [registry.vocabulary.architectures[name] for name in ARCHS if name in registry.vocabulary.architectures]
    rows = []
    for model in models:
        for group in model.groups:
            cells = [_cell(registry, group, Platform(platform=arch.platform, arch=arch.name)) for arch in archs]
            name = model.name if group is model.groups[0] else ""
            rows.append([name, plain(f"{group_layers(group)}: {group.label}"), *cells])
    columns = (("model", 30), ("layers", 70), *((arch.title, 22) for arch in archs))
    return table(columns, rows)


def _cell(registry: Registry, group: LayerGroup, platform: Platform) -> str:
    if group.request is None:
        return "–"
    selection = evaluate(group.request, platform, registry)
    chosen = selection.chosen
    if chosen is None:
        return "not known" if selection.unknown else "**none**"
    return chosen.title + (" (slow)" if chosen.emulates else "")
