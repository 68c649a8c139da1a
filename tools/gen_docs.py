"""Generates parts of docs/ from the bundled registries: tables, explanations, JSON Schemas, the README's picture.

`python tools/gen_docs.py` writes them. With `--check` it prints a diff and exits with 1 if they are stale. With
`--site FOLDER` it builds the static site there instead.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import docs.api
import docs.evidence
import docs.exactness
import docs.explain
import docs.field_problems
import docs.findings
import docs.kv_quality
import docs.markdown
import docs.models
import docs.page
import docs.plan
import docs.runs
import docs.schemas
import docs.selections
import docs.site_scores
import docs.speed
import docs.speed_report
import docs.stacks
import docs.tasks
import docs.tiles
import docs.transformers
import docs_site
from docs.registries import bundled

import docs.commands
from attnreg.environment import PLUGINS_VARIABLE
from attnreg.errors import RegistryError
from attnreg.loader import load_registry
from attnreg.packages.records import RecordsError

COMMAND = "python tools/gen_docs.py"
PLUGIN = "examples/attnreg-plugin"
PLUGIN_FILES = {
    "pyproject": "pyproject.toml",
    "data": "acme_attn/attnreg.yaml",
    "module": "acme_attn/kernels.py",
    "engine": "acme_attn/vllm/attnreg.yaml",
}


def main(arguments: list[str] | None = None) -> int:
    """Entry point: the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 and a diff if docs are stale")
    parser.add_argument("--site", metavar="FOLDER", type=Path, help="build the static site there, and nothing else")
    options = parser.parse_args(arguments)
    check = options.check
    root = Path(__file__).resolve().parent.parent
    if options.site:
        try:
            with without_plugins:
                files = docs_site.build(root, options.site)
        except ValueError as e:
            parser.error(str(e))
        print(f"wrote {len(files)} files to {options.site}")
        return 0
    try:
        generated = outputs(root)
    except RecordsError as e:
        print(f"{e}\nNo docs are written from such records.")
        return 1
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
    """The diff that the generator would make in the checkout at ``root``, with its command; empty if there is none.

    generated: the result of `outputs`, if the caller has it.
    """
    differences = []
    for name, text in (outputs(root) if generated is None else generated).items():
        before = _read(root / name).splitlines(keepends=True)
        lines = difflib.unified_diff(
            before, text.splitlines(keepends=True), f"{name} (as it is)", f"{name} (generated)"
        )
        differences += [line if line.endswith("\n") else f"{line}\n" for line in lines]
    return "".join(differences) + f"\nThe docs do not say what the registry says. Run: {COMMAND}" if differences else ""


without_plugins = mock.patch.dict(os.environ, {PLUGINS_VARIABLE: "off"})


@without_plugins
def outputs(root: Path) -> dict[str, str]:
    """Path below ``root`` of every generated file -> its text. Plugins that are installed here do not change it."""
    registry = bundled("default")
    pages = {
        **docs.page.pages(registry),
        "docs/proofs.md": docs.evidence.evidence_blocks(registry),
        "docs/explain.md": docs.explain.transcripts(root, registry),
        "docs/plan.md": docs.plan.plan_blocks(root),
        "docs/writing_data.md": {"errors": refusal(_read(root / "docs/writing_data.md"))},
    }
    pages["docs/exactness.md"] = docs.exactness.exactness_block(root)
    pages["docs/speed.md"] = docs.speed_report.report_blocks(root)
    pages["docs/tiles.md"] = {"tiles": docs.tiles.tiles_block()}
    pages["docs/speed_cases.md"] = {
        "speed": docs.speed.speed_block(root, "attention", ("TRITON_ATTN", "ROCM_ATTN")),
        "packed": docs.speed.speed_block(root, "turboquant", ("TURBOQUANT",)),
        "latents": docs.speed.speed_block(
            root, "mla", ("HOPPER_MLA", "HOPPER_MLA_SPARSE", "HOPPER_PREFILL", "TRITON_MLA", "TRITON_PREFILL")
        ),
        "host": docs.speed.host_block(root),
        "peers": docs.speed.side_by_side_block(root),
        "graphs": docs.speed.graphs_block(root),
    }
    vllm = docs.runs.log_block(_read(root / "docs/vllm.md"))
    pages["docs/vllm.md"] = {"engine": docs.speed.engine_block(root), **vllm}
    pages["docs/sglang.md"] = {"engine": docs.speed.sglang_block(root)}
    pages["docs/transformers.md"] = docs.runs.report_block(registry)
    pages["docs/site.md"] = docs.site_scores.scores_block(root)
    pages["docs/kv_quality.md"] = docs.kv_quality.quality_blocks(root)
    pages["docs/python_api.md"] = docs.api.api_blocks()
    pages["docs/models.md"] = docs.models.matrix_blocks(root)
    pages["docs/transformers_models.md"] = docs.transformers.transformers_blocks(root)
    pages["docs/findings.md"] = {"codes": docs.findings.codes_block()}
    pages["docs/stacks.md"] = docs.stacks.stacks_blocks(root)
    pages["docs/field_problems.md"] = docs.field_problems.field_problem_blocks(root)
    pages["docs/writing_backends.md"] = {name: _file_block(root, file) for name, file in PLUGIN_FILES.items()}
    pages["README.md"] = docs.tasks.task_blocks(root)
    pages["docs/why.md"] = docs.tasks.log_blocks(root)
    pages["docs/check.md"] = docs.tasks.check_blocks(root)
    pages["docs/getting_started.md"] = docs.tasks.start_blocks(root)
    out = {name: docs.markdown.fill(name, _read(root / name), blocks) for name, blocks in pages.items()}
    for name, text in docs.schemas.schemas(registry).items():
        out[f"docs/schema/{name}.schema.json"] = text
    out[docs.selections.PATH] = docs.selections.selections(registry)
    out |= docs.commands.command_pages(root)
    out |= docs_site.pictures_of(root)
    out[docs.kv_quality.PICTURE] = docs.kv_quality.picture(root)
    out |= docs.speed_report.report_pictures(root)
    out[docs.plan.PICTURE] = docs.plan.plan_picture(root)
    return out | {docs.explain.PICTURE: docs.explain.picture(root, registry)}


def refusal(page: str) -> str:
    """The loader's errors for the example of an overlay with mistakes on a page, as Markdown."""
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


def _file_block(root: Path, file: str) -> str:
    """A file of the example package, as a block of Markdown. The first line is a comment with the file's path."""
    kind = {".toml": "toml", ".yaml": "yaml", ".py": "python"}[Path(file).suffix]
    return f"```{kind}\n# {file}\n{_read(root / PLUGIN / file)}```"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())
