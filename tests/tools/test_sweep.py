"""Some of transformers' architectures, held against the record of all; the record, against its reasons."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.suite.examples import FULL
from transformers_sweep.record import by_family, changes, exceptions, read_reasons, read_record, reason_of
from transformers_sweep.sweep import families, versions
from transformers_sweep.workers import Worker

RECORDED_FOR, RECORD = read_record()
RECORDED = by_family(RECORD)


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    """One process for all families, and another where one has died."""
    made = [Worker()]
    yield made
    for worker in made:
        worker.stop()


# ATTNREG_FULL=1: a fourteenth of the architectures; make test-sweep: all
@pytest.mark.slow("models of some of the architectures, built and run")
@pytest.mark.parametrize("family", families(1, 14 if FULL else 42))
def test_an_architecture_does_what_the_record_says(family: str, workers: list[Worker]) -> None:
    if not workers[-1].alive:
        workers.append(Worker())
    assert changes(workers[-1].rows(family), RECORDED.get(family, [])) == []


def test_the_record_is_of_every_architecture_of_these_versions() -> None:
    assert versions() == RECORDED_FOR
    assert sorted(RECORDED) == families()
    # a record of errors would agree with itself too
    assert sum(row["by"] == "attnreg" for row in RECORD) > 600


def test_every_exception_has_a_reason_and_every_reason_an_exception() -> None:
    reasons = read_reasons()
    expected, found = {}, {}
    for row in RECORD:
        for scenario, outcome, said in exceptions(row):
            place = row["family"], row["class"], scenario, outcome, said
            expected[place] = reason_of(row, scenario, outcome, said, reasons)
            found[place] = row["outcomes"][scenario][2]
    assert [place for place, name in expected.items() if not name] == []
    assert found == expected
    assert set(reasons) - set(found.values()) == set()
    for name, reason in reasons.items():
        affected = {family for (family, *_), reason_name in found.items() if reason_name == name}
        assert set(reason.get("families", affected)) == affected


def test_nothing_differs_and_nothing_dies() -> None:
    assert not {"differs", "died"} & {outcome for row in RECORD for outcome, *_ in row["outcomes"].values()}
