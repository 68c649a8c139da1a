"""The layout, the CUDA-graph mode and the block size of whole runs, held against what vLLM's own functions settled."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from support.models.recorded_runs import RELEASES, Settled, memory_of, recorded_runs, settled
from support.models.recorded_starts import Row

from attnreg.planning.run import Agreed

# per release: rows that vLLM started, and of these the layouts, graph modes and block sizes that are not known
COUNTS: dict[str, tuple[int, int, int, int]] = {
    "0.33.0": (511, 0, 4, 8),
    "0.30.0": (10, 0, 0, 0),
    "0.26.0": (14, 0, 0, 0),
}


def started(row: Row) -> bool:
    """Whether vLLM came as far as the graph mode. Other rows end at the checkpoint or at what is simulated."""
    return "graphs" in row["out"]


def difference(said: Agreed, was: str | dict[str, str]) -> str:
    """Where attnreg says something else than vLLM's function did; "" where it says that it does not know."""
    if isinstance(was, dict):
        return f"{said.value}, where vLLM raises {was['error']}" if said.value is not None else ""
    if said.conflict is not None:
        return f"conflict {said.conflict.sentence}, not {was}"
    return f"{said.value}, not {was}" if said.value not in (None, was) else ""


def differences(found: Settled, out: Row) -> list[str]:
    wrong = [difference(found.layout, out["layout"]), difference(found.graphs, out["graphs"])]
    sizes = [page.tokens for page in found.pages if page.tokens not in (None, out["block_size"])]
    wrong += [f"blocks of {size}, not {out['block_size']}" for size in sizes]
    return list(filter(None, wrong))


@pytest.mark.slow(reason="the recorded runs of a release")
@pytest.mark.parametrize("release", RELEASES)
def test_a_run_is_settled_as_vllm_settles_it(release: str, tmp_path: Path) -> None:
    models, rows = recorded_runs(release)
    wrong, unknown = dict[str, list[str]](), Counter[str]()
    held = [row for row in rows if started(row)]
    for row in held:
        found = settled(row["in"], models, tmp_path, release)
        if differ := differences(found, row["out"]):
            wrong[json.dumps(row["in"])] = differ
        unknown["layout"] += found.layout.value is None and found.layout.conflict is None
        unknown["graphs"] += found.graphs.value is None and found.graphs.conflict is None
        unknown["pages"] += not found.pages or found.pages[0].tokens is None
    assert not wrong, "\n".join(f"{asked}: {differ}" for asked, differ in wrong.items())
    assert (len(held), unknown["layout"], unknown["graphs"], unknown["pages"]) == COUNTS[release]


def test_the_rows_show_what_there_is_to_show() -> None:
    outs = [row["out"] for row in recorded_runs("0.33.0")[1] if started(row)]
    assert {str(out["layout"]) for out in outs} >= {"LBNHC", "LBHNC", "LHBNC"}
    assert {str(out["graphs"]) for out in outs} >= {"FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE", "NONE"}


@pytest.mark.slow(reason="runs of many models")
def test_the_keys_of_an_indexer_take_the_bytes_of_vllms(tmp_path: Path) -> None:
    models, rows = recorded_runs("0.33.0")
    held = 0
    for row in filter(started, rows):
        recorded = {g["shape"][2] // g["shape"][1] for g in row["out"]["groups"] if "IndexerCache" in g["kind"]}
        groups = memory_of(row["in"], models, tmp_path, "0.33.0").models[0].groups
        said = {(g.index_bytes or 0) // len(g.group.layers) for g in groups if g.index_bytes != 0}
        assert said == recorded, row["in"]
        held += bool(recorded)
    assert held > 3
