"""examples/attnreg-plugin as a user gets it: built as a wheel, installed, selected, verified, and run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT
from support.pages.schemas import validator

from attnreg.compile.source.yaml_source import Document

EXAMPLE = ROOT / "examples/attnreg-plugin"
PAGE = (ROOT / "docs/writing_backends.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ attnreg (.+)$", PAGE, re.MULTILINE)

RUN = """
import json, sys, torch, attnreg
from attnreg import AttentionRequest, BatchMetadata, Platform
from attnreg.kernels import reference

torch.manual_seed(0)
overlays = [{"backends": {"ACME_ATTN": {"options": {"tile": 3}}}}]
registry = attnreg.load_registry("default", overlays)
request = AttentionRequest(
    head_size=16, num_heads=4, num_kv_heads=2, dtype="float32", block_size=4, features={"sliding_window"}
)
selection = attnreg.select(request, Platform(platform="cpu", arch="x86_64"), registry, to_run=True)
layer = attnreg.Attention.from_selection(selection, sliding_window=5)
table = torch.tensor([[2, 0, 3], [1, 0, 0]], dtype=torch.int32)
slots = torch.tensor([*range(8, 12), *range(0, 4), 12, *range(4, 7)])
cache = layer.new_kv_cache(4)
for x in cache:
    x.fill_(torch.nan)
q, k, v = torch.randn(12, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
batch = BatchMetadata.build([9, 3], [9, 3], block_table=table, slot_mapping=slots)
output = layer.forward(q, k, v, cache, batch)
exact = reference.attention(layer.spec, batch, q, cache).output
print(json.dumps([selection.backend.name, dict(layer.spec.options), float((output - exact).abs().max())]))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the example is installed."""
    wheels, target = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(wheels)]
    subprocess.run(build, cwd=EXAMPLE, check=True, capture_output=True)
    (wheel,) = wheels.glob("acme_attn-*.whl")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True, capture_output=True)
    return target


def run(site: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A Python that has attnreg and the example."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ATTNREG", "TRITON"))}
    environment |= {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=site, env=environment, capture_output=True, text=True)


@pytest.mark.slow(reason="imports torch, and runs the cases of a kernel")
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_page(command: str, site: Path) -> None:
    done = run(site, "-m", "attnreg", *command.split())
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    said = {
        "show": "attnreg.yaml:",
        "explain": "▸ ACME_ATTN",
        "check": ", 0 findings",
        "doctor": "✓ ACME_ATTN",
        "verify": "ACME_ATTN: proven; ",
    }
    # lines may be wrapped anywhere
    assert said[command.partition(" ")[0]] in " ".join(done.stdout.split())


def test_the_page_shows_every_step() -> None:
    assert [command.partition(" ")[0] for command in COMMANDS] == [
        *("show", "explain", "check", "doctor", "verify"),
        "explain",
    ]


def test_the_files_are_what_the_schema_says() -> None:
    for file in EXAMPLE.rglob("attnreg.yaml"):
        validator("overlay").validate(Document.load(file).data)


@pytest.mark.slow(reason="imports torch")
def test_the_installed_backend_is_selected_and_computes_what_the_reference_does(site: Path) -> None:
    done = run(site, "-c", RUN)
    assert done.returncode == 0, done.stderr
    name, options, error = json.loads(done.stdout)
    assert (name, options) == ("ACME_ATTN", {"tile": 3})
    assert error < 1e-5


@pytest.mark.slow(reason="builds and installs a wheel")
def test_the_variable_leaves_the_installed_backend_out(site: Path) -> None:
    ask = ("-m", "attnreg", "explain", "--arch", "x86_64", "--head-size", "64", "--backend", "ACME_ATTN")
    done = run(site, *ask, ATTNREG_PLUGINS="off")
    assert done.returncode == 2
    assert "; left out: plugin acme is not let in by $ATTNREG_PLUGINS" in done.stderr
    assert "▸ ACME_ATTN" in run(site, *ask, ATTNREG_PLUGINS="acme").stdout


@pytest.mark.slow(reason="builds and installs a wheel")
def test_the_generated_docs_do_not_change_with_a_plugin(site: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r})\n"
        "import os, gen_docs, attnreg\n"
        "from attnreg.loader import load_registry\n"
        "assert load_registry('default').name == 'default+acme'\n"
        "@gen_docs.without_plugins\n"
        "def name(): return load_registry('default').name\n"
        "print(name(), os.environ.get('ATTNREG_PLUGINS'))\n"
    )
    done = run(site, "-c", code)
    assert (done.stdout.split(), done.returncode) == (["default", "None"], 0), done.stderr
