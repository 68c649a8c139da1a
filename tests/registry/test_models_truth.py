"""Every family and every layer is as transformers' own classes were observed to compute it."""

from __future__ import annotations

from typing import Any

import pytest
from support.models import models_truth
from support.models.models_truth import DATA

from attnreg.models.reader import bundled_families

SAMPLE = list(models_truth.lines(DATA / "layers-sample.jsonl.gz"))
OBSERVED = list(models_truth.lines(DATA / "observed.jsonl.gz"))
KNOWN = models_truth.known_differences()
LEFT_OUT = models_truth.left_out()


@pytest.mark.parametrize("line", SAMPLE, ids=lambda line: f"{line['family']}: {line['variant']}")
def test_the_reference_sample_has_no_exception(line: dict[str, Any]) -> None:
    assert models_truth.differing(line["config"], line["layers"]) == {}


@pytest.mark.parametrize("family", sorted({line["family"] for line in OBSERVED} - LEFT_OUT.keys()))
def test_a_family_is_as_observed(family: str) -> None:
    found: dict[str, str] = {}
    for line in OBSERVED:
        if line["family"] == family:
            for field, example in models_truth.differing(line["config"], line["layers"]).items():
                found.setdefault(field, f"{line['variant']}: {example}")
    unexplained = {field: example for field, example in found.items() if field not in KNOWN.get(family, {})}
    assert unexplained == {}
    # a difference that is gone must go from the list, too
    assert KNOWN.get(family, {}).keys() - found.keys() == set()


def test_differences_are_of_families_that_were_observed() -> None:
    assert KNOWN.keys() - {line["family"] for line in OBSERVED} == set()


def test_every_observed_family_is_known() -> None:
    families = bundled_families()
    strangers = {line["family"] for line in OBSERVED if line["config"]["model_type"] not in families}
    assert strangers == LEFT_OUT.keys()


def test_there_is_enough_of_it() -> None:
    assert len(SAMPLE) == 99
    assert len({line["family"] for line in SAMPLE}) == 60
    assert len({line["family"] for line in OBSERVED}) >= 550
