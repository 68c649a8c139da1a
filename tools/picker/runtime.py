"""Python for the browser: CPython in WebAssembly with attnreg, packed for pages that are opened from a disk.

`python -m picker.runtime FOLDER`, in tools/, downloads what is pinned below through npm and pip, once, and checks it.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import importlib.util
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

PYODIDE = ("pyodide", "314.0.7", "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0")
# the compiled part of pydantic; the others are taken from the environment that builds the site
CORE = ("pydantic-core", "2.50.4", "e6da138a1ecc1341c8b788a5ee822670b03788e1f5decf7af9d461de6e508b8e")
CORE_TAGS = ("--implementation", "cp", "--abi", "cp314", "--platform", "pyemscripten_2026_0_wasm32")
PYTHON = "3.14"
_PURE = (
    "annotated_types",
    "click",
    "packaging",
    "pydantic",
    "rich",
    "typing_extensions",
    "typing_inspection",
    "yaml",
)
# parts of attnreg that answer; what runs kernels needs torch
# what runs attention, or measures it: no command that a page calls imports it
LEFT_OUT = frozenset({"integrations", "kernels", "runtime", "tuning"})
_RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip")
ROOT = Path(__file__).resolve().parents[2]


class RuntimeMissingError(RuntimeError):
    """Raised where a download is not what is pinned, or an environment has another pydantic."""


def fetch(folder: Path) -> None:
    """Download the pinned packages into a folder, and pack what every site has of them.

    Raises `RuntimeMissingError` for one with another hash.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name, number, digest = PYODIDE
    if not _is(tarball := folder / f"{name}-{number}.tgz", digest):
        subprocess.run(["npm", "pack", "--silent", f"{name}@{number}"], cwd=folder, check=True, stdout=subprocess.PIPE)
    name, number, digest_core = CORE
    if not _is(wheel := _wheel(folder), digest_core):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", *CORE_TAGS]
        subprocess.run([*pip, "--python-version", PYTHON, "--dest", folder, f"{name}=={number}"], check=True)
    for file, wanted in ((tarball, digest), (wheel, digest_core)):
        if not _is(file, wanted):
            raise RuntimeMissingError(f"{file} is not the file whose hash is pinned in {Path(__file__).name}")
    _pack(folder)


def _is(file: Path, digest: str) -> bool:
    return file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == digest


def _wheel(folder: Path) -> Path:
    return folder / f"pydantic_core-{CORE[1]}-cp314-cp314-pyemscripten_2026_0_wasm32.whl"


def scripts(folder: Path) -> dict[str, bytes]:
    """Name -> script: Pyodide's files, and the packages; empty where there are none.

    Raises `RuntimeMissingError` where the environment has another version of pydantic's compiled part.
    """
    if not (folder / "runtime.js").is_file():
        return {}
    if version("pydantic_core") != CORE[1]:
        raise RuntimeMissingError(
            f"pydantic_core {version('pydantic_core')} is installed, and {CORE[1]} is pinned for browsers: "
            f"change CORE in {Path(__file__).name}"
        )
    runtime = (folder / "runtime.js").read_bytes()
    return {"runtime.js": runtime, "packages.js": _script({"packages.zip": packages(folder)})}


def _pack(folder: Path) -> None:
    """Write the script that is the same for every site."""
    with tarfile.open(folder / f"pyodide-{PYODIDE[1]}.tgz") as tar:
        files = {name: _member(tar, name) for name in _RUNTIME}
        # without the list of packages that could be fetched
        lock = {"info": json.loads(_member(tar, "pyodide-lock.json"))["info"], "packages": {}}
    (folder / "runtime.js").write_bytes(_script(files | {"pyodide-lock.json": json.dumps(lock).encode()}))


def _script(files: Mapping[str, bytes]) -> bytes:
    """A script that gives a page some files, compressed: it may fetch none from a disk."""
    packed = {name: base64.b64encode(gzip.compress(data, mtime=0)).decode() for name, data in files.items()}
    return f"Object.assign(globalThis.attnregPython??={{}},{json.dumps(packed)});\n".encode()


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(f"package/{name}")
    assert file is not None
    return file.read()


def packages(folder: Path) -> bytes:
    """An archive of attnreg, its data, the picker's writers, and the packages that they import."""
    out = io.BytesIO()
    # what holds it is compressed as a whole
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in _files(folder):
            archive.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(_wheel(folder)) as wheel:
        for name in wheel.namelist():
            if name.endswith((".py", ".so", "METADATA")):
                yield name, wheel.read(name)
    for package in _PURE:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        file = Path(spec.origin)
        yield from _tree(file.parent, package) if file.name == "__init__.py" else [(file.name, file.read_bytes())]
    for path in sorted((ROOT / "attnreg").glob("*.py")):
        yield f"attnreg/{path.name}", path.read_bytes()
    for path in sorted((ROOT / "attnreg").iterdir()):
        if path.is_dir() and path.name not in LEFT_OUT:
            yield from _tree(path, f"attnreg/{path.name}")
    yield from _tree(ROOT / "registry", "attnreg/registry", "*.yaml")
    yield from _tree(ROOT / "examples/configs", "attnreg/examples/configs", "*.json")
    yield from _tree(ROOT / "tools/picker", "picker")


def _tree(folder: Path, name: str, pattern: str = "*.py") -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob(pattern)):
        yield f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes()


def main() -> int:
    """Entry point: the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the downloads are kept")
    fetch(parser.parse_args().folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
