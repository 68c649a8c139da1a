"""The generated blocks of docs/explain.md, and the README's picture: the output of `attnreg explain` for examples."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from attnreg.cli.names import engine_notes
from attnreg.compile.inputs.bundled import release_name
from attnreg.explain import Question, explain, render
from attnreg.explain.answers import Explanation, title_of
from attnreg.models.questions import ModelOptions, model_questions
from attnreg.platforms import Platform
from attnreg.registry import Registry
from attnreg.request import AttentionRequest
from attnreg.selection.point import placed
from attnreg.selection.wording import request_words
from docs.page import TEMPLATES
from docs.registries import bundled

PICTURE = "docs/images/explain.svg"
WIDTH = 104
# background, foreground, and a terminal's eight colours: the picture has its own dark background on every page
_COLOURS = (
    (22, 27, 34),
    (230, 237, 243),
    [
        *((72, 79, 88), (255, 123, 114), (86, 211, 100), (227, 179, 65)),
        *((121, 192, 255), (210, 168, 255), (86, 212, 221), (230, 237, 243)),
    ],
)


@dataclass(frozen=True)
class Example:
    """A run of `attnreg explain`: the arguments that a page shows, and their values for the library.

    ``subject`` is a request, or the path of a model's config in the checkout. ``archs`` are architectures or products,
    none for all of the platform's architectures. ``engine`` is that of ``--engine``, "" for attnreg's own registry.
    """

    arguments: str
    platform: str
    subject: AttentionRequest | str
    archs: tuple[str, ...] = ()
    backend: str | None = None
    engine: str = ""

    def explanation(self, root: Path, registry: Registry) -> Explanation:
        """The explanation of this example. ``root`` is the checkout."""
        registry = bundled(release_name(self.engine)) if self.engine else registry
        own = engine_notes(None, registry, own=not self.engine)
        archs = self.archs or [arch.name for arch in registry.vocabulary.architectures_of(self.platform)]
        platforms = [placed(Platform(self.platform, arch), registry) for arch in archs]
        choices = [f"backend {self.backend}"] if self.backend else []
        if isinstance(self.subject, AttentionRequest):
            what = " · ".join(request_words(self.subject))
            title = title_of(platforms, registry, what, choices=choices)
            asked = [Question(self.subject, what)]
            return explain(asked, platforms, registry, backend=self.backend, title=title, notes=own)
        model = model_questions(str(root / self.subject), ModelOptions(), registry)
        return explain(
            model.questions,
            platforms,
            registry,
            backend=self.backend,
            title=title_of(platforms, registry, model.title, choices=choices),
            notes=(*own, *model.notes),
            memory=model.memory,
        )


_MODEL = "examples/configs/gpt-oss-120b"
# block of docs/explain.md -> its example
EXAMPLES = {
    "model": Example(f"--engine vllm --arch MI300X --model {_MODEL}", "rocm", _MODEL, ("MI300X",), engine="vllm"),
    "platforms": Example(
        "--platform rocm --attention mla --phase prefill --head-size 192",
        "rocm",
        AttentionRequest(attention="mla", phase="prefill", head_size=192),
    ),
    "by-name": Example(
        "--arch sm90 --head-size 128 --backend FLASHMLA",
        "cuda",
        AttentionRequest(head_size=128),
        ("sm90",),
        backend="FLASHMLA",
    ),
}


def transcripts(root: Path, registry: Registry) -> dict[str, str]:
    """Name of each generated block -> a command and its output, as Markdown."""
    return {
        name: transcript(f"attnreg explain {example.arguments}", partial(render, example.explanation(root, registry)))
        for name, example in EXAMPLES.items()
    }


def transcript(command: str, printed: Callable[[Console], None]) -> str:
    """A command and its output, as Markdown. printed: the function that prints the output."""
    console = Console(width=WIDTH, file=io.StringIO(), color_system=None, highlight=False, _environ={})
    with console.capture() as capture:
        printed(console)
    lines = [line.rstrip() for line in capture.get().strip().split("\n")]
    return "\n".join(["```console", f"$ {command}", *lines, "```"])


def picture(root: Path, registry: Registry) -> str:
    """The output of `attnreg explain` for a model, as an SVG."""
    example = EXAMPLES["model"]
    return terminal(
        f"attnreg explain {example.arguments}", partial(render, example.explanation(root, registry)), "explain"
    )


def terminal(title: str, printed: Callable[[Console], None], name: str) -> str:
    """The output of a command as an SVG that loads no font.

    printed: the function that prints the output. name: the beginning of the identifiers in the picture.
    """
    console = Console(
        record=True,
        width=WIDTH,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
        # neither NO_COLOR nor COLUMNS may change the picture
        _environ={},
    )
    printed(console)
    svg = console.export_svg(
        title=title,
        theme=TerminalTheme(*_COLOURS),
        code_format=(TEMPLATES / "terminal.svg").read_text(encoding="utf-8"),
        font_aspect_ratio=0.6,
        unique_id=name,
    )
    # without clip paths and empty texts, and with one text a line, a small change of the output is a small diff
    svg = re.sub(rf' clip-path="url\(#{name}-line-\d+\)"|<text[^>]*>\s*</text>', "", svg)
    svg = svg.replace("</text><text", "</text>\n<text")
    return "\n".join(line.strip() for line in svg.splitlines() if line.strip()) + "\n"
