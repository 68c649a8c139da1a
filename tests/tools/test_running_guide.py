"""The code of docs/running.md runs, from the first block to the last."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "running.md"


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
