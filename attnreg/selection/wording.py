"""Requests and platforms in words, for every command and message that prints one.

Different requests have different words, and so have different platforms: the words identify the question.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnreg.language.facets import CORE

if TYPE_CHECKING:
    from attnreg.language.vocabulary import Vocabulary
    from attnreg.platforms import Packages, Platform
    from attnreg.registry import Registry
    from attnreg.request import AttentionRequest

# feature -> its phrase without and with a number, in the order of printing; other features are printed by their name
_PHRASES = {
    "sliding_window": ("sliding window", "sliding window {}"),
    "chunk": ("chunks", "chunks of {}"),
    "sinks": ("sinks", "sinks"),
    "softcap": ("softcap", "softcap {:g}"),
    "alibi": ("ALiBi", "ALiBi"),
    "score_bias": ("score bias", "score bias"),
    "sparse_blocks": ("sparse blocks", "sparse blocks of {}"),
    "mm_prefix": ("multimodal prefix", "multimodal prefix"),
    "mm_prefix_in_window": ("held in the window", "held in the window"),
    "non_causal": ("bidirectional", "bidirectional"),
}
_PLACES = {word: place for place, word in enumerate(_PHRASES)}
# a registry's feature with one of these names is quoted, because the name is also a phrase above
_TAKEN = frozenset(plain for feature, (plain, _) in _PHRASES.items() if plain != feature)
# facets that are printed by name, and only if they differ from these values; the others have a phrase of their own
_USUAL = {
    name: facet.ordinary
    for name, facet in CORE.items()
    if facet.of == "request"
    and name not in ("head_size", "head_size_v", "num_heads", "num_kv_heads", "dtype", "kv_dtype", "features")
}
_ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
# the name of a bundled registry, and what is laid over it
_NAME = re.compile(r"(default|(vllm|sglang)-([0-9][0-9.]*))((?:[+/].*)?)", re.DOTALL)
_PLATFORM_NAMES = {"cuda": "CUDA", "rocm": "ROCm", "xpu": "XPU", "cpu": "CPU"}
_WITHOUT_CACHE = ("encoder", "encoder_only")
_PLAIN = re.compile(r"[\w.+*=<>!~/-]+")


def head_words(num_heads: int | None, num_kv_heads: int | None, head_size: int, head_size_v: int | None = None) -> str:
    """``64/8 heads of 64``: query and KV heads, and elements per head; one number where two are equal.

    ``64 query heads of 64``, ``8 KV heads of 64`` and ``head size 64`` where a number is None.
    """
    size = f"{head_size}" if head_size_v in (None, head_size) else f"{head_size}/{head_size_v}"
    if num_heads is None and num_kv_heads is None:
        return f"head size {size}"
    noun = "query " if num_kv_heads is None else "KV " if num_heads is None else ""
    numbers = dict.fromkeys(str(n) for n in (num_heads, num_kv_heads) if n is not None)
    heads = "/".join(numbers)
    return f"{heads} {noun}head{'s' * (heads != '1')} of {size}"


def feature_words(asks: Mapping[str, object]) -> list[str]:
    """The features of a layer in words: ``["sliding window 128", "sinks"]``.

    asks: feature -> its number. True: it has no number, or the number is unknown. None or False: the layer lacks it.
    """
    out = []
    for feature, number in asks.items():
        name = json.dumps(feature) if feature in _TAKEN else value_words(feature)
        plain, numbered = _PHRASES.get(feature, (name, f"{name} {{}}"))
        if number is True:
            out.append(plain)
        elif number is not None and number is not False:
            out.append(numbered.format(number))
    return out


def value_words(value: object) -> str:
    """The value of a facet as text; a word that could be read as something else is quoted."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        return json.dumps(value)
    return "not given" if value is None else str(value)


def facet_words(facets: Mapping[str, Any]) -> list[str]:
    """Facets by name, with their values: ``["block_size 16", "cache_layout SPLIT"]``."""
    return [f"{name} {value_words(value)}" for name, value in facets.items()]


def request_words(
    request: AttentionRequest, numbers: Mapping[str, object] | None = None, *, without: Collection[str] = ()
) -> list[str]:
    """A request in words: its heads, its dtypes, every facet with an unusual value, and its features.

    numbers: feature -> its number, if it is known (the width of a window). without: fields to leave out.
    """
    words = [head_words(request.num_heads, request.num_kv_heads, request.head_size, request.head_size_v)]
    words += [value_words(request.dtype)] if "dtype" not in without else []
    # encoders keep no KV cache, so only an unusual dtype of it is printed
    if "kv_dtype" not in without and (request.attn_type not in _WITHOUT_CACHE or request.kv_dtype != "auto"):
        words.append(cache_words(request.kv_dtype))
    unusual = {name: getattr(request, name) for name in _USUAL if name not in without}
    words += facet_words({name: value for name, value in unusual.items() if value != _USUAL[name]})
    words += facet_words(dict(request.extra)) if "extra" not in without else []
    ordered = sorted(request.features, key=lambda feature: (_PLACES.get(feature, len(_PLACES)), feature))
    known = numbers or {}
    return words + feature_words({f: known.get(f) or True for f in ordered})


def cache_words(kv_dtype: str | None) -> str:
    """``KV cache fp8``."""
    return f"KV cache {value_words(kv_dtype)}"


def platform_words(
    platforms: Sequence[Platform], vocabulary: Vocabulary, *, here: bool = False, installed: bool = False
) -> list[str]:
    """Platforms in words: ``["CUDA sm90 (H100)", "flag aiter", "every package assumed"]``.

    here: whether they are this machine's. installed: whether their packages are the ones installed here.
    """
    # one command gives all of its platforms the same flags and packages
    alike: dict[tuple[frozenset[str], Packages | None], dict[str, list[Platform]]] = {}
    for p in platforms:
        alike.setdefault((p.flags, p.packages), {}).setdefault(p.platform, []).append(p)
    words = []
    for (flags, packages), places in alike.items():
        where = " and ".join(_architectures(platform, those, vocabulary) for platform, those in places.items())
        words += [f"this machine, {where}" if here else where, *setting_words(flags, packages, installed=installed)]
    return words


def setting_words(flags: Collection[str], packages: Packages | None, *, installed: bool = False) -> list[str]:
    """The flags and the packages of a platform in words: ``["flag aiter", "every package assumed"]``."""
    words = [f"flag{'s' * (len(flags) > 1)} {', '.join(map(value_words, sorted(flags)))}"] if flags else []
    return [*words, _package_words(packages, installed)]


def arch_words(arch: str, vocabulary: Vocabulary, device: str | None = None, product: str | None = None) -> str:
    """``gfx942 (MI300X)`` for a device or a product that is named, else ``gfx942 (MI300X, …)``."""
    about = vocabulary.any_architecture(arch)
    products = about.products if about is not None else ()
    if device is not None and products == (device,):
        return f"{arch} (device {device})"
    shown = device or product or (f"{products[0]}, …" if len(products) > 1 else "".join(products))
    return f"{arch} ({shown})" if shown else arch


def place_words(platform: Platform, vocabulary: Vocabulary) -> str:
    """``gfx942 (MI300X)``: the architecture of a platform with what the user named of it."""
    return arch_words(platform.arch, vocabulary, platform.device, platform.product)


def _architectures(platform: str, platforms: Sequence[Platform], vocabulary: Vocabulary) -> str:
    """``ROCm gfx942 (MI300X), gfx950 (MI350X)``."""
    name = _PLATFORM_NAMES.get(platform, platform)
    archs = {(p.arch, p.device) for p in platforms}
    if len(platforms) > 1 and archs == {(a.name, None) for a in vocabulary.architectures_of(platform)}:
        return f"{name}, every architecture"
    return f"{name} {', '.join(place_words(p, vocabulary) for p in platforms)}"


def _package_words(packages: Packages | None, installed: bool) -> str:
    if packages is None:
        return "every package assumed"
    names = ", ".join(value_words(f"{name}=={version}" if version else name) for name, version in packages)
    if installed:
        return f"packages as installed here: {names or 'none'}"
    return f"only packages {names}" if names else "no package"


def layer_words(request: AttentionRequest) -> str:
    """``target layers (64/8 heads of 64, bfloat16, KV cache auto, sinks)``; the model and extra facets are left out."""
    return f"{request.role} layers ({', '.join(request_words(request, without=('role', 'model', 'extra')))})"


def readable(size: float) -> str:
    """Bytes as ``2.3 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def engine_of(registry: Registry) -> str:
    """``vllm`` for a registry of a bundled release of vLLM, with or without overlays; "" for any other registry."""
    named = _bundled(registry)
    return named[2] or "" if named else ""


def _bundled(registry: Registry) -> re.Match[str] | None:
    """The name of a registry that comes with attnreg, in its parts; None if its files are others."""
    named = _NAME.fullmatch(registry.name)
    folder = f"registry/engines/{named[1]}/" if named and named[2] else "registry/backends.yaml"
    return named if any(file.startswith(folder) for file in registry.files) else None


def engine_words(engine: str, version: str = "") -> str:
    """``vLLM 0.33.0``; ``The engine`` if none is named."""
    return " ".join(filter(None, (_ENGINES.get(engine, "The engine"), version)))


def registry_words(registry: Registry) -> str:
    """Whose choice a registry holds: ``vLLM 0.33.0 (data be1919b)``, or ``attnreg's own kernels (data 2e07ddd)``.

    Overlays are named too; a registry that does not come with attnreg has its own name.
    """
    named = _bundled(registry)
    if named is None:
        return f"registry {registry.title}"
    words = engine_words(named[2], named[3]) if named[2] else "attnreg's own kernels"
    more = named[4].replace("/selector", ", its selector alone").replace("+", " + ")
    return f"{words}{more} (data {registry.fingerprint})"


def unsaid(registry: Registry) -> str:
    """A note on the limits of a registry that lacks the engine's start; "" for any other registry."""
    if registry.imports or registry.steps or registry.name.endswith("/selector"):
        return ""
    return (
        f"{registry.name} holds the selector alone. The start of this release was not recorded. It may change the "
        "dtype or the KV dtype, name a backend for a model, or refuse after the choice"
    )
