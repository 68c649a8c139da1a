"""The pages of docs/commands/: the help of each command of attnreg, with an example that is run in this checkout."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import click

from attnreg.cli.command import HELP_ALL
from attnreg.cli.commands import cli
from docs.tasks import LOGS, START, output

FOLDER = "docs/commands"
_WIDTH = 100
_MODEL = "--model examples/configs/gpt-oss-120b"


class CommandExample(NamedTuple):
    """The example of a command: its arguments, what it shows, its exit status, and a page with more.

    With ``status`` None the example is not run, because its output depends on the machine or on the version of click.
    With ``writes`` it runs in an empty directory.
    """

    arguments: str
    shows: str
    status: int | None = 0
    more: str = ""
    writes: bool = False


def _same(block: str) -> str:
    """The arguments of the command of another page's block, which is run once for both."""
    return {**LOGS, **START}[block].partition(" ")[2]


# command -> its example
EXAMPLES = {
    "check": CommandExample(_same("start-recipe"), "A recipe whose backend the run cannot have:", 1, "findings"),
    "completion": CommandExample("bash", 'The shell reads the script: `eval "$(attnreg completion bash)"`.', None),
    "defaults": CommandExample(
        "--release vllm-0.33 --arch sm90 --arch sm100 --architecture GptOssForCausalLM",
        "What vLLM takes for one architecture of models on two GPUs:",
    ),
    "diff": CommandExample(
        f"vllm-0.20.0 vllm-0.33.0 --arch sm120 {_MODEL}", "What moves for a model between two releases:", 1, "explain"
    ),
    "doctor": CommandExample("", "It shows GPUs, packages, flags, and each backend that is usable here.", None),
    "explain": CommandExample(_same("start-model"), "Which backend each layer gets, and why:", 0, "explain"),
    "help": CommandExample("models", "The same as `attnreg models --help`:"),
    "list": CommandExample("--platform xpu", "Backends of Intel's GPUs, and the orders:", 0, "attention_backends"),
    "lock": CommandExample(
        "--arch MI300X --model gpt-oss-120b -o attnreg.lock",
        "The file keeps the selections, and `attnreg check --lock attnreg.lock` compares them later:",
        writes=True,
    ),
    "models": CommandExample("gpt_oss", "The layers of a family's class:", 0, "models"),
    "new": CommandExample(
        "backend ACME_ATTN", "A package in the folder acme-attn:", more="writing_backends", writes=True
    ),
    "plan": CommandExample(_same("start-plan"), "Whether the run starts, and with what:", 0, "plan"),
    "show": CommandExample("cuda/hopper-sinks", "One order, with its reason and its measurement:", 0, "writing_data"),
    "tune": CommandExample(
        f"{_MODEL} --minutes 5",
        "It writes tuned.yaml, an overlay, from times on this machine.",
        None,
        "contributing_measurements",
    ),
    "upgrade": CommandExample(
        f"--from vllm-0.20 --to vllm-0.33 --arch sm120 {_MODEL}", "What an upgrade moves, layer by layer:", 1
    ),
    "verify": CommandExample(
        "TORCH_SDPA --device cpu", "It proves every claim of a backend by a run.", None, "writing_backends"
    ),
    "why": CommandExample(_same("why-chosen"), "A log, explained line by line:", 0, "why"),
}


def command_pages(root: Path) -> dict[str, str]:
    """Path of each page of docs/commands/ -> its text. Raises ValueError for a command without an example."""
    context = click.Context(cli, info_name="attnreg")
    commands = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    if commands.keys() != EXAMPLES.keys():
        raise ValueError(
            f"commands without an example, or examples without a command: {commands.keys() ^ EXAMPLES.keys()}"
        )
    pages = {f"{FOLDER}/README.md": _index(commands)}
    for name, command in commands.items():
        assert command is not None
        pages[f"{FOLDER}/{name}.md"] = _generated(name, _page(root, name, command, EXAMPLES[name]))
    return pages


def help_of(name: str, command: click.Command) -> str:
    """The whole help of a command."""
    context = click.Context(
        command, info_name=f"attnreg {name}", terminal_width=_WIDTH, help_option_names=["-h", "--help"]
    )
    context.meta[HELP_ALL] = True
    return "\n".join(line.rstrip() for line in command.get_help(context).splitlines())


def _page(root: Path, name: str, command: click.Command, example: CommandExample) -> str:
    line = f"attnreg {name} {example.arguments}".rstrip()
    shown = [f"$ {line}"]
    if example.status is not None:
        with tempfile.TemporaryDirectory() as folder:
            there = folder if example.writes else ""
            printed = output(root, line.removeprefix("attnreg "), status=example.status, folder=there)
        shown += [printed] if printed else []
    more = f"More: [{example.more}](../{example.more}.md). " if example.more else ""
    return "\n".join(
        [
            command.get_short_help_str(200),
            *("", example.shows, "", "```console", *shown, "```", "", "## Options", "", "```text"),
            *(help_of(name, command), "```", "", f"{more}[All commands](README.md)."),
        ]
    )


def _index(commands: dict[str, click.Command | None]) -> str:
    rows = [
        f"| [`attnreg {name}`]({name}.md) | {command.get_short_help_str(200)} |"
        for name, command in commands.items()
        if command is not None
    ]
    text = "\n".join(
        ["Each page has an example and all options.", "", "| command | what it does |", "| --- | --- |", *rows]
    )
    return _generated("", text)


def _generated(name: str, text: str) -> str:
    """A page whose whole text is generated."""
    title = f"`attnreg {name}`" if name else "The commands of attnreg"
    return f"# {title}\n\n<!-- begin generated: command -->\n\n{text}\n\n<!-- end generated: command -->\n"
