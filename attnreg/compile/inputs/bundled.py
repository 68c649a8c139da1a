"""The data that comes with attnreg: its directory, the registries in it, and the configs of well-known models."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from functools import cache
from pathlib import Path

from attnreg.errors import Location, Problem, RegistryError, did_you_mean

# the files of a registry
FILES = ("vocabulary", "backends", "priorities", "steps", "invariants", "release", "architectures")
# a file with the difference to another release
RELEASE_FILE = "release.yaml"
# the file with all model families that a wheel has: `tools/wheel_data.py` writes it
_FAMILIES_FILE = "families.yaml"
# the version of a release, of a candidate for one, or of a nightly build
_VERSION = r"\d{1,9}(?:\.\d{1,9})*(?:[-.]?(?:a|b|rc|dev|post)\d{0,9})*"
# what a build adds to the version that it is built from: the platform, or the commit
_BUILD = r"(?:cpu|xpu|tpu|npu|musa|cu\d{1,9}|rocm\d{0,9}|precompiled|empty|editable|g[0-9a-f]{6,40}|d?\d{1,9})"
_LOCAL = rf"\+{_BUILD}(?:\.{_BUILD})*"
# what the line above each family begins with; the name of the family's own file follows
_FAMILY = "\n--- # "


def registry_root() -> Path:
    """The directory of the data: inside the package in a wheel, beside it in a checkout and an editable install."""
    package = Path(__file__).resolve().parents[2]
    for place in (package / "registry", package.parent / "registry"):
        if (place / "vocabulary.yaml").is_file():
            return place
    archive = next((parent for parent in package.parents if parent.is_file()), None)
    message = "attnreg was installed without its registry: install it again"
    if archive is not None:
        message = "attnreg is imported from this archive, and reads its registry from files: install or unpack it"
    raise RegistryError([Problem(Location(str(archive or package), 1, 1), message)])


def bundled_registries(*, releases: bool = True) -> dict[str, Path]:
    """Name -> directory of every registry that comes with attnreg.

    releases: include registries that are written as a difference to another release.
    """
    root = registry_root()
    engines = root / "engines"
    # a directory that is added or removed changes this time
    changed = engines.stat().st_mtime_ns if engines.is_dir() else 0
    return dict(_directories(root, changed, releases))


@cache
def _directories(root: Path, changed: int, releases: bool) -> dict[str, Path]:
    """`bundled_registries`, which one command asks for a dozen times. changed: of the directory with all engines."""
    names = ("backends.yaml", *((RELEASE_FILE,) if releases else ()))
    directories = sorted((root / "engines").iterdir()) if changed else []
    found = {p.name: p for p in directories if any((p / name).is_file() for name in names)}
    return {"default": root, **found}


def patch_releases() -> dict[str, dict[str, str]]:
    """Name -> data of every patch release without a table of its own: the registry that answers (`as`), `because`."""
    # a command that names a bundled registry does without YAML
    import yaml

    found: dict[str, dict[str, str]] = yaml.safe_load((registry_root() / "engines" / "patches.yaml").read_bytes())
    return found


def bundled_overlays() -> dict[str, Path]:
    """Name -> file of every bundled overlay; `vllm-0.33.0+attnreg` is in the folder of the registry `vllm-0.33.0`."""
    return {
        f"{name}+{file.stem}": file
        for name, directory in bundled_registries().items()
        for file in sorted(directory.glob("*.yaml"))
        if name != "default" and file.stem not in FILES
    }


def joined_families(directory: Path) -> dict[str, str] | None:
    """File name without suffix -> text of each model family, if a directory has them in one file, as a wheel does."""
    file = directory / _FAMILIES_FILE
    if not file.is_file():
        return None
    text = "\n" + file.read_text(encoding="utf-8").removesuffix("\n")
    first, *parts = text.split(_FAMILY)
    families = [part.partition("\n") for part in parts]
    return None if first else {name.removesuffix(".yaml"): f"{body}\n" for name, _, body in families}


def release_name(name: str) -> str:
    """The bundled registry for a name without the last part of its version: vllm-0.33.0 for vllm-0.33, or for vllm.

    If several releases match, the last one counts. A patch release without a table gets the registry that answers for
    it, and a local version that of the release that it is built from. Any other name is returned unchanged. To name a
    file or a directory with such a name, write a path with a separator: ./vllm-0.33.
    """
    bundled, release = bundled_registries(), r"[a-z]+(?:-\d+(?:\.\d+)*(?:\.post\d+)?)?"
    if name in bundled or (written := re.fullmatch(rf"({release})(?:{_LOCAL})?", name)) is None:
        return name
    name = written[1]
    begins = f"{name}." if "-" in name else f"{name}-"
    matching = (other for other in bundled if other.startswith(begins))
    return max(matching, key=_parted, default="") or patch_releases().get(name, {}).get("as", name)


def plain_release(name: str) -> str:
    """The plain name for another spelling of a release, vllm-0.33 for ``vLLM 0.33``; any other name is unchanged.

    A local version is the release that it is built from: vllm-0.33.0 for ``vllm==0.33.0+cu130``.
    """
    written = re.fullmatch(rf"([a-z]+)(?:(?:[-_ @:]|==)?v?({_VERSION})(?:{_LOCAL})?)?", name.strip().casefold())
    return "-".join(filter(None, written.groups())) if written else name


def spelled_release(name: str) -> str:
    """The bundled registry for another spelling of a release, such as ``vLLM 0.33``; any other name is unchanged."""
    found = release_name(plain_release(name))
    return found if found in bundled_registries() else name


def engines() -> list[str]:
    """The engines with bundled releases: sglang, vllm."""
    return sorted({name.partition("-")[0] for name in bundled_registries() if name != "default"})


def bundled_source(name: str) -> Path | None:
    """The directory of a bundled registry or the file of a bundled overlay; None for any other name."""
    return bundled_registries().get(release_name(name)) or (bundled_overlays().get(name) if "+" in name else None)


def source_text(source: str | bytes | os.PathLike[str]) -> str:
    """A source as text: a bundled name, or a path. A `Path` object is always a path, never a bundled name."""
    text = os.fsdecode(source)
    is_path = not isinstance(source, str | bytes) and bundled_source(text) is not None
    return os.path.join(os.curdir, text) if is_path else text


def bundled_configs() -> dict[str, Path]:
    """Name -> config.json of every example model that comes with attnreg."""
    return {path.parent.name: path for path in sorted(registry_root().parent.glob("examples/configs/*/config.json"))}


def help_for_registry(name: str, among: Collection[str] = ()) -> str:
    """Help for a name that no bundled registry has: the engine's versions and the nearest one, or the nearest name.

    among: the registries that are allowed, if not all bundled registries and overlays are.
    """
    bundled = among or bundled_registries()
    base, plus, _ = name.partition("+")
    if plus and not among and (overlays := [other for other in bundled_overlays() if other.startswith(f"{base}+")]):
        return did_you_mean(name, [base, *overlays])
    engine, version = _parted(name)
    versions = {other: _parted(other)[1] for other in bundled if _parted(other)[0] == engine}
    if not engine or not any(versions.values()):
        return did_you_mean(name, bundled)
    *others, last = sorted(versions, key=versions.__getitem__)
    there = f"{', '.join(others)} and {last}" if others else last
    if not version:
        return f"there are {there}"
    return f"there are {there}; the nearest is `{nearest_release(engine, version, bundled)}`"


def nearest_release(engine: str, version: str | tuple[int, ...], among: Collection[str] = ()) -> str:
    """The registry of the release before or after a version: the nearer by number, or the older if both are as near.

    version: 0.33 is any release of 0.33, and the newest of them is the nearest. Without a number: the newest release.
    among: the registries that are allowed, if not all bundled registries are.
    """
    wanted = version if isinstance(version, tuple) else _parted(f"{engine}-{version}")[1]
    there = {_parted(name)[1]: name for name in among or bundled_registries() if _parted(name)[0] == engine}
    before = max((parts for parts in there if parts[: len(wanted)] <= wanted), default=None)
    after = min((parts for parts in there if parts[: len(wanted)] > wanted), default=None)
    around = [parts for parts in (before, after) if parts is not None]
    return there[min(around, key=lambda parts: [abs(a - b) for a, b in zip(parts, wanted, strict=False)])]


def _parted(name: str) -> tuple[str, tuple[int, ...]]:
    """The engine and the version in a name such as vllm-0.33.0; vllm==0.33.0 and similar spellings work too."""
    match = re.fullmatch(r"([a-z]+)(?:(?:[-_ @]|==)?v?(\d{1,9}(?:\.\d{1,9})*)\S*)?", name.casefold())
    return ("", ()) if match is None else (match[1], tuple(map(int, filter(None, (match[2] or "").split(".")))))
