"""The page of the Python API: its examples run, and every public name stands on it with what it says of itself."""

from __future__ import annotations

import doctest
import inspect
import re
from types import ModuleType

import pytest
from support import ROOT

import attnreg

PAGE = (ROOT / "docs/python_api.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```pycon\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = "\n".join(EXAMPLES)
    test = doctest.DocTestParser().get_doctest(text, {}, "docs/python_api.md", "docs/python_api.md", 0)
    said: list[str] = []
    results = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert (results.failed, "".join(said)) == (0, "")
    assert results.attempted > 20


# the calls of `attnreg` that an example shows
@pytest.mark.parametrize(
    "call",
    ["select", "load_registry", "bundled_registries", "requests_from_model", "Attention.from_selection", "verify"],
)
def test_every_main_call_has_an_example(call: str) -> None:
    assert f"attnreg.{call}(" in "".join(EXAMPLES)


@pytest.mark.parametrize("name", sorted(set(attnreg.__all__) - {"__version__", "ops"}))
def test_a_public_name_says_what_it_is_and_what_it_raises(name: str) -> None:
    value = getattr(attnreg, name)
    entry = PAGE.split(f"### `attnreg.{name}`\n")
    assert len(entry) == 2
    text = entry[1].partition("\n### ")[0]
    assert (inspect.getdoc(value) or "").splitlines()[0].replace("``", "`") in text
    if not inspect.isclass(value):
        assert re.search(rf"^{name}\(", text, re.MULTILINE)
    elif not issubclass(value, Exception):
        members = [k for k, v in vars(value).items() if inspect.isfunction(v) and not k.startswith("_")]
        assert [m for m in members if not re.search(rf"^- `{m}[(`]", text, re.MULTILINE)] == []


def test_a_public_member_has_a_docstring() -> None:
    bare = []
    for name in set(attnreg.__all__) - {"__version__", "ops"}:
        value = getattr(attnreg, name)
        for key, member in vars(value).items() if inspect.isclass(value) else ():
            function = getattr(member, "func", None) or getattr(member, "fget", None) or member
            function = getattr(function, "__func__", function)
            if inspect.isfunction(function) and not key.startswith("_") and not function.__doc__:
                bare.append(f"{name}.{key}")
    assert bare == []


def test_a_name_that_no_block_has_is_an_error(gen_docs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import docs.api

    monkeypatch.setattr(attnreg, "__all__", [*attnreg.__all__, "newest"])
    with pytest.raises(ValueError, match="differ in newest"):
        docs.api.api_blocks()


def test_signatures_are_those_of_the_source(gen_docs: ModuleType) -> None:
    import docs.api

    def short(a: int, *, b: str = "x") -> bool:
        return bool(a and b)

    def long(first_of_all: int, second_of_all: str, third_of_all: float, fourth_of_all: bytes, last: str = "") -> None:
        """Nothing."""

    assert docs.api.signature("short", short) == 'short(a: int, *, b: str = "x") -> bool'
    assert docs.api.signature("short", short, bound=True) == 'short(*, b: str = "x") -> bool'
    assert docs.api.signature("long", long).splitlines()[:2] == ["long(", "    first_of_all: int,"]
    assert docs.api.markdown(long) == "Nothing."
