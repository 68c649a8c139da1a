"""What pages call in Python, each function with texts, answering with JSON."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import attnreg.loader
from attnreg.cli.commands import main
from attnreg.compile.cache import unpickled
from attnreg.errors import RegistryError
from attnreg.loader import load_registry
from attnreg.registry import Registry
from picker import asking
from picker.lists import lists

# where the archive of a page has the bundled registries, compiled
_COMPILED = Path(__file__).resolve().parent / "compiled"


def _bundled(name: str) -> Registry:
    file = _COMPILED / name
    return unpickled(file.read_bytes()) if file.is_file() else load_registry(name)


def _cached(name: str, compiled: Callable[[], Registry]) -> Registry:
    return asking.bundled(name) if (_COMPILED / name).is_file() else compiled()


asking.load_with(_bundled)


def start() -> str:
    """Answer one question, so that what answers is imported before the page says that Python is ready."""
    # a command takes the compiled registries too: to compile one takes a page many seconds
    vars(attnreg.loader)["cached"] = _cached
    told = answer("--arch", next(iter(asking.bundled("default").vocabulary.architectures)), "--model", "gpt-oss-20b")
    # what is loaded stays: the collector need not look through it during each answer
    gc.freeze()
    return told


def answer(*words: str) -> str:
    """What a page shows of the answer to the options of `attnreg explain`; or ``error``, the command's message."""
    return json.dumps(asking.answer(words))


def command(*arguments: str, width: int = 110) -> str:
    """A command's exit status, output and messages."""
    out, err = io.StringIO(), io.StringIO()
    os.environ["COLUMNS"] = str(width)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    return json.dumps({"status": status, "out": out.getvalue(), "err": err.getvalue()})


def write(name: str, text: str) -> str:
    """Write a file that a command is to read."""
    Path(name).write_text(text, encoding="utf-8")
    return "null"


def write_config(name: str, text: str) -> str:
    """Write the config.json of a model that a command is to read; its directory, which names the model."""
    folder = Path("/configs", name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return json.dumps(str(folder))


def overlay(name: str, text: str, registry: str) -> str:
    """The form's lists of a registry with an overlay on it; or ``error``, with the line and column of each problem."""
    # the command names it so too, and so do the lines that are quoted
    Path(name).write_text(text, encoding="utf-8")
    try:
        return json.dumps({"lists": lists(load_registry(registry, [name]))})
    except RegistryError as e:
        return json.dumps({"error": str(e)})
