"""What pages call in Python runs without what the browser's archive leaves out."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from support import ROOT

LEFT_OUT = re.search(
    r"^LEFT_OUT = frozenset\((\{.*\})\)$", (ROOT / "tools/picker/runtime.py").read_text(), re.MULTILINE
)
CODE = """
import sys
from attnreg.cli.commands import main

class LeftOut:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[1:2] and name.split(".")[0] == "attnreg" and name.split(".")[1] in {left_out}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, LeftOut())
for line in sys.stdin.read().splitlines():
    assert main(line.split()) in (0, 1, 3), line
    assert not {{"torch", "numpy"}} & set(sys.modules), line
"""
COMMANDS = """\
explain --registry default --arch sm90 --model Qwen3-8B --draft Qwen3-8B-DFlash-b16 --draft-backend TRITON_ATTN --json
explain --registry vllm-0.33.0 --arch sm90 --model Qwen3-8B --draft Qwen3-8B-DFlash-b16 --backend TRITON_ATTN --json
explain --registry vllm-0.33.0 --selector --arch sm75 --model gpt-oss-20b --json
explain --registry sglang-0.5.23 --arch sm90 --model gemma-3-27b-it --tp 2 --json
diff vllm-0.32.0 vllm-0.33.0 --arch sm90 --model gpt-oss-20b
upgrade --from vllm-0.32.0 --to vllm-0.33.0 --arch sm90 --model gpt-oss-20b
plan --registry vllm-0.33.0 --arch sm90 --model gpt-oss-20b --tp 2 --gpu-memory 80GiB --weights 20GiB --json
"""


@pytest.mark.slow(reason="a process of its own, and registries of engines")
def test_commands_run_without_what_is_left_out() -> None:
    assert LEFT_OUT is not None
    program = CODE.format(left_out=LEFT_OUT[1])
    commands = COMMANDS.replace("--model ", f"--model {ROOT}/examples/configs/")
    commands = commands.replace("--draft ", f"--draft {ROOT}/examples/configs/")
    done = subprocess.run(
        [sys.executable, "-c", program], input=commands, capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
