"""Resolves names on the command line: the config of ``--model``, the GPUs of ``--arch``, the release of ``--engine``.

A config is a file, a model in the hub's cache on disk, or one of attnreg's examples.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from attnreg.cli.refusals import BadInput
from attnreg.compile.inputs.bundled import bundled_configs
from attnreg.errors import escaped, nearest

if TYPE_CHECKING:
    from attnreg.language.vocabulary import Vocabulary
    from attnreg.registry import Registry

_ID = re.compile(r"(?:(?P<owner>\w[\w.-]*)/)?(?P<name>\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_ADDRESS = re.compile(r"\w+://(?P<host>[^/]*)/?(?P<path>.*)")
_HUB = ("huggingface.co", "www.huggingface.co", "hf.co")
_SOURCES = "give a config.json, the directory of one, or a model in the hub's cache by its id (nothing is downloaded)"


def find_config(text: str, others: Iterable[str] = ()) -> str:
    """The path of the config that a text names: an existing path, else a model in the hub's cache, else an example.

    A model is named by its id (openai/gpt-oss-120b), with or without its owner, and with an optional revision after
    ``@``. others: further words that the option takes. Raises `BadInput` for any other text; the help lists the sources
    of configs.
    """
    if os.path.lexists(text):
        if os.path.isdir(text) and not os.path.lexists(os.path.join(text, "config.json")):
            raise BadInput(f"{text} is a directory without a config.json", _SOURCES)
        return text
    address = _ADDRESS.fullmatch(text)
    if address is not None:
        owner, _, rest = address["path"].partition("/")
        model = f"{owner}/{rest.partition('/')[0]}" if address["host"] in _HUB and rest else ""
        hint = f"{_fetching(model)}; then give --model {model}" if model else "download it, and give the file"
        raise BadInput(f"{text} is an address, and nothing is downloaded", hint)
    named = None if text.endswith(".json") else _ID.fullmatch(text)
    if named is None:
        raise BadInput(f"{text or repr(text)}: no such file", _SOURCES)
    cached = list(_cached(named["owner"], named["name"]))
    # an exact match of the id wins over other owners and other spellings
    cached = [folder for folder in cached if _id(folder) == text.partition("@")[0]] or cached
    if len(cached) > 1:
        raise BadInput(f"{text} is several models of the hub's cache", f"give one: {', '.join(map(_id, cached))}")
    if cached:
        return str(_config(cached[0], named["revision"] or "main"))
    example = bundled_configs().get(text)
    if example is not None:
        return str(example)
    near = nearest(text, [*model_names(), *others])
    fetching = _fetching(text.partition("@")[0], named["revision"]) if named["owner"] else _SOURCES
    hint = f"did you mean `{near}`? Or: {fetching}" if near else fetching
    raise BadInput(f"{text}: no such file, and no such model in the hub's cache, {hub_cache()}", hint)


def known_config(names: Iterable[str]) -> tuple[str, str] | None:
    """The config of the first of some names that the hub's cache or the examples have, and a note on where it is from.

    The names come from a log: none is read as a path. None where no name is known.
    """
    names = list(names)
    for name in names:
        parts = _ID.fullmatch(name)
        cached = list(_cached(parts["owner"], parts["name"])) if parts else []
        configs = [file for folder in cached for file in sorted(folder.glob("snapshots/*/config.json"))]
        if len(configs) == 1:
            return str(configs[0]), f"{names[0]} is {_id(cached[0])} of the hub's cache"
    for name in names:
        example = bundled_configs().get(name)
        if example is not None:
            return str(example), f"the config of {names[0]} is taken to be the example {name} that comes with attnreg"
    return None


def model_names() -> list[str]:
    """The ids of the models in the hub's cache that have a config, and the names of the examples."""
    cached = [_id(folder) for folder in _cached(None, None) if next(folder.glob("snapshots/*/config.json"), None)]
    return sorted({*cached, *bundled_configs()})


def hub_cache() -> Path:
    """The directory of the hub's cache, found by huggingface_hub's rules."""
    for name, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if os.environ.get(name):
            return Path(os.environ[name], below).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return Path(home, "huggingface", "hub").expanduser()


def _cached(owner: str | None, name: str | None) -> Iterator[Path]:
    """The directories of the cached models with this owner and name; None matches any."""
    try:
        folders = sorted(os.listdir(hub_cache()))
    except OSError:
        return
    for folder in folders:
        kind, *parts = folder.casefold().split("--")
        of_name = name is None or parts[-1:] == [name.casefold()]
        if kind == "models" and of_name and (owner is None or parts[:-1] == [owner.casefold()]):
            yield hub_cache() / folder


def _id(folder: Path) -> str:
    return folder.name.removeprefix("models--").replace("--", "/")


def _config(folder: Path, revision: str) -> Path:
    """The config of a cached model at a revision: a branch, a tag, or a commit or its beginning."""
    commits = {path.name: path for path in sorted(folder.glob("snapshots/*"))}
    reference = folder / "refs" / revision
    if reference.is_file():
        # the cache may lack all files of the commit that a reference names
        commit = reference.read_text(errors="replace").strip()
        found = [commits[commit]] if commit in commits else []
    elif revision == "main":
        # a cache that was filled by commits has no reference `main`
        found, commit = list(commits.values()), ""
    else:
        found, commit = [path for name, path in commits.items() if name.startswith(revision)], ""
    if len(found) != 1:
        at = f" ({escaped(commit[:40])})" if commit else ""
        what = "several revisions" if found else f"no files of revision {revision}{at}"
        there = f"give --model {_id(folder)}@REVISION; there are {', '.join(commits)}"
        raise BadInput(f"the hub's cache has {what} of {_id(folder)}", there if commits else _fetching(_id(folder)))
    config = found[0] / "config.json"
    if not config.is_file():
        raise BadInput(f"{found[0]} has no config.json", _fetching(_id(folder), revision))
    return config


def _fetching(model: str, revision: str | None = None) -> str:
    at = f" --revision {revision}" if revision not in (None, "main") else ""
    return f"`hf download {model} config.json{at}` puts it into the hub's cache"


class Place(NamedTuple):
    """What one name stands for: an architecture with its platform, the device if it is one, and the product's name."""

    platform: str
    arch: str
    device: str | None = None
    product: str | None = None


def places(archs: Iterable[str], devices: Iterable[str], *vocabularies: Vocabulary) -> list[Place]:
    """Each named architecture or product, and each named device with its architecture.

    Raises `BadInput` for a word that none of the vocabularies has.
    """
    found = [_place(name, *vocabularies) for name in archs]
    known = list({(place.arch, place.device): place for place in reversed(found)}.values())[::-1]
    named: dict[str, Place] = {}
    for name in devices:
        about = next(((v, word) for v in vocabularies if (word := v.device(name)) is not None), None)
        if about is None:
            telling = next((v for v in vocabularies if v.facet("device")), None)
            help_ = telling.help_for("device", name) if telling else "the registry tells no devices apart"
            raise BadInput(f"unknown device {name!r}", help_)
        vocabulary, word = about
        arch = vocabulary.arch_of(word)
        named[word] = Place(vocabulary.architectures[arch].platform, arch, word)
    for device, place in named.items():
        if known and place.arch not in {other.arch for other in known}:
            others = ", ".join(dict.fromkeys(other.arch for other in known))
            raise BadInput(f"--device-name {device} is {place.arch}, and --arch names {others}", "leave --arch out")
    # the device says more than its architecture
    narrowed = {place.arch for place in named.values()}
    alone = [p for p in known if p.device not in named and (p.device or p.arch not in narrowed)]
    return [*alone, *named.values()]


def _place(name: str, *vocabularies: Vocabulary) -> Place:
    """What a text names, an architecture or a product. Raises `BadInput` for an unknown name."""
    found = next(((v, arch) for v in vocabularies if (arch := v.architecture(name)) is not None), None)
    if found is None:
        raise BadInput(f"unknown architecture {name!r}", vocabularies[0].help_for("arch", name))
    vocabulary, arch = found
    product = vocabulary.product(name)
    return Place(arch.platform, arch.name, vocabulary.device_of(product) if product else None, product)


def release_of(engine: str) -> str:
    """The bundled registry of an engine's release, such as vllm-0.33.0 for vllm. Raises `BadInput` for any other."""
    from attnreg.compile.inputs.bundled import bundled_overlays, bundled_registries, help_for_registry, release_name

    name, known = release_name(engine), [name for name in bundled_registries() if name != "default"]
    if name in known or name in bundled_overlays():
        return name
    if os.path.exists(engine):
        raise BadInput(f"--engine {engine} is a file or a directory", f"give --registry {engine}")
    if engine == "default":
        raise BadInput("--engine default names no engine", "leave it out: then attnreg's own kernels are asked")
    raise BadInput(f"--engine {engine}: no release of an engine has that name", help_for_registry(engine, known))


def engine_notes(engine: str | None, registry: Registry, *, own: bool) -> list[str]:
    """How to ask for an engine's choice, if the question names no engine, or not the release that is installed here.

    engine: the name of ``--engine``. own: whether attnreg's own registry answers, because the question names none.
    """
    import importlib.metadata

    from attnreg.compile.inputs.bundled import bundled_registries, engines, release_name
    from attnreg.selection.wording import engine_of, engine_words

    notes = []
    for name in engines() if own else [engine_of(registry)] if engine in engines() else []:
        try:
            version = importlib.metadata.version(name)
        # another package's broken metadata is no reason to fail
        except Exception:
            continue
        release = release_name(f"{name}-{'.'.join(version.split('.')[:2])}")
        if release not in bundled_registries():
            notes.append(f"{engine_words(name, version)} is installed here, and no table of attnreg is about it")
        elif release != registry.base:
            notes.append(f"{engine_words(name, version)} is installed here: for its choice give --engine {release}")
    if own and not notes:
        named = " or ".join(f"--engine {name}" for name in reversed(engines()))
        notes.append(f"these are attnreg's own kernels: for an engine's choice give {named}")
    return notes
