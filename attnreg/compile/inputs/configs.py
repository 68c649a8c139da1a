"""Finds the config.json that a name stands for: a file, a model in the hub's cache on disk, or one of the examples."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from attnreg.compile.inputs.bundled import bundled_configs
from attnreg.errors import RequestError, escaped, nearest

_ID = re.compile(r"(?:(?P<owner>\w[\w.-]*)/)?(?P<name>\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_ADDRESS = re.compile(r"\w+://(?P<host>[^/]*)/?(?P<path>.*)")
_HUB = ("huggingface.co", "www.huggingface.co", "hf.co")
_SOURCES = "give a config.json, the directory of one, or a model in the hub's cache by its id (nothing is downloaded)"


def find_config(text: str, others: Iterable[str] = ()) -> str:
    """The path of the config that a text names: an existing path, else a model in the hub's cache, else an example.

    The example of an id is that of the same name, of any owner (`example_note` says so).

    A model is named by its id (openai/gpt-oss-120b), with or without its owner, and with an optional revision after
    ``@``. others: further words that the option takes. Raises `RequestError` for any other text; the help lists the
    sources of configs.
    """
    if os.path.lexists(text):
        if os.path.isdir(text) and not os.path.lexists(os.path.join(text, "config.json")):
            raise RequestError(f"{text} is a directory without a config.json", _SOURCES)
        return text
    address = _ADDRESS.fullmatch(text)
    if address is not None:
        owner, _, rest = address["path"].partition("/")
        model = f"{owner}/{rest.partition('/')[0]}" if address["host"] in _HUB and rest else ""
        hint = f"{_fetching(model)}; then give {model}" if model else "download it, and give the file"
        raise RequestError(f"{text} is an address, and nothing is downloaded", hint)
    named = None if text.endswith(".json") else _ID.fullmatch(text)
    if named is None:
        raise RequestError(f"{text or repr(text)}: no such file", _SOURCES)
    cached = list(_cached(named["owner"], named["name"]))
    # an exact match of the id wins over other owners and other spellings
    cached = [folder for folder in cached if _id(folder) == text.partition("@")[0]] or cached
    if len(cached) > 1:
        raise RequestError(f"{text} is several models of the hub's cache", f"give one: {', '.join(map(_id, cached))}")
    if cached:
        return str(_config(cached[0], named["revision"] or "main"))
    # an example under an id is that of the same name, as `known_config` takes it
    example = bundled_configs().get(text if named["revision"] else named["name"])
    if example is not None:
        return str(example)
    near = nearest(text, [*model_names(), *others])
    fetching = _fetching(text.partition("@")[0], named["revision"]) if named["owner"] else _SOURCES
    hint = f"did you mean `{near}`? Or: {fetching}" if near else fetching
    raise RequestError(f"{text}: no such file, and no such model in the hub's cache, {hub_cache()}", hint)


def config_path(config: str) -> str:
    """The path of a config, as `find_config` finds it; a path, and the name of a file, are returned unchanged."""
    named = not os.path.lexists(config) and not config.endswith(".json")
    return find_config(config) if named else config


def known_config(names: Iterable[str]) -> tuple[str, str] | None:
    """The config of the first of some names that the hub's cache or the examples have, and a note on where it is from.

    The names come from a log: none is read as a path. None where no name is known.
    """
    names = list(names)
    for name in names:
        parts = _ID.fullmatch(name)
        cached = list(_cached(parts["owner"], parts["name"])) if parts else []
        cached = [folder for folder in cached if _id(folder) == name] or cached
        if len(cached) == 1:
            with suppress(RequestError):
                return str(_config(cached[0], "main")), f"{names[0]} is {_id(cached[0])} of the hub's cache"
    for name in names:
        example = bundled_configs().get(name)
        if example is not None:
            return str(example), example_note(names[0], str(example))
    return None


def example_note(model: str, config: str) -> str:
    """A note on a config that `find_config` found for a model; "" for the model's own file."""
    name = Path(config).parent.name
    example = bundled_configs().get(name)
    if example is None or str(example) != config or model in (name, config):
        return ""
    return f"the config of {model} is taken to be the example {name} that comes with attnreg"


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
        there = f"give {_id(folder)}@REVISION; there are {', '.join(commits)}"
        raise RequestError(f"the hub's cache has {what} of {_id(folder)}", there if commits else _fetching(_id(folder)))
    config = found[0] / "config.json"
    if not config.is_file():
        raise RequestError(f"{found[0]} has no config.json", _fetching(_id(folder), revision))
    return config


def _fetching(model: str, revision: str | None = None) -> str:
    at = f" --revision {revision}" if revision not in (None, "main") else ""
    return f"`hf download {model} config.json{at}` puts it into the hub's cache"
