"""The overlay that follows from samples: orders with their evidence, before those of the registry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from attnreg.analysis.check.findings import unreachable
from attnreg.analysis.timings.rules import MeasuredOrder, evidence_of, rules_of
from attnreg.errors import RequestError
from attnreg.loader import load_registry
from attnreg.platforms import Platform

if TYPE_CHECKING:
    from attnreg.analysis.timings.samples import Samples
    from attnreg.registry import Registry

_HEAD = """\
# Written by `attnreg tune` on {device}, {date}. Each order is what the samples in {file} say, beyond their noise;
# what was not measured stands where {registry} has it. `attnreg diff {base} FILE` shows what moves with it.
"""


class _Dumper(yaml.SafeDumper):
    """Quotes every text that begins like a number: YAML 1.2 reads a hash such as 0123 or 12e3 as a number."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if text[:1] in "+-.0123456789" else None)


_Dumper.add_representer(str, _text)


class NothingRankedError(RequestError):
    """Raised for samples from which no order follows."""


def overlay_text(samples: Samples, registry: Registry, file: str) -> str:
    """The overlay as YAML. ``file``: the name of the file of samples beside it. Raises `NothingRankedError`."""
    platform = platform_of(samples, registry)
    rules = rules_of(samples, registry, platform)
    if not rules:
        why = "; ".join(dict.fromkeys(f"{name}: {text}" for (_, name), text in samples.problems.items()))
        help_ = f"problems: {why}" if why else "a ranking takes two backends that load here and accept a request"
        raise NothingRankedError("no two backends were measured for any request: nothing is ranked", help_)
    orders = [_order(samples, registry, platform, rule, number, file) for number, rule in enumerate(rules, 1)]
    data = {"extends": registry.base, "orders": {platform.platform: orders}}
    _remove_unreachable(data)
    head = _HEAD.format(
        device=samples.machine["device"], date=samples.date, file=file, registry=registry.title, base=registry.base
    )
    return head + yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=118, default_flow_style=None
    )


def platform_of(samples: Samples, registry: Registry) -> Platform:
    """The platform on which samples were taken, as the registry knows it."""
    machine = samples.machine
    if machine["arch"] not in registry.vocabulary.architectures:
        raise NothingRankedError(f"{registry.title} does not know the architecture {machine['arch']}")
    device = registry.vocabulary.device(machine["device"])
    packages = {name: version for name, version in machine["packages"].items() if name in registry.vocabulary.packages}
    return Platform(platform=machine["platform"], arch=machine["arch"], packages=tuple(packages.items()), device=device)


def _order(
    samples: Samples, registry: Registry, platform: Platform, rule: MeasuredOrder, number: int, file: str
) -> dict[str, Any]:
    evidence = evidence_of(samples, rule)
    assert evidence is not None
    (ratio, noise), over = evidence
    place = {"arch": platform.arch} if platform.device is None else {"device": platform.device}
    differs = evidence[0].differs
    because = f"{rule.order[0]} is {ratio:.2f}x as fast as {over} here" if differs else (
        f"{rule.order[0]} and {over} differ by less than the noise, and stay as they were"
    )  # fmt: skip
    return {
        "name": f"tuned-{platform.device or platform.arch}-{number}".lower().replace(" ", "-"),
        "when": {**place, **rule.when},
        "order": [*rule.entries],
        "because": because,
        "measured": {
            "file": file,
            "ratio": round(ratio, 3),
            "noise": round(noise, 3),
            "of": rule.order[0],
            "over": over,
        },
    }


def _remove_unreachable(data: dict[str, Any]) -> None:
    """Remove entries that are never chosen; the samples still have their times."""
    registry = load_registry(None, [data])
    dead = set(unreachable(registry))
    for platform, orders in data["orders"].items():
        for order, laid in zip(orders, registry.orders[platform], strict=False):
            order["order"] = [
                e.backend for e in laid.entries if e.where not in dead or e.backend == order["measured"]["of"]
            ]
