"""Options that several commands share. A command gets each set of them as one object of `attnreg.cli.inputs`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import click

from attnreg.cli.command import option as _option
from attnreg.cli.inputs import BackendInputs, PlatformInputs, RegistryInputs, RequestInputs
from attnreg.language.facets import CORE
from attnreg.language.facets import options as facet_options

# facets of a request that people set; `--help` leaves the options of other facets out
_OFTEN_SET = ("dtype", "kv_dtype", "head_size", "block_size")
Command = Callable[..., Any]
Option = Callable[[Command], Command]


outside_option = _option(
    "--allow-outside",
    is_flag=True,
    rare=True,
    help="Let overlays and locks name files outside their own directory.",
    section="Registry",
)


def registry_options(command: Command) -> Command:
    """Adds ``--engine``, ``--registry``, ``--overlay``, ``--trust``; the command gets ``registry_inputs``."""
    option = functools.partial(_option, section="Registry")
    options = [
        option("--engine", metavar="RELEASE", help="Ask what an engine chooses: vllm, vllm-0.33, sglang."),
        option(
            "--registry", metavar="NAME|DIR|FILE", help="Ask another registry: a name, a directory, or an overlay file."
        ),
        option("--overlay", multiple=True, metavar="FILE", help="Lay a file over the registry; repeatable."),
        option("--trust", multiple=True, metavar="PACKAGE", rare=True, help="Let rows import modules of this package."),
        outside_option,
    ]
    return _with_options(command, options, "registry_inputs", functools.partial(_take, RegistryInputs))


def platform_options(command: Command) -> Command:
    """Adds the options of a platform, ``--platform`` to ``--package``; the command gets them as ``platform_inputs``."""
    option = functools.partial(_option, section="Platform")
    options = [
        option("--platform", metavar="WORD", help=CORE["platform"].help),
        option("--arch", multiple=True, metavar="WORD", help=CORE["arch"].help),
        option("--device-name", "device", multiple=True, metavar="WORD", rare=True, help=CORE["device"].help),
        option("--flag", "flags", multiple=True, metavar="WORD", rare=True, help=CORE["flags"].help),
        package_option(CORE["packages"].help),
    ]
    return _with_options(command, options, "platform_inputs", functools.partial(_take, PlatformInputs))


def request_options(command: Command) -> Command:
    """Adds the options of a model and one for every facet of a request; the command gets them as ``request_inputs``."""
    length = _option(
        "--length",
        "lengths",
        type=click.IntRange(min=1),
        multiple=True,
        metavar="N",
        help="Count the KV cache at this many tokens; repeatable.",
        section="Model",
    )
    model = _option(
        "--model", metavar="CONFIG", help="A config.json, its directory, or an id in the hub's cache.", section="Model"
    )
    return _request_options(command, model, length)


def models_options(command: Command) -> Command:
    """Adds the options of `request_options` for any number of models, except ``--length``."""
    text = "A config.json, its directory, or an id in the hub's cache; repeatable."
    return _request_options(
        command, _option("--model", "models", multiple=True, metavar="CONFIG", help=text, section="Model")
    )


def _request_options(command: Command, *models: Option) -> Command:
    model, option = (functools.partial(_option, section=section) for section in ("Model", "Request"))
    positive = click.IntRange(min=1)
    options = [
        *models,
        model(
            "--draft",
            metavar="CONFIG",
            help="The model that drafts for it, or mtp: its own MTP layers. They have the draft role.",
        ),
        model(
            "--draft-kv-dtype",
            metavar="WORD",
            rare=True,
            help="How the draft's KV cache is stored, if unlike the model's.",
        ),
        model("--tp", type=positive, default=1, metavar="N", help="Ranks of tensor parallelism; heads per rank."),
        model("--layer", type=click.IntRange(min=0), metavar="I", rare=True, help="Only this layer of the model."),
    ]
    for kind, shape in (("word", {"metavar": "WORD"}), ("integer", {"metavar": "N", "type": int})):
        options += [
            option(_flag(facet.name), help=facet.help, rare=facet.name not in _OFTEN_SET, **shape)
            for facet in facet_options(kind)
        ]
    options += [
        option("--feature", "features", multiple=True, metavar="WORD", help=CORE["features"].help),
        option("--set", "extra", multiple=True, metavar="FACET=VALUE", rare=True, help="Another facet, by name."),
    ]
    return _with_options(command, options, "request_inputs", _take_request)


def backend_options(command: Command) -> Command:
    """Adds the options that name backends, ``--prefer`` and ``--deny``, as ``backend_inputs``."""
    option = functools.partial(_option, section="Backend", metavar="NAME")
    options = [
        option("--backend", help="Ask for this backend, or NAME/VARIANT, by name."),
        option("--draft-backend", rare=True, help="Ask for this backend for the draft's layers alone."),
        option("--vision-backend", rare=True, help="Ask for this backend for vision towers alone."),
        option("--prefill-backend", rare=True, help="Ask for this backend for the prompts of MLA alone."),
        option("--prefer", help="Take this backend where it is valid."),
        option("--deny", multiple=True, help="Never this backend; repeatable."),
    ]
    return _with_options(command, options, "backend_inputs", functools.partial(_take, BackendInputs))


def package_option(text: str) -> Option:
    """Adds ``--package``, described by ``text``."""
    metavar = "NAME[==VERSION]"
    return _option("--package", "packages", multiple=True, metavar=metavar, rare=True, help=text, section="Platform")


json_option = _option("--json", "as_json", is_flag=True, help="Print JSON.")


def _with_options(
    command: Command, options: Sequence[Option], name: str, take: Callable[[dict[str, Any]], object]
) -> Command:
    """The command with more options; it gets their values as one argument ``name``.

    ``take`` removes the values of these options from those of all options, and returns the argument.
    """

    @functools.wraps(command)
    def with_argument(**values: Any) -> object:
        return command(**{name: take(values)}, **values)

    result: Command = with_argument
    for add_option in reversed(options):
        result = add_option(result)
    return result


def _take(kind: type[Any], values: dict[str, Any]) -> object:
    """An instance of a dataclass from the options in ``values``. The values that it uses are removed from the dict."""
    return kind(**{f.name: values.pop(f.name) for f in fields(kind) if f.name in values})


def _take_request(values: dict[str, Any]) -> object:
    """A `RequestInputs`; its values are removed from ``values``."""
    facets = {f.name: values.pop(f.name) for kind in ("word", "integer") for f in facet_options(kind)}
    values["facets"] = {name: value for name, value in facets.items() if value is not None}
    return _take(RequestInputs, values)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
