"""What the first line of a file of samples says of a measurement: the device, and the day."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from attnreg.compile.inputs.bundled import registry_root
from attnreg.files import first_line, outside
from attnreg.registry import Order, Registry

# the first line names a machine, its packages and the backends that were timed
MAX_HEAD = 1 << 16


def with_devices(registry: Registry) -> Registry:
    """The registry whose measured orders know on which device, and when, that was."""
    if not any(order.measured for orders in registry.orders.values() for order in orders):
        return registry
    orders = {platform: tuple(map(_with_device, orders)) for platform, orders in registry.orders.items()}
    return replace(registry, orders=orders)


def _with_device(order: Order) -> Order:
    if order.measured is None:
        return order
    file = order.measured.file
    device, date = measured_on(folder_of(order.where.file, file), file)
    return replace(order, measured=replace(order.measured, device=device, date=date))


def measured_on(folder: Path, file: str) -> tuple[str, str]:
    """The device and the day of the samples in a file below a folder; "" for both where they cannot be read.

    `attnreg check` says why they cannot.
    """
    if outside(file, folder):
        return "", ""
    try:
        head = json.loads(first_line(folder / file, MAX_HEAD))
        device, date = head["machine"]["device"], head["date"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return "", ""
    return (device, date) if isinstance(device, str) and isinstance(date, str) else ("", "")


def folder_of(data: str, file: str) -> Path:
    """The directory of a file of data, beside which its samples are; that of a bundled one is below the data's root."""
    beside = Path(data).parent
    bundled = registry_root().parent / beside
    try:
        return bundled if not (beside / file).exists() and (bundled / file).exists() else beside
    # a name that no file can have
    except ValueError:
        return beside
