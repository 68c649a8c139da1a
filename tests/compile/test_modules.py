"""The kernel module of a row: whom it is trusted from, which contract it is made for, and its options."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.registries.files import brief, refusal, row, write

import attnreg
from attnreg import AttentionRequest, Platform, loader
from attnreg.contract import CONTRACT, FUNCTIONS
from attnreg.loader import load_kernel, unloadable
from attnreg.selection.selector import evaluate

# a module with every function of the contract, which needs no torch
KERNELS = "name = __name__\nkv_cache_shape = plan = write_kv = forward = print\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an importable package that holds a kernel module, and one that fails."""
    place = tmp_path / "site/trusted_kernels"
    place.mkdir(parents=True)
    (place / "__init__.py").touch()
    (place / "fast.py").write_text(KERNELS)
    (place / "broken.py").write_text("raise ImportError('no such kernel')\n")
    monkeypatch.syspath_prepend(str(place.parent))
    for module in [m for m in sys.modules if m.startswith(place.name)]:
        monkeypatch.delitem(sys.modules, module)
    return place.name


@pytest.mark.parametrize("trust", [["trusted_kernels"], "trusted_kernels", {"trusted_kernels", "other"}])
def test_a_trusted_module_is_imported_when_it_is_loaded(trust: Any, package: str, tmp_path: Path) -> None:
    source = write(tmp_path / "r", backends=row("capabilities: {}", f"module: {package}.fast", "contract: 1"))
    registry = attnreg.load_registry(source, trust=trust)
    assert package not in sys.modules
    assert loader.load_kernel(registry, "A").name == "trusted_kernels.fast"
    assert registry.trusted >= {package}


def test_a_variant_may_have_a_module_of_its_own(package: str, tmp_path: Path) -> None:
    new = f"{{name: new, when: {{features: [sinks]}}, module: {package}.broken, contract: 1}}"
    text = row("capabilities: {}", f"module: {package}.fast", "contract: 1", f"variants: [{new}, {{name: old}}]")
    source = write(tmp_path / "r", backends=text)
    registry = attnreg.load_registry(source, trust=[package])
    assert registry.backends["A"].modules == (f"{package}.broken", f"{package}.fast")
    assert loader.load_kernel(registry, "A/old").name == f"{package}.fast"
    with pytest.raises(ImportError, match="no such kernel"):
        loader.load_kernel(registry, "A/new")


def test_a_variant_whose_module_does_not_load_gives_way_to_the_next(package: str, tmp_path: Path) -> None:
    broken, fast = (f"module: {package}.{name}, contract: 1" for name in ("broken", "fast"))
    text = row("capabilities: {}", f"variants: [{{name: new, {broken}}}, {{name: old, {fast}}}]")
    registry = attnreg.load_registry(write(tmp_path / "r", backends=text), trust=[package])
    request, here = AttentionRequest(head_size=64), Platform(platform="gpu", arch="g1")
    assert evaluate(request, here, registry).chosen.title == "A/new"
    runs = evaluate(request, here, registry, unloadable=unloadable)
    assert runs.chosen.title == "A/old"
    assert load_kernel(runs.registry, runs.backend.title).name == f"{package}.fast"
    refused = evaluate(request, here, registry, "A/new", unloadable=unloadable)
    assert [reason.text for reason in refused.candidates[0].reasons] == ["cannot be run: ImportError: no such kernel"]


def test_the_module_of_a_variant_is_checked_as_that_of_a_row(package: str, tmp_path: Path) -> None:
    text = row("capabilities: {}", "variants: [{name: x, module: elsewhere.fast}, {name: y, contract: 1}]")
    problems = refusal(write(tmp_path / "r", backends=text))
    assert "the package elsewhere is not trusted to be imported" in problems
    assert "a contract is stated beside the `module` that is made for it" in problems


def test_without_trust_nothing_is_imported(package: str, tmp_path: Path) -> None:
    source = write(tmp_path / "r", backends=row("capabilities: {}", f"module: {package}.fast", "contract: 1"))
    assert "the package trusted_kernels is not trusted to be imported" in refusal(source, trust=["trusted"])
    assert package not in sys.modules


def test_a_module_that_cannot_be_imported_says_why(package: str, tmp_path: Path) -> None:
    source = write(tmp_path / "r", backends=row("capabilities: {}", f"module: {package}.broken", "contract: 1"))
    registry = attnreg.load_registry(source, trust=[package])
    with pytest.raises(ImportError, match="no such kernel"):
        loader.load_kernel(registry, "A")
    with pytest.raises(ImportError, match=r"B has no kernel module in r@\w{7}: the row is knowledge only"):
        loader.load_kernel(registry, "B")


def test_the_modules_of_an_engine_are_knowledge_and_never_imported(package: str, tmp_path: Path) -> None:
    text = "imports: never\n" + row("capabilities: {}", f"module: {package}.fast", "contract: 1")
    registry = attnreg.load_registry(write(tmp_path / "engine", backends=text), trust=[package])
    assert registry.backends["A"].module == "trusted_kernels.fast"
    with pytest.raises(
        ImportError, match=r"A is served by trusted_kernels.fast of another engine; engine@\w{7} imports"
    ):
        loader.load_kernel(registry, "A")
    assert package not in sys.modules


ENDS = [
    ("sys.exit", "import sys\nsys.exit(3)\n", "SystemExit: 3"),
    ("raise KeyboardInterrupt", "raise KeyboardInterrupt('no')\n", "KeyboardInterrupt: no"),
    ("another", "class Gone(BaseException): pass\nraise Gone('now')\n", "Gone: now"),
]


@pytest.mark.parametrize(("text", "end"), [e[1:] for e in ENDS], ids=[e[0] for e in ENDS])
def test_a_module_that_ends_the_process_is_a_reason(text: str, end: str, package: str, tmp_path: Path) -> None:
    (tmp_path / "site" / package / "broken.py").write_text(text)
    source = write(tmp_path / "r", backends=row("capabilities: {}", f"module: {package}.broken", "contract: 1"))
    registry = attnreg.load_registry(source, trust=[package])
    here = Platform(platform="gpu", arch="g1")
    with pytest.raises(attnreg.NoBackendError) as e:
        attnreg.select(AttentionRequest(head_size=64), here, registry, "A", to_run=True)
    (reason,) = e.value.selection.candidates[0].reasons
    assert reason.text == f"cannot be run: ImportError: the import of trusted_kernels.broken ended in {end}"


def test_an_interrupt_during_an_import_is_the_users(package: str, tmp_path: Path) -> None:
    text = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nfor i in range(1000): pass\n"
    (tmp_path / "site" / package / "broken.py").write_text(text)
    source = write(tmp_path / "r", backends=row("capabilities: {}", f"module: {package}.broken", "contract: 1"))
    registry = attnreg.load_registry(source, trust=[package])
    with pytest.raises(KeyboardInterrupt):
        loader.load_kernel(registry, "A")


def test_a_failed_import_is_not_remembered(package: str, tmp_path: Path) -> None:
    lines = "capabilities: {dtypes: [bfloat16]}", f"module: {package}.broken", "contract: 1"
    registry = attnreg.load_registry(write(tmp_path / "r", backends=row(*lines)), trust=[package])
    request, here = AttentionRequest(head_size=64), Platform(platform="gpu", arch="g1")
    for _ in range(2):
        with pytest.raises(attnreg.NoBackendError, match="no such kernel"):
            attnreg.select(request, here, registry, to_run=True)
    # as when the missing package is installed into the running process
    (tmp_path / "site" / package / "broken.py").write_text(KERNELS + "# of another size\n")
    chosen = attnreg.select(request, here, registry, to_run=True)
    assert chosen.backend is not None
    assert chosen.backend.name == "A"
    assert attnreg.select(request, here, registry, to_run=True) is chosen


def test_a_refusal_that_no_import_can_change_is_remembered(package: str, tmp_path: Path) -> None:
    lines = "capabilities: {dtypes: [float16]}", f"module: {package}.broken", "contract: 1"
    registry = attnreg.load_registry(write(tmp_path / "r", backends=row(*lines)), trust=[package])
    request, here = AttentionRequest(head_size=64), Platform(platform="gpu", arch="g1")
    first = evaluate(request, here, registry, unloadable=unloadable)
    assert {r.kind for r in first.candidates[0].reasons} == {"claim", "module"}
    assert evaluate(request, here, registry, unloadable=unloadable) is first


# the contract --------------------------------------------------------------------------------------------------------


def test_the_contract_says_its_version_and_its_functions() -> None:
    text = (ROOT / "attnreg/runtime/interface.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert (ast.get_docstring(tree) or "").startswith(f"The contract (version {CONTRACT}) between an engine and")
    (protocol,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "KernelModule")
    assert tuple(f.name for f in protocol.body if isinstance(f, ast.FunctionDef)) == FUNCTIONS


CONTRACTS = {
    "none": (
        "",
        """\
backends.yaml:9:13: backends.A.module: the row does not say which contract its module is made for
  help: write the module for attnreg/runtime/interface.py, and add `contract: 1`, its version""",
    ),
    "a later one": (
        "contract: 2",
        """\
backends.yaml:10:15: backends.A.contract: the module is made for contract 2, and this attnreg has contract 1
  help: install a version of the module for contract 1, or an attnreg that has contract 2""",
    ),
    "an earlier one": (
        "contract: 0",
        """\
backends.yaml:10:15: backends.A.contract: the module is made for contract 0, and this attnreg has contract 1
  help: install a version of the module for contract 1""",
    ),
    "a word": ("contract: v1", "backends.yaml:10:15: backends.A.contract: expected an integer, got `v1`"),
    "no number": ("contract: true", "backends.yaml:10:15: backends.A.contract: expected an integer, got `true`"),
}


@pytest.mark.parametrize(("line", "message"), CONTRACTS.values(), ids=CONTRACTS)
def test_a_module_for_another_contract_is_refused(line: str, message: str, package: str, tmp_path: Path) -> None:
    source = write(tmp_path / "r", backends=row("capabilities: {}", f"module: {package}.fast", *filter(None, [line])))
    assert brief(refusal(source, trust=[package])) == message


def test_a_contract_stands_beside_its_module(package: str, tmp_path: Path) -> None:
    source = write(tmp_path / "r", backends=row("capabilities: {}", f"module: {package}.fast", "contract: 1"))
    assert brief(refusal(source, {"backends": {"A": {"contract": 1}}}, trust=[package])) == (
        "<overlay>:4:7: backends.A.contract: a contract is stated beside the `module` that is made for it\n"
        "  help: state both, or remove it"
    )
    other = {"backends": {"A": {"module": f"{package}.other"}}}
    assert "A.module: the row does not say which contract" in refusal(source, other, trust=[package])
    other["backends"]["A"]["contract"] = CONTRACT  # type: ignore[assignment]
    changed = attnreg.load_registry(source, other, trust=[package]).backends["A"]
    assert (changed.module, changed.contract) == ("trusted_kernels.other", 1)


def test_a_module_without_the_contracts_functions_is_not_selected_to_run(package: str, tmp_path: Path) -> None:
    (tmp_path / "site" / package / "fast.py").write_text("plan = forward = print\nwrite_kv = None\n")
    source = write(tmp_path / "r", backends=row("capabilities: {}", f"module: {package}.fast", "contract: 1"))
    registry = attnreg.load_registry(source, trust=[package])
    why = "trusted_kernels.fast, the kernel module of A, has no kv_cache_shape, write_kv"
    with pytest.raises(ImportError, match=f"^{why}$"):
        loader.load_kernel(registry, "A")
    here = Platform(platform="gpu", arch="g1")
    with pytest.raises(attnreg.NoBackendError) as e:
        attnreg.select(AttentionRequest(head_size=64), here, registry, "A", to_run=True)
    (reason,) = e.value.selection.candidates[0].reasons
    assert reason.text == f"cannot be run: ImportError: {why}"


# options -------------------------------------------------------------------------------------------------------------

OPTIONS = "options: {tile: 64, path: fast, limit: 0.5, fused: true}"


def with_options(package: str, directory: Path, options: str = OPTIONS) -> Path:
    lines = ("capabilities: {}", f"module: {package}.fast", "contract: 1", options)
    return write(directory / "r", backends=row(*lines))


def test_overlays_change_options(package: str, tmp_path: Path) -> None:
    source = with_options(package, tmp_path)
    overlay = {"backends": {"A": {"options": {"tile": 128, "limit": 2, "fused": False}}}}
    registry = attnreg.load_registry(source, overlay, trust=[package])
    assert dict(registry.backends["A"].options) == {"tile": 128, "path": "fast", "limit": 2.0, "fused": False}
    assert type(registry.backends["A"].options["limit"]) is float
    plain = attnreg.load_registry(source, trust=[package])
    assert plain.fingerprint != registry.fingerprint
    with pytest.raises(TypeError, match="read-only"):
        plain.backends["A"].options["tile"] = 1  # type: ignore[index]
    # another module has options of its own
    other = {"backends": {"A": {"module": f"{package}.other", "contract": 1, "options": {"new": 1}}}}
    assert dict(attnreg.load_registry(source, other, trust=[package]).backends["A"].options) == {"new": 1}


@pytest.mark.parametrize("text", ["&it 'no'", '&it "no"', "|-\n        no", ">-\n        no", "! no"])
def test_a_text_that_is_no_plain_word_is_no_boolean(text: str, package: str, tmp_path: Path) -> None:
    source = with_options(package, tmp_path, f"options:\n      path: {text}")
    assert dict(attnreg.load_registry(source, trust=[package]).backends["A"].options)["path"] == "no"


WRONG_OPTIONS: dict[str, tuple[str, Any, str]] = {
    "an unknown option": (
        OPTIONS,
        {"tiles": 8},
        """\
<overlay>:5:9: backends.A.options.tiles: the module has no option `tiles`
  help: did you mean `tile`? (also: fused, limit, path)""",
    ),
    "another type": (
        OPTIONS,
        {"tile": "wide", "fused": 1, "path": 3, "limit": True},
        """\
<overlay>:5:17: backends.A.options.tile: expected an integer, got `wide`
<overlay>:6:18: backends.A.options.fused: expected true or false, got `1`
<overlay>:7:17: backends.A.options.path: expected text, got `3`
<overlay>:8:18: backends.A.options.limit: expected a number, got `true`""",
    ),
    "a module without options": (
        "options: {}",
        {"tile": 8},
        """\
<overlay>:5:9: backends.A.options.tile: the module has no option `tile`
  help: options are stated beside `module`""",
    ),
    "booleans of other readers of YAML": (
        "options: {tile: off, path: 'no', fused: &it Yes}",
        {},
        """\
backends.yaml:11:21: backends.A.options.tile: `off` is text here, and no boolean
  help: write false, or quote it where the module reads the text
backends.yaml:11:45: backends.A.options.fused: `Yes` is text here, and no boolean
  help: write true, or quote it where the module reads the text""",
    ),
    "no scalar": (
        "options: {tile: [1], path: .inf, fused: null}",
        {},
        """\
backends.yaml:11:21: backends.A.options.tile: expected text, a finite number, true or false, got a list
backends.yaml:11:32: backends.A.options.path: expected text, a finite number, true or false, got the number .inf
backends.yaml:11:45: backends.A.options.fused: expected text, a finite number, true or false, got `null`""",
    ),
}


@pytest.mark.parametrize(("options", "changes", "message"), WRONG_OPTIONS.values(), ids=WRONG_OPTIONS)
def test_wrong_options(options: str, changes: Any, message: str, package: str, tmp_path: Path) -> None:
    source = with_options(package, tmp_path, options)
    overlay = [{"backends": {"A": {"options": changes}}}] if changes else []
    assert brief(refusal(source, overlay, trust=[package])) == message
