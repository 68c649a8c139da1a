"""Parses shell scripts with tree-sitter, and limits the work that one file may cause."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from attnreg.engines.deploy.launch import LaunchError
from attnreg.errors import Location, Problem

if TYPE_CHECKING:
    from tree_sitter import Node

    from attnreg.engines.deploy.places import Text

# the most seconds of the processor's time in which the parser reads the scripts of one file
PARSE_SECONDS = 2.0
# the most nodes and words that are visited for one file
MOST_STEPS = 250_000
# the most nested constructs, and texts that one shell gives to another
MOST_NESTED = 60
_BLOCK = 1 << 16
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
# what the extra `check` of attnreg installs
PARSER = "tree-sitter tree-sitter-bash"


class Budget:
    """The work that is left for one file."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._steps = MOST_STEPS
        self._seconds = PARSE_SECONDS

    def spend(self, steps: int = 1, text: Text | None = None, offset: int = 0) -> None:
        """Take some steps, at a place of a text. Raises `LaunchError` if none are left."""
        self._steps -= steps
        if self._steps < 0:
            where = Location(self.file, 1, 1) if text is None else text.at(offset)
            raise self.refusal(where, f"the file takes more than {MOST_STEPS:,} steps to read")

    def refusal(self, where: Location, message: str) -> LaunchError:
        """The error for a file that takes too much work."""
        return LaunchError([Problem(where, message, "check the command that starts the engine in a file of its own")])

    def parsed(self, text: Text) -> Node:
        """The root of the syntax tree of a script.

        Its offsets are those of the text's characters. Raises `LaunchError` without the extra, and for a script that
        takes too long.
        """
        try:
            import tree_sitter
            import tree_sitter_bash
        except ImportError:
            message = "a shell script is read with tree-sitter, which is not installed"
            raise LaunchError([Problem(text.at(0), message, f"pip install {PARSER}")]) from None
        # the parser's time doubles with each array within an array
        if text.text.count("=(") - text.text.count(")") > MOST_NESTED:
            raise self.refusal(text.at(0), f"brackets are nested more than {MOST_NESTED} deep")
        # one byte a character, so that offsets in bytes are those in characters
        data = _NOT_ASCII.sub("x", text.text).encode("ascii")
        parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
        began = time.thread_time()
        try:
            tree = parser.parse(
                lambda offset, _: data[offset : offset + _BLOCK],
                progress_callback=lambda _offset, _error: time.thread_time() - began > self._seconds,
            )
        except ValueError:
            message = f"the script takes more than {PARSE_SECONDS:g} seconds to parse"
            raise self.refusal(text.at(0), message) from None
        finally:
            self._seconds -= time.thread_time() - began
        return tree.root_node


def faults(root: Node, budget: Budget, text: Text) -> list[tuple[int, int]]:
    """The lines, from 0, of each part of a script that the parser does not understand: the first and the last."""
    found, nodes = [], [root] if root.has_error else []
    while nodes:
        node = nodes.pop()
        budget.spend(1, text, node.start_byte)
        if node.is_error or node.is_missing:
            found.append((node.start_point.row, node.end_point.row))
        else:
            nodes += [child for child in node.children if child.has_error or child.is_missing]
    return sorted(found)
