"""The releases that a package index has, by pip: any index, proxy and certificate that pip is set to works here too."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence

from packaging.version import InvalidVersion, Version

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "index", "versions")
_LISTED = re.compile(r"^Available versions: (.+)$", re.MULTILINE)


class NoIndexError(RuntimeError):
    """Raised if the index does not list the releases of a package. Its text has pip's reason, and what to check."""


def releases(package: str, pip: Sequence[str] = PIP) -> list[Version]:
    """The final and post releases of a package on the index, the oldest first. Raises `NoIndexError`.

    pip lists a release only if it has a file for this Python and platform; no other can be recorded here.
    pip: the command that lists them; the options and the package are added.
    """
    command = [*pip, "--ignore-requires-python", package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoIndexError(f"pip cannot be run: {error.strerror or error}") from None
    listed = _LISTED.search(done.stdout)
    if done.returncode or listed is None:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        # pip says why it could not connect in a warning, and then that there is no release
        tried = [line for line in done.stderr.splitlines() if "connection broken by" in line or "HTTP error" in line]
        why = (tried or said or ["pip printed no list of versions"])[-1].partition(": ")[2]
        raise NoIndexError(
            f"the package index lists no release of {package}: {why}\n"
            "  help: check the network, and the index that `pip config list` and PIP_INDEX_URL name"
        )
    found = [version for text in listed[1].split(",") if (version := _version(text.strip())) is not None]
    return sorted(version for version in found if not version.is_prerelease)


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None
