"""Writes what docs/ derives from the default registry: tables, explanations, JSON Schemas and the README's picture.

`python tools/gen_docs.py` writes them; with `--check` it prints what it would change, and exits with 1 if anything.
"""

from __future__ import annotations

import argparse
import difflib
import io
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import docs_evidence
import docs_model_schema
import docs_models
import docs_page
import docs_schemas
import docs_speed
from rich.console import Console
from rich.terminal_theme import TerminalTheme

from attnreg.cli import commands as cli
from attnreg.cli.options import platforms_of, questions_of
from attnreg.errors import RegistryError
from attnreg.explain import explain, render
from attnreg.loader import bundled_registries, load_registry
from attnreg.registry import Registry

COMMAND = "python tools/gen_docs.py"
PICTURE = "docs/images/explain.svg"
MODEL = "examples/configs/gpt-oss-120b"
# blocks of docs/explain.md, and the arguments of `attnreg explain` whose answer each one shows
EXAMPLES = {
    "model": f"--platform rocm --arch gfx942 --model {MODEL}",
    "platforms": "--platform rocm --attention mla --phase prefill --head-size 192",
    "by-name": "--arch sm90 --head-size 128 --backend FLASHMLA",
}
WIDTH = 104
# background, foreground, and the eight colours of a terminal: readable on dark, whatever surrounds the picture
_COLOURS = (
    (22, 27, 34),
    (230, 237, 243),
    [
        *((72, 79, 88), (255, 123, 114), (86, 211, 100), (227, 179, 65)),
        *((121, 192, 255), (210, 168, 255), (86, 212, 221), (230, 237, 243)),
    ],
)
_BLOCK = re.compile(r"(<!-- begin generated: (\S+) -->\n).*?(<!-- end generated: (\S+) -->\n)", re.DOTALL)
_MARKER = re.compile(r"<!-- (?:begin|end) generated")


def main(arguments: list[str] | None = None) -> int:
    """Entry point: the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 and a diff if docs are stale")
    check = parser.parse_args(arguments).check
    root = Path(__file__).resolve().parent.parent
    generated = outputs(root)
    if check:
        difference = stale(root, generated)
        print(difference or "docs are up to date")
        return 1 if difference else 0
    for name, text in generated.items():
        path = root / name
        if _read(path) != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
            print(f"wrote {name}")
    return 0


def stale(root: Path, generated: Mapping[str, str] | None = None) -> str:
    """What the generator would change in the checkout at ``root``, as a diff and the command; empty if nothing.

    generated: what `outputs` gave for it, where it is at hand.
    """
    differences = []
    for name, text in (outputs(root) if generated is None else generated).items():
        before = _read(root / name).splitlines(keepends=True)
        lines = difflib.unified_diff(
            before, text.splitlines(keepends=True), f"{name} (as it is)", f"{name} (generated)"
        )
        differences += [line if line.endswith("\n") else f"{line}\n" for line in lines]
    return "".join(differences) + f"\nThe docs do not say what the registry says. Run: {COMMAND}" if differences else ""


def outputs(root: Path) -> dict[str, str]:
    """Path below ``root`` of every generated file -> its text."""
    registry = load_registry("default")
    pages = {
        "docs/attention_backends.md": {
            **docs_page.blocks(registry),
            "evidence": docs_evidence.evidence_block(registry),
        },
        "docs/explain.md": {name: transcript(root, registry, text) for name, text in EXAMPLES.items()},
        "docs/writing_data.md": {"errors": refusal(_read(root / "docs/writing_data.md"))},
    }
    for name, path in bundled_registries().items():
        if name != "default":
            pages[f"docs/engines/{path.name}.md"] = docs_page.blocks(load_registry(name))
    pages["docs/engines/vllm-0.20-to-0.33.md"] = docs_page.change_blocks("vllm-0.20.0", "vllm-0.33.0")
    pages["docs/running.md"] = {"speed": docs_speed.speed_block(root)}
    pages["docs/model_families.md"] = docs_models.family_blocks()
    pages["docs/models.md"] = docs_models.matrix_blocks(root)
    out = {name: fill(name, _read(root / name), blocks) for name, blocks in pages.items()}
    for name, text in docs_schemas.schemas(registry).items():
        out[f"docs/schema/{name}.schema.json"] = text
    out["docs/schema/models.schema.json"] = json.dumps(docs_model_schema.model_schema(), indent=2) + "\n"
    return out | {PICTURE: picture(root, registry)}


def fill(name: str, page: str, blocks: dict[str, str]) -> str:
    """A page with the text between its markers replaced. Raises ValueError if markers and blocks do not correspond."""
    found = [(match[2], match[4]) for match in _BLOCK.finditer(page)]
    names = [begin for begin, _ in found]
    problems = [f"`{begin}` is closed by the marker of `{end}`" for begin, end in found if begin != end]
    problems += [
        f"the markers of `{begin}` are there twice" for begin in dict.fromkeys(names) if names.count(begin) > 1
    ]
    problems += [f"no block is called `{begin}`" for begin in names if begin not in blocks]
    problems += [f"markers are missing for `{block}`" for block in blocks if block not in names]
    if len(_MARKER.findall(page)) != 2 * len(found):
        problems.append("a marker stands alone, or not on a line of its own")
    if problems:
        raise ValueError(f"{name}: " + "; ".join(problems))
    return _BLOCK.sub(lambda match: f"{match[1]}\n{blocks[match[2]]}\n\n{match[3]}", page)


def transcript(root: Path, registry: Registry, arguments: str) -> str:
    """A command and what it prints, as Markdown."""
    console = Console(width=WIDTH, file=io.StringIO(), color_system=None, highlight=False, _environ={})
    with console.capture() as capture:
        _explain(root, registry, arguments, console)
    lines = [line.rstrip() for line in capture.get().strip().split("\n")]
    return "\n".join(["```console", f"$ attnreg explain {arguments}", *lines, "```"])


def refusal(page: str) -> str:
    """What the loader says of a page's example of an overlay with mistakes, as Markdown."""
    example = re.search(r"^```yaml error\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    if example is None:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        overlay = Path(folder, "mine.yaml")
        overlay.write_text(example[1], encoding="utf-8")
        try:
            load_registry("default", [overlay])
        except RegistryError as e:
            return f"```text\n{str(e).replace(str(overlay), overlay.name)}\n```"
    raise ValueError("the example of an overlay with mistakes has none")


def picture(root: Path, registry: Registry) -> str:
    """What `attnreg explain` prints of a model, as an SVG that needs no font from elsewhere."""
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
    _explain(root, registry, EXAMPLES["model"], console)
    svg = console.export_svg(
        title=f"attnreg explain {EXAMPLES['model']}",
        theme=TerminalTheme(*_COLOURS),
        code_format=(docs_page.TEMPLATES / "terminal.svg").read_text(encoding="utf-8"),
        font_aspect_ratio=0.6,
        unique_id="explain",
    )
    # no clip for each line, no text that is only a line's end, and one text a line: a change is a change of few lines
    svg = re.sub(r' clip-path="url\(#explain-line-\d+\)"|<text[^>]*>\s*</text>', "", svg)
    svg = svg.replace("</text><text", "</text>\n<text")
    return "\n".join(line.strip() for line in svg.splitlines() if line.strip()) + "\n"


def _explain(root: Path, registry: Registry, arguments: str, console: Console) -> None:
    """Print what the command does; files are found from ``root``."""
    words = [str(root / word) if word.startswith("examples/") else word for word in arguments.split()]
    options = cli.explain.make_context("explain", words).params
    platforms = platforms_of(registry, options["platform"], options["arch"], options["flags"], options["packages"])
    questions, title, notes, memory = questions_of(options, platforms, registry)
    backend = options["backend"]
    render(explain(questions, platforms, registry, backend=backend, title=title, notes=notes, memory=memory), console)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())
