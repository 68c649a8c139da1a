"""Keys of kernels: comments, docstrings and places in files are no part of them, and any other text is."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from support.compilers.code_keys import code_of, keys_of_code

PLAIN = """\
def kernel(x, y: tl.constexpr):
    if y > 1:
        return "# no comment"
    return x
"""
TOLD = '''\
def kernel(x, y: tl.constexpr):
    """What it does.

    In two paragraphs.
    """
    # why
    if y > 1:  # where it matters

        return "# no comment"
    return x
'''


def test_comments_docstrings_and_empty_lines_are_no_code() -> None:
    assert code_of(TOLD) == code_of(PLAIN) == PLAIN


@pytest.mark.parametrize(
    ("old", "new"), [("y > 1", "y > 2"), ("# no", "#no"), ("return x", "return -x"), ("x, y", "y, x")]
)
def test_what_is_compiled_is_code(old: str, new: str) -> None:
    assert code_of(TOLD.replace(old, new)) != PLAIN


def test_a_function_of_a_docstring_alone_stays_a_function() -> None:
    assert code_of('def nothing():\n    """It does nothing."""\n') == "def nothing():\n    pass\n"


def test_a_callee_counts_and_its_place_does_not(keys: Keys) -> None:
    before = keys("x + 1")
    assert keys("x + 1", above="# a line above") == before
    assert all(one != other for one, other in zip(keys("x + 2"), before, strict=True))


Keys = Callable[..., tuple[str, str]]
MODULE = """
from triton.runtime.jit import JITFunction
{above}
@JITFunction
def callee(x):
    return {value}


@JITFunction
def caller(x):
    return callee(x)
"""


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    """The keys of a function and of one that calls it, from a module of their own."""
    pytest.importorskip("triton")

    def make(value: str, above: str = "") -> tuple[str, str]:
        name = f"planted_{len(list(tmp_path.iterdir()))}"
        file = tmp_path / f"{name}.py"
        file.write_text(MODULE.format(value=value, above=above))
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        with keys_of_code():
            return module.callee.cache_key, module.caller.cache_key

    return make
