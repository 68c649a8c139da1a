"""Questions for the picker: as addresses, as the command's words, and what the command answers to them."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from attnreg import Registry
from attnreg.cli.commands import main
from attnreg.compile.inputs.bundled import bundled_configs
from support import ROOT

TOOLS = ROOT / "tools"
STATIC = TOOLS / "docs_site/assets/picker"
if str(TOOLS) not in sys.path:
    sys.path.append(str(TOOLS))

NODE = shutil.which("node")
# what a form states beside its registry, its architecture and its model
_MORE = ("", "&facet.kv_dtype=fp8", "&tp=2", "&facet.block_size=64", "&feature=lse", "&length=5000", "&package=none")


def by_node(given: object, reader: str = "address") -> Any:
    """What the picker's reader of addresses makes of lists, hashes and names of files under Node; or another reader."""
    assert NODE is not None
    command = [NODE, str(ROOT / f"tests/tools/picker/{reader}.js"), str(STATIC)]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def built(site: Path, path: str) -> Any:
    """What a file of data of the built site holds."""
    text = (site / "data" / f"{path}.js").read_text(encoding="utf-8")
    head, _, value = text.partition("=")
    assert head == f"attnregData[{json.dumps(path)}]"
    return json.loads(value.rstrip(";\n"))


def printed(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `attnreg explain --json` prints for some options."""
    main(["explain", *words, "--json"])
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def hashes(registries: Sequence[Registry], count: int, seed: int) -> Iterator[str]:
    """Addresses of questions at random, most of which are not among those that the build answers."""
    rng = random.Random(seed)
    for _ in range(count):
        registry = rng.choice(registries)
        arch, model = rng.choice(list(registry.vocabulary.architectures)), rng.choice(list(bundled_configs()))
        asked = f"#registry={quote(registry.name)}&arch={arch}&model={model}{rng.choice(_MORE)}{rng.choice(_MORE)}"
        flag = rng.choice(["", *registry.vocabulary.flags])
        yield asked + (f"&flag={flag}" if flag else "")


def check_view(view: dict[str, Any], explained: dict[str, Any]) -> None:
    """Assert that what a page shows of an answer is what the command prints of it as JSON."""
    assert (view["title"], view["registry"]) == (explained["title"], explained["registry"])
    # a page has lists of models and of engines
    listed = ("/examples/configs/", "give --engine")
    notes = [note for note in explained["notes"] if not any(words in note for words in listed)]
    assert notes == view["notes"]
    for shown, answer in zip(view["answers"], explained["answers"], strict=True):
        assert shown["heading"] == " · ".join(filter(None, (answer["layers"], answer["label"])))
        for verdict, selection in zip(shown["verdicts"], answer["selections"], strict=True):
            _check_verdict(verdict, selection, of_model=bool(answer["layers"]))
    caches = explained.get("kv_caches", [explained["kv_cache"]] if "kv_cache" in explained else [])
    for table, cache in zip(view["tables"], caches, strict=True):
        for row, group in zip(table["rows"], cache["groups"], strict=False):
            size = group["bytes_per_token"]
            apart = group["note"] or group.get("state_bytes") is not None
            # nothing is counted of a run that the engine refuses
            counted = ("at least", "not known") if size is None else f"{size:,}"
            assert row[1].startswith("–" if apart and row[1] != "not known" else counted)
        if cache["bytes_per_token"] is not None:
            assert table["rows"][-1][1] == f"{cache['bytes_per_token']:,}"
        assert table["head"][2:] == [f"{int(length):,} tokens" for length in cache["bytes_at"]]
    assert len(view["blocks"]) == len(explained.get("block_sizes", ()))


def _check_verdict(verdict: dict[str, Any], selection: dict[str, Any], *, of_model: bool) -> None:
    backend = selection["backend"]
    name = "/".join(filter(None, backend.values())) if backend else None
    assert (verdict["kind"] == "chosen", verdict["name"] == name) == (backend is not None, backend is not None)
    lost = [c for c in selection["candidates"] if "/".join(filter(None, (c["name"], c["variant"]))) != name]
    for shown, candidate in zip(verdict["others"], lost, strict=True):
        assert shown["name"] == "/".join(filter(None, (candidate["name"], candidate["variant"])))
        assert shown["rank"] == candidate["rank"]
        said = [*candidate["reasons"], *candidate["fails"]] or [candidate]
        # reasons that one line states are one sentence
        assert {where for _, where in shown["reasons"]} == {one["where"].rpartition(":")[0] for one in said}
        remedy = candidate["would_win"]
        told = remedy is not None and not (remedy["of_model"] and of_model)
        assert shown["remedy"].endswith(remedy["text"] if told else "")
        assert bool(shown["remedy"]) == told
    texts = [line["line"][0] for line in verdict["lines"]]
    for said in (*selection["warnings"], *(f["text"] for f in selection["consequences"] if f["kind"] != "fails")):
        assert said in texts
    for run in selection["runs"][1:]:
        assert any(run["backend"]["name"] in text for text in texts)
