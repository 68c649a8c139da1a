"""What pages call in Python: a command of attnreg, and the data that the picker's evaluator reads."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path

from attnreg.cli.commands import main
from attnreg.compile.inputs.bundled import bundled_configs
from attnreg.errors import RegistryError
from attnreg.loader import load_registry
from attnreg.models.fields import ConfigError
from picker.models import Reading, asks, model_document
from picker.registries import page_document


def command(*arguments: str, width: int = 110) -> str:
    """A command's exit status, output and messages, as JSON."""
    out, err = io.StringIO(), io.StringIO()
    os.environ["COLUMNS"] = str(width)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    return json.dumps({"status": status, "out": out.getvalue(), "err": err.getvalue()})


def write(name: str, text: str) -> str:
    """Write a file that a command is to read."""
    Path(name).write_text(text, encoding="utf-8")
    return "null"


def config(name: str, text: str, registry: str, overlay: str) -> str:
    """The document of a model, from the text of its config.json; or ``error``, the message of what is wrong with it."""
    return _model(json.loads(write_config(name, text)), registry, overlay)


def write_config(name: str, text: str) -> str:
    """Write the config.json of a model that a command is to read; its directory, which names the model."""
    folder = Path("/configs", name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return json.dumps(str(folder))


def bundled(name: str, registry: str, overlay: str) -> str:
    """The same of a bundled model, for an overlay with KV dtypes of its own."""
    return _model(str(bundled_configs()[name]), registry, overlay)


def _model(path: str, registry: str, overlay: str) -> str:
    try:
        return json.dumps(model_document(Reading(path), load_registry(registry, [overlay] if overlay else [])))
    except (ConfigError, RegistryError) as e:
        return json.dumps({"error": str(e)})


def overlay(name: str, text: str, registry: str) -> str:
    """The document of a registry with an overlay on it; or ``error``, with the line and column of each problem.

    ``alike`` says whether its models ask for the same as those of the registry: their words are the same.
    """
    # the command names it so too, and so do the lines that are quoted
    Path(name).write_text(text, encoding="utf-8")
    try:
        laid = load_registry(registry, [name])
        return json.dumps({"document": page_document(laid), "alike": asks(laid) == asks(load_registry(registry))})
    except RegistryError as e:
        return json.dumps({"error": str(e)})
