"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from support.suite.sentences import sentences  # noqa: F401 - a fixture

import attnreg
from attnreg.analysis.check.evidence import contradictions
from attnreg.analysis.timings.samples import Samples, read_samples

# Triton reads it where a kernel is defined, so it is said before any test imports one: without a GPU its interpreter
# runs them
if not Path("/dev/kfd").exists() and not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"
    # the workers share the cores, and so do the processes that tests start: threads of torch would wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# registries are kept beside the tests, and not in the cache of who runs them
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).resolve().parent.parent / ".cache" / "tests")

# the plugins that a developer has installed are no part of what is tested
os.environ["ATTNREG_PLUGINS"] = "off"

# a shell has what it starts in the background ignore Ctrl-C, and all that this starts inherits it; some tests send it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# a registry is loaded within many an example
_ANY_TIME = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# each run draws other examples, so two fifths of a property's number each time find what there is; ATTNREG_FULL=1: all
settings.register_profile("attnreg", _ANY_TIME, max_examples=100 if os.environ.get("ATTNREG_FULL") else 40)
# a tenth of the examples: make quick
settings.register_profile("quick", _ANY_TIME, max_examples=10)
# thirty times as many, by hand
settings.register_profile("long", _ANY_TIME, max_examples=3000)
settings.load_profile("attnreg")
# where a property fails, a registry is shown by its title: Hypothesis would print it whole, which is 20,000 lines
attnreg.Registry._repr_pretty_ = lambda self, printer, _: printer.text(repr(self))  # type: ignore[attr-defined]


_SAMPLES: dict[tuple[str, str], Samples] = {}


def _read_once(path: Path, label: str) -> Samples:
    if not path.is_file():
        return read_samples(path, label)
    key = hashlib.sha256(path.read_bytes()).hexdigest(), label
    if key not in _SAMPLES:
        _SAMPLES[key] = read_samples(path, label)
    return _SAMPLES[key]


@pytest.fixture(scope="session", autouse=True)
def _samples_are_read_once() -> Iterator[None]:
    """Have a process read the samples behind an order once, however often it checks the default registry."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[contradictions.__module__], "read_samples", _read_once)
        yield


@pytest.fixture(scope="session")
def default() -> attnreg.Registry:
    """The registry that ships with attnreg, whatever the environment says."""
    return attnreg.load_registry("default")


# nothing of what the collection makes is garbage: a million objects of modules and cases
gc.disable()


def pytest_collection_finish() -> None:
    """Have the collector look seldom, and never at what stays."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()
