"""Platform: the hardware and software that a layer runs on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from attnreg.errors import RequestError, items_of, plain_word, shown, word_set

Packages = tuple[tuple[str, str], ...]
_PLAIN_VERSION = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})*")


@dataclass(frozen=True, slots=True)
class Platform:
    """Where attention runs. Immutable and hashable; the hardware need not be present.

    ``Platform("H100")``, ``Platform("cuda", "sm90")`` and ``Platform(arch="sm90")`` are complete: a selection takes the
    platform, the architecture and the device from the name of an architecture or a product.

    ``platform`` and ``arch`` are words of the registry (``rocm``, ``gfx942``), ``flags`` the flags that the user turns
    on. ``packages`` maps installed packages to versions and is stored as sorted pairs. A name without a version meets
    every requirement; None means that every package is installed. ``device`` is the exact device, if it is known: H20,
    H100 and H200 are all sm90. ``product`` is the product that the user named; it is printed, and decides nothing.

    Raises `RequestError` (a ValueError) for values of the wrong type.
    """

    platform: str = ""
    arch: str = ""
    _: KW_ONLY
    flags: frozenset[str] = frozenset()
    packages: Packages | None = None
    device: str | None = None
    product: str | None = field(default=None, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        platform, arch = self.platform, self.arch
        # the only word is that of the architecture
        if _is_empty(arch):
            platform, arch = "", platform
            if _is_empty(arch):
                raise RequestError("a platform has an architecture, and none is given", "Platform('H100') names one")
        object.__setattr__(self, "platform", "" if _is_empty(platform) else plain_word("platform", platform))
        object.__setattr__(self, "arch", plain_word("arch", arch))
        object.__setattr__(self, "flags", word_set("flags", self.flags))
        object.__setattr__(self, "packages", _package_pairs(self.packages))
        for name in ("device", "product"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, plain_word(name, getattr(self, name)))
        object.__setattr__(self, "_hash", hash((self.platform, self.arch, self.flags, self.packages, self.device)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.platform, self.arch, self.flags, self.packages, self.device, self.product)

    def facts(self) -> dict[str, Any]:
        """Facet name -> value. A new dict each time."""
        return {
            "platform": self.platform,
            "arch": self.arch,
            "device": self.device,
            "flags": self.flags,
            "packages": self.packages,
        }

    def to_dict(self) -> dict[str, Any]:
        """The platform as JSON-ready values; ``packages`` is null if every package is assumed to be installed.

        ``device`` is left out if it is unknown.
        """
        packages = None if self.packages is None else dict(self.packages)
        data = {"platform": self.platform, "arch": self.arch, "flags": sorted(self.flags), "packages": packages}
        return data if self.device is None else {**data, "device": self.device}


def _is_empty(word: object) -> bool:
    return type(word) is str and not word


def is_version(text: str) -> bool:
    """Whether a text is a version by PEP 440."""
    if _PLAIN_VERSION.fullmatch(text):
        return True
    # imported late: it is slow, and few versions need it
    from packaging.version import InvalidVersion, Version

    try:
        Version(text)
    # a number with thousands of digits raises ValueError
    except (InvalidVersion, ValueError):
        return False
    return True


def refuse_other(arch: str, own: str, platform: str) -> None:
    """Raise `RequestError` if an architecture of the platform ``own`` is combined with another platform."""
    if platform != own:
        raise RequestError(f"arch is {arch}, which belongs to platform {own}, not {platform}")


def _package_pairs(packages: Mapping[str, str] | Iterable[Any] | None) -> Packages | None:
    if packages is None:
        return None
    items = (
        None if isinstance(packages, str) else items_of(packages.items() if isinstance(packages, Mapping) else packages)
    )
    pairs: dict[str, str] = {}
    for item in [None] if items is None else items:
        pair = [item, ""] if isinstance(item, str) else items_of(item)
        if pair is None or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            expected = "expected a mapping of names to versions, or a set of names"
            raise RequestError(f"packages is {shown(packages)}; {expected}")
        pairs[str.__str__(pair[0])] = str.__str__(pair[1])
    return tuple(sorted(pairs.items()))


def _rebuild(
    platform: str, arch: str, flags: frozenset[str], packages: Packages | None, *names: str | None
) -> Platform:
    device, product = names
    return Platform(platform, arch, flags=flags, packages=packages, device=device, product=product)
