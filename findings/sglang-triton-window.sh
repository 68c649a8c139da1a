#!/usr/bin/env bash
# SGLang 0.5.23's attention backend triton decodes over a window with one key fewer than a prompt has, without a word.
#
# GPT-OSS's window is 128 tokens, the query's own included. SGLang gives its backends the window less one, since their
# masks let a query see so many keys before its own. For a step that decodes, the backend lists the keys by the length
# of the request, which counts the query's own key. So it lists 127 keys. For the last token of a prompt it lists 127
# keys before it, and its own comes on top. The two files run here as they are, with stand-ins for what they import.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m pip install --quiet --root-user-action ignore --target "$work/torch" torch==2.13.0
# the wheel is unpacked alone: what the package needs is not needed by the functions that run
python3 -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 --dest "$work" sglang==0.5.23
mkdir "$work/sglang"
python3 -m zipfile -e "$work"/sglang-0.5.23*.whl "$work/sglang"

cat >"$work/probe.py" <<'PY'
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import torch

wheel = Path(sys.argv[1])


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any module of these packages, with any name in it."""

    def find_spec(self, name, path=None, target=None):
        known = name.partition(".")[0] in ("sglang", "sgl_kernel", "triton", "transformers")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: type(name, (), {}) if name[0].isupper() else MagicMock()
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, StandIns())


def load(name):
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), wheel / "sglang/srt" / f"{name}.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


window = 128
given = load("models/gpt_oss").get_attention_sliding_window_size(types.SimpleNamespace(sliding_window=window))
backend = load("layers/attention/triton_backend")


def listed(tokens):
    """How many keys the backend lists for a request of so many tokens."""
    translator = types.SimpleNamespace(pack_read_stream=lambda *_, **__: True, window_kv_kind=None)
    return backend.update_sliding_window_buffer(
        torch.zeros(2, dtype=torch.int32), translator, None, torch.tensor([0]), given, torch.tensor([tokens]), 1, "cpu"
    )[2].item()


context = 1000
# a prompt's keys before its last token, and then that token's own, which the kernel computes with the prompt
prompt = listed(context - 1) + 1
# the length of a request that decodes has the new token in it
decode = listed(context)
print(f"a window of {window}: the last token of a prompt sees {prompt} keys, a decoded token {decode}")
assert (given, prompt, decode) == (127, 128, 127)
PY
PYTHONPATH="$work/torch" python3 "$work/probe.py" "$work/sglang"
