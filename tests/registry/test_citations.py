"""The records that comments of the data cite, instead of holding their figures."""

from __future__ import annotations

import json
import re

from support import ROOT

import attnreg
from attnreg.compile.inputs.bundled import registry_root

_CITED = re.compile(r"benchmarks/results/(\w+)\.json:((?: \"[^\"]+\",?)+)")


def test_each_figure_that_a_comment_cites_is_on_record() -> None:
    text = (registry_root() / "priorities.yaml").read_text(encoding="utf-8")
    cited = _CITED.findall(text)
    assert len(cited) >= 9
    assert len(cited) == text.count("benchmarks/results/")
    for name, cases in cited:
        record = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
        known = {figure["case"] for figure in record["figures"]}
        assert set(re.findall(r'"([^"]+)"', cases)) <= known


def test_bundled_orders_have_their_samples_where_the_kept_registry_looks(default: attnreg.Registry) -> None:
    """What is kept is compiled anew where the first line of a file below measurements/ changes."""
    measured = [order.measured for orders in default.orders.values() for order in orders if order.measured]
    assert measured
    assert all(m.file.startswith("measurements/") and m.device and m.date for m in measured)
