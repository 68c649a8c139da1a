"""Triton's keys of kernels by their code alone: without comments, docstrings and their place in a file.

Triton's own key of a function has its text and the line that it begins in. With it, a comment in a kernel or a line
above makes every recorded kernel another one. Read in triton 3.6.0 to 3.9.0: ``JITCallable.cache_key``.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

_known: dict[Any, str] = {}


@contextmanager
def keys_of_code() -> Iterator[None]:
    """While it lasts, the ``cache_key`` of each function is that of its code; no function is changed."""
    from triton.runtime.jit import JITCallable

    theirs = JITCallable.cache_key.fget
    # what Triton found of the globals that a function reads, while the key of the function is made
    found: dict[int, dict[Any, Any]] = {}

    def cache_key(function: Any) -> str:
        text = function._src
        at = function.__module__, function.__qualname__, text
        if at not in _known:
            # as Triton does, for functions that call themselves
            _known[at] = f"recursion:{function.__qualname__}"
            before = function.starting_line_number, function.hash
            function._src, function.starting_line_number, function.hash = code_of(text), 0, None
            try:
                _known[at] = theirs(function)
            except BaseException:
                del _known[at]
                raise
            finally:
                function._src = text
                function.starting_line_number, function.hash = before
                found.pop(id(function), None)
        return _known[at]

    # Triton adds to a key the globals of callees whose own key was made before. Here these are in the own key alone, so
    # that keys do not depend on what was made first.
    of_globals = property(lambda f: found.get(id(f), {}), lambda f, value: found.__setitem__(id(f), value))
    with (
        mock.patch.object(JITCallable, "cache_key", property(cache_key)),
        mock.patch.object(JITCallable, "used_global_vals", of_globals, create=True),
    ):
        yield


def code_of(text: str) -> str:
    """A function's text without comments, docstrings and empty lines: the same in every version of Python."""
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            first = node.body[0]
            assert first.end_lineno is not None
            lines[first.lineno - 1 : first.end_lineno] = [""] * (first.end_lineno - first.lineno + 1)
            # what is nothing but a docstring needs a body
            lines[first.lineno - 1] = " " * first.col_offset + "pass" if len(node.body) == 1 else ""
    for token in tokenize.generate_tokens(io.StringIO("\n".join(lines)).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip()) + "\n"
