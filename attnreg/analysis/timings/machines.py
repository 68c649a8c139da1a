"""Machines: reasons why samples cannot come from the machine that their file names."""

from __future__ import annotations

from datetime import date, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnreg.analysis.timings.samples import Samples
    from attnreg.language.vocabulary import Vocabulary

# the tolerance on a maker's figures: clocks may be higher, and caches may keep data despite a flush
_MORE = 1.5


def impossible(samples: Samples, vocabulary: Vocabulary) -> str:
    """Why the named machine cannot have taken the samples; "" if it can, or if the device is unknown."""
    machine = samples.machine
    platform, arch = machine["platform"], machine["arch"]
    if platform not in vocabulary.words_of("platform"):
        return f"there is no platform {platform!r}"
    known = vocabulary.architectures.get(arch)
    if known is None or known.platform != platform:
        return f"{arch} is no architecture of {platform} here"
    device = vocabulary.device(machine["device"])
    if device is None:
        return ""
    if vocabulary.arch_of(device) != arch:
        return f"{machine['device']} is {vocabulary.arch_of(device)}, and the file says {arch}"
    facts = vocabulary.words_of("device")[device].facts
    most = {name: _MORE * facts[name] for name in ("gigabytes", "teraflops") if name in facts}
    for (index, backend), turns in samples.turns.items():
        cell, fastest = samples.cells[index], min(t for turn in turns for t in turn)
        if fastest < (least := cell.least_us(**most)):
            return f"{backend}, {cell.words}: {fastest} µs; {device} takes {least:.1f} at least"
    return ""


def of_the_future(samples: Samples) -> str:
    """A message if the date of the samples is in the future by this machine's clock, else ""."""
    today = date.today()
    # one day more, for other time zones
    late = date.fromisoformat(samples.date) > today + timedelta(days=1)
    return f"the samples are of {samples.date}, and today is {today}" if late else ""
