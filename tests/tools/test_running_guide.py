"""The code of docs/running.md runs, from the first block to the last."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support import ROOT

from attnreg.registry import Registry

GUIDE = ROOT / "docs" / "running.md"


@pytest.mark.skipif(torch.cuda.is_available(), reason="its tensors are in the processor's memory")
def test_the_code_of_the_guide_runs() -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    torch.manual_seed(0)
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), names)
    # the last block is MLA's
    assert names["mla"].prompts is not None
    assert names["output"].shape == (6, 4, 24)
    assert names["output"].isfinite().all()


def test_the_backends_that_a_graph_captures_are_named(default: Registry) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    [named] = re.findall(r"`CAPTURABLE` can be captured whole.*?: (.*?); the others refuse", text, re.DOTALL)
    captured: list[str] = []
    for row in default.backends.values():
        running = [variant for variant in row.variants if variant.module]
        can = [variant for variant in running if _says_captured(str(variant.module))]
        captured += [row.name] if can and can == running else [f"{row.name}/{variant.name}" for variant in can]
    assert re.findall(r"[A-Z]\w+(?:/[\w-]+)?", named) == sorted(captured)


def _says_captured(module: str) -> bool:
    # it may need another package, so the file is read and not imported
    text = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    return re.search(r"\bCAPTURABLE\b", text) is not None
