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
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

from attnreg.compile.cache import pickled
from attnreg.compile.inputs.bundled import bundled_overlays, bundled_registries
from attnreg.loader import load_registry

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
    return {"runtime.js": runtime, "packages.js": _script(_archive(compiled(folder, dict(_files(folder)))))}


def _pack(folder: Path) -> None:
    """Write the script that is the same for every site."""
    with tarfile.open(folder / f"pyodide-{PYODIDE[1]}.tgz") as tar:
        files = {name: _member(tar, name) for name in _RUNTIME}
        # without the list of packages that could be fetched
        lock = {"info": json.loads(_member(tar, "pyodide-lock.json"))["info"], "packages": {}}
    with zipfile.ZipFile(io.BytesIO(files["python_stdlib.zip"])) as archive:
        library = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in compiled(folder, library).items():
            archive.writestr(zipfile.ZipInfo(name), data)
    files |= {"python_stdlib.zip": out.getvalue(), "pyodide-lock.json": json.dumps(lock).encode()}
    (folder / "runtime.js").write_bytes(_script(files))


def compiled(folder: Path, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Files by name, modules of Python as bytecode of Pyodide's version: a browser compiles none then.

    Node runs Pyodide for it, once for a module; where there is no Node, modules stay as they are.
    """
    node = shutil.which("node")
    if node is None:
        return dict(files)
    kept = folder / "bytecode" / PYODIDE[2][:16]
    kept.mkdir(parents=True, exist_ok=True)
    places = {
        name: kept / hashlib.sha256(name.encode() + b"\0" + data).hexdigest()
        for name, data in files.items()
        if name.endswith(".py")
    }
    missing = {name: files[name].decode() for name, place in places.items() if not place.is_file()}
    if missing:
        with tempfile.TemporaryDirectory() as scratch:
            with tarfile.open(folder / f"pyodide-{PYODIDE[1]}.tgz") as tar:
                tar.extractall(scratch, filter="data")
            command = [node, str(Path(__file__).with_name("compile.mjs")), f"{scratch}/package"]
            done = subprocess.run(command, input=json.dumps(missing), stdout=subprocess.PIPE, text=True, check=True)
        for name, text in json.loads(done.stdout).items():
            places[name].write_bytes(base64.b64decode(text))
    return {
        f"{name}c" if name in places else name: places[name].read_bytes() if name in places else data
        for name, data in files.items()
    }


def _archive(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Files as one, and where each begins and ends: unpacking a zip takes a browser half a second."""
    index, start = [], 0
    for name, data in files.items():
        index.append([name, start, start + len(data)])
        start += len(data)
    return {"packages.json": json.dumps(index).encode(), "packages": b"".join(files.values())}


def _script(files: Mapping[str, bytes]) -> bytes:
    """A script that gives a page some files, compressed: it may fetch none from a disk."""
    packed = {name: base64.b64encode(gzip.compress(data, mtime=0)).decode() for name, data in files.items()}
    return f"Object.assign(globalThis.attnregPython??={{}},{json.dumps(packed)});\n".encode()


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(f"package/{name}")
    assert file is not None
    return file.read()


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """attnreg, its data, the bundled registries as they are compiled, the picker, and the packages that they import."""
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
    for name in (*bundled_registries(), *bundled_overlays()):
        yield f"picker/compiled/{name}", pickled(load_registry(name))


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
