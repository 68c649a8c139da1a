"""Follows a shell script as far as its text decides: which commands run an engine, with which words and variables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from attnreg.engines.deploy import words as of_commands
from attnreg.engines.deploy.launch import (
    BROKEN_LINE,
    MOST_LAUNCHES,
    EngineLaunch,
    GivenOption,
    GivenVariable,
    LaunchError,
)
from attnreg.engines.deploy.places import PlacedWord, Text
from attnreg.engines.deploy.shell.expansion import COMMANDS_WITHIN, Expander
from attnreg.engines.deploy.shell.syntax import MOST_NESTED, Budget, faults
from attnreg.engines.deploy.shell.values import Piece, Scope, ShellValue, split_at_blanks, value_of, word_of
from attnreg.engines.deploy.words import ASSIGNMENT, command_word, engine_of, may_run, mentions, only_says, read_words
from attnreg.errors import Location, Problem

if TYPE_CHECKING:
    from tree_sitter import Node

_SHELLS = {"bash", "dash", "ksh", "sh", "su", "zsh"}
# commands that set variables to what they read
_READS = {"getopts", "mapfile", "read", "readarray"}
# commands that join their arguments to a command line
_JOINS = {"eval", "ssh", "tmux"}
_READS_TEXT = re.compile(r"-[A-Za-z]{,20}c")
_EXPORTS = re.compile(r"-[A-Za-z]*x[A-Za-z]*")
# constructs whose commands run in order
_SEQUENCES = {
    "program", "compound_statement", "do_group", "else_clause", "elif_clause", "negated_command", "pipeline",
    "redirected_statement", "ERROR", "case_item",
}  # fmt: skip


class _Given(NamedTuple):
    """A text that a command gives to another shell. inherits: whether the other shell gets this shell's variables."""

    text: Text
    before: Sequence[PlacedWord]
    inherits: bool


def launches_of(text: Text, budget: Budget, variables: Mapping[str, PlacedWord] | None = None) -> list[EngineLaunch]:
    """The launches of a script. variables: the environment in which it runs, as far as it is known.

    Raises `LaunchError` for a command of an engine that cannot be read, and for a script that takes too much work.
    """
    if not may_run(text.text):
        return []
    script = _Script(text, budget, [], 0)
    script.run(_environment(variables or {}, script))
    return script.launches


def launches_of_words(
    words: Sequence[PlacedWord], budget: Budget, variables: Mapping[str, PlacedWord]
) -> list[EngineLaunch]:
    """The launches of a command that is already split into words, also of a text that it gives to a shell."""
    script = _Script(Text([]), budget, [], 0)
    if words:
        script.launch(words, [], _environment(variables, script))
    return script.launches


def _environment(variables: Mapping[str, PlacedWord], script: _Script) -> Scope:
    """A scope with the variables of an environment."""
    scope = Scope()
    for name, word in variables.items():
        scope.values[name], scope.exported[name] = value_of([Piece(word.text, word.where)]), True
        script.named_at[name] = word.where
    return scope


def words_of(text: Text, budget: Budget) -> list[PlacedWord]:
    """The words of the first command of a command line."""
    script, node = _Script(text, budget, [], 0), budget.parsed(text)
    while node.type != "command" and node.named_children:
        node = node.named_children[0]
    return script.expander.words(node, Scope())


class _Script:
    """One script; ``launches`` are those found so far, in it and in what it gives to other shells."""

    def __init__(self, text: Text, budget: Budget, launches: list[EngineLaunch], nested: int) -> None:
        self.text, self.budget, self.launches, self.nested = text, budget, launches, nested
        self._functions: dict[str, Node] = {}
        self._called: set[str] = set()
        self._running: set[str] = set()
        self.expander = Expander(text, budget)
        # variables that may hold an engine's command; where variables are set
        self._holding: set[str] = set()
        self.named_at: dict[str, Location] = {}
        if nested > MOST_NESTED:
            raise budget.refusal(text.at(0), f"commands are nested more than {MOST_NESTED} deep")

    def run(self, scope: Scope) -> None:
        """Follow the script. It changes the variables of ``scope``."""
        root = self.budget.parsed(self.text)
        lines = self.text.text.split("\n")
        for first, last in faults(root, self.budget, self.text):
            if mentions("\n".join(lines[first : last + 1])):
                offset = sum(len(line) + 1 for line in lines[:first])
                blank = len(lines[first]) - len(lines[first].lstrip())
                help_ = "close its quotes and brackets, or give the command in a file of its own"
                where = self.text.at(offset + blank)
                raise LaunchError([Problem(where, "not a shell command: quotes or brackets do not match", help_)])
        self._follow(root, scope, 0)
        for name, body in self._functions.items():
            if name not in self._called:
                self.expander.arguments = None
                self._follow(body, Scope(scope), 0)
        for name in sorted(self._holding - self.expander.used):
            value = scope.get(name)[1]
            if value is not None:
                fields = list(map(list, value.items)) if value.is_array else split_at_blanks(value.pieces)
                words = [word_of(field, field[0].where) for field in fields if field]
                if engine_of(words):
                    self.launch(words, [], scope)

    # commands ----------------------------------------------------------------------------------------------------

    def _follow(self, node: Node, scope: Scope, depth: int) -> None:
        self.expander.spend(node)
        if depth > MOST_NESTED:
            raise self.budget.refusal(self.expander.at(node), f"commands are nested more than {MOST_NESTED} deep")
        kind = node.type
        if kind == "command":
            self._command(node, scope, depth)
        elif kind == "variable_assignment":
            self._assign(node, scope, depth)
        elif kind in ("declaration_command", "variable_assignments", "unset_command"):
            self._declare(node, scope, depth)
        elif kind == "list":
            self._list(node, scope, depth)
        elif kind in ("subshell", *COMMANDS_WITHIN):
            self._in_order(node, Scope(scope), depth)
        elif kind == "if_statement":
            self._if(node, scope, depth)
        elif kind == "case_statement":
            items = [child for child in node.named_children if child.type == "case_item"]
            self._branches([[child] for child in items], scope, depth, one_runs=False)
        elif kind in ("for_statement", "c_style_for_statement", "while_statement"):
            self._loop(node, scope, depth)
        elif kind == "function_definition":
            name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
            if name is not None and body is not None:
                self._functions[self.expander.raw(name)] = body
        elif kind in _SEQUENCES:
            self._in_order(node, scope, depth)
            if kind == "pipeline":
                self._piped(node, scope)

    def _in_order(self, node: Node, scope: Scope, depth: int) -> None:
        for child in node.named_children:
            if child.type == "heredoc_redirect":
                self._heredoc(node, child, scope)
                # the rest of a pipeline stands behind the mark of the text
                self._in_order(child, scope, depth + 1)
            else:
                self._follow(child, scope, depth + 1)

    def _list(self, node: Node, scope: Scope, depth: int) -> None:
        """Follow commands with `&&` and `||` between them, which lean to the left in the tree."""
        rest: list[tuple[bool, Node]] = []
        while node.type == "list" and len(node.named_children) > 1:
            self.expander.spend(node)
            rest.append((any(child.type == "||" for child in node.children), node.named_children[-1]))
            node = node.named_children[0]
        self._follow(node, scope, depth + 1)
        for is_or, command in reversed(rest):
            if is_or:
                self._branches([[command]], scope, depth, one_runs=False)
            else:
                self._follow(command, scope, depth + 1)

    def _if(self, node: Node, scope: Scope, depth: int) -> None:
        branches: list[list[Node]] = [[]]
        has_else = False
        behind = False
        for child in node.children:
            behind = behind or child.type == "then"
            if child.type in ("elif_clause", "else_clause"):
                branches.append([child])
                has_else = has_else or child.type == "else_clause"
            elif child.is_named and behind:
                branches[0].append(child)
            elif child.is_named:
                self._follow(child, scope, depth + 1)
        self._branches(branches, scope, depth, one_runs=has_else)

    def _branches(self, bodies: Sequence[Sequence[Node]], scope: Scope, depth: int, *, one_runs: bool) -> None:
        scopes = [Scope(scope) for _ in bodies]
        for body, inner in zip(bodies, scopes, strict=True):
            for node in body:
                self._follow(node, inner, depth + 1)
        self.budget.spend(scope.merge(scopes, one_runs=one_runs))

    def _loop(self, node: Node, scope: Scope, depth: int) -> None:
        if (variable := node.child_by_field_name("variable")) is not None:
            scope.values[self.expander.raw(variable)] = None
        self._branches([node.named_children], scope, depth, one_runs=False)

    def _command(self, node: Node, scope: Scope, depth: int) -> None:
        self._within(node, scope, depth)
        words = self.expander.words(node, scope)
        assigned = [child for child in node.named_children if child.type == "variable_assignment"]
        before = [self._assigned(child, scope) for child in assigned]
        if not words:
            return
        name = words[0].text
        if name in _READS:
            scope.values |= dict.fromkeys(word.text for word in words[1:])
        if name in self._functions and name not in self._running:
            self._call(name, node, scope, depth)
            return
        launches = len(self.launches)
        self.launch(words, before, scope)
        scope.install(words)
        broken = self.expander.broken(node)
        if broken is not None and len(self.launches) > launches:
            self.launches[-1].options.append(GivenOption(BROKEN_LINE, "", broken))
        for child in (child for child in node.named_children if child.type == "herestring_redirect"):
            self._to_shell(words, before, self.expander.joined(child, scope), scope)

    def _call(self, name: str, node: Node, scope: Scope, depth: int) -> None:
        self._called.add(name)
        self._running.add(name)
        above, self.expander.arguments = self.expander.arguments, self.expander.fields_of(node, scope)[1:]
        self._follow(self._functions[name], scope, depth + 1)
        self.expander.arguments = above
        self._running.discard(name)

    def launch(self, words: Sequence[PlacedWord], before: Sequence[PlacedWord], scope: Scope) -> None:
        """Add the launch of a command that runs an engine, or those of a text that it gives to another shell."""
        if not self._matters(words):
            return
        given = None if only_says(words) else _given_to_shell(words)
        if given is not None:
            count = len(self.launches)
            self._follow_text(given.text, [*before, *given.before], scope, inherits=given.inherits, anew=_anew(words))
            of_commands.take_release(words, self.launches[count:])
        elif engine := engine_of(words):
            if len(self.launches) >= MOST_LAUNCHES:
                raise self.budget.refusal(words[0].where, f"more than {MOST_LAUNCHES} launches")
            self.budget.spend(len(words))
            launch = EngineLaunch(words[0].where, engine, scope.plain_text(f"{engine}=="))
            launch.variables += [*self._exported(scope), *map(_variable, before)]
            launch.plain = [*self.expander.taken]
            read_words(words, launch)
            self.launches.append(launch)

    def _matters(self, words: Sequence[PlacedWord]) -> bool:
        """Whether a command may run an engine, or change variables of a script that does."""
        return any(may_run(word.text) or word.text == "eval" for word in words)

    def _exported(self, scope: Scope) -> Iterator[GivenVariable]:
        for name in scope.names_exported():
            if (value := scope.get(name)[1]) is not None and value.items:
                word = word_of(value.pieces, value.pieces[0].where)
                place = next((piece.where for piece in value.pieces), word.where)
                yield GivenVariable(name, word.text, self.named_at.get(name, place))

    def _follow_text(
        self, text: Text, before: Sequence[PlacedWord], scope: Scope, *, inherits: bool, anew: bool = True
    ) -> None:
        """Follow a text that another shell gets; ``anew``: its changes of variables end with it."""
        if not may_run(text.text) and (anew or "=" not in text.text):
            return
        inner = scope
        if anew:
            inner = Scope(inherits=False)
            for name in scope.names_exported() if inherits else ():
                inner.values[name], inner.exported[name] = scope.get(name)[1], True
            for word in before if inherits else ():
                name, _, value = word.text.partition("=")
                self.named_at[name] = word.where
                inner.values[name] = value_of([Piece(value, word.where)])
                inner.exported[name] = True
        script = _Script(text, self.budget, self.launches, self.nested + 1)
        script.named_at, script.expander.taken = self.named_at, self.expander.taken
        script.run(inner)

    def _to_shell(self, words: Sequence[PlacedWord], before: Sequence[PlacedWord], text: Text, scope: Scope) -> None:
        """Follow a text on the standard input of a shell."""
        names = [command_word(word.text) for word in words]
        shell = next((name for name in names if name in _SHELLS or name == "ssh"), "")
        if shell and not only_says(words) and not any(_READS_TEXT.fullmatch(word.text) for word in words):
            self._follow_text(text, before, scope, inherits=shell != "ssh")

    def _piped(self, pipeline: Node, scope: Scope) -> None:
        """Follow a text that `echo` or `printf` pipes into a shell."""
        first, last = pipeline.named_children[0], pipeline.named_children[-1]
        if first.type == last.type == "command":
            words = self.expander.words(first, scope)
            if only_says(words):
                pieces = [piece for word in words[1:] for piece in _pieces(word)]
                self._to_shell(self.expander.words(last, scope), [], Text(pieces), scope)

    def _heredoc(self, statement: Node, redirect: Node, scope: Scope) -> None:
        """Follow a here-document that a shell reads. One for a file or another command is no command."""
        command = statement.named_children[0]
        body = next((child for child in redirect.named_children if child.type == "heredoc_body"), None)
        if command.type == "command" and body is not None:
            text = Text(self.text.pieces(body.start_byte, body.end_byte))
            self._to_shell(self.expander.words(command, scope), [], text, scope)

    # variables ---------------------------------------------------------------------------------------------------

    def _declare(self, node: Node, scope: Scope, depth: int) -> None:
        words = [self.expander.raw(child) for child in node.children]
        if node.type == "unset_command":
            scope.exported |= dict.fromkeys(words, False)
            scope.values |= dict.fromkeys(words)
            return
        exports = words[0] == "export" or any(map(_EXPORTS.fullmatch, words[1:]))
        for child in node.named_children:
            if child.type == "variable_assignment":
                self._assign(child, scope, depth)
            name = self.expander.raw(child.named_children[0] if child.type == "variable_assignment" else child)
            if exports and name.isidentifier():
                scope.exported[name] = True

    def _assign(self, node: Node, scope: Scope, depth: int) -> None:
        self._within(node, scope, depth)
        name = self.expander.raw(node.named_children[0]) if node.named_children else ""
        if not name.isidentifier():
            return
        value = self.expander.value(node, scope)
        appends = any(child.type == "+=" for child in node.children)
        given, old = scope.get(name)
        if appends and (old is not None or not given):
            base = old.items if old is not None else ()
            is_array = value.is_array or (old is not None and old.is_array)
            value = ShellValue((*base, *value.items), is_array)
            self.expander.spend(node, len(base) // 4)
        scope.values[name] = None if appends and given and old is None else value
        self.named_at[name] = self.expander.at(node)
        if may_run(self.expander.raw(node)):
            self._holding.add(name)

    def _assigned(self, node: Node, scope: Scope) -> PlacedWord:
        """An assignment before a command, as a word."""
        value = self.expander.value(node, scope)
        name = Piece(f"{self.expander.raw(node.named_children[0])}=", self.expander.at(node))
        return word_of([name, *value.pieces], name.where)

    def _within(self, node: Node, scope: Scope, depth: int) -> None:
        """Follow the commands in the brackets of a command's words."""
        nodes = list(node.named_children)
        while nodes:
            child = nodes.pop()
            self.expander.spend(child)
            if child.type in COMMANDS_WITHIN:
                if self.nested + depth > MOST_NESTED:
                    raise self.budget.refusal(
                        self.expander.at(child), f"commands are nested more than {MOST_NESTED} deep"
                    )
                self._follow(child, scope, depth + 1)
            elif child.named_child_count and not child.type.startswith("heredoc"):
                nodes += child.named_children


def _anew(words: Sequence[PlacedWord]) -> bool:
    return not any(command_word(word.text) == "eval" for word in words)


def _variable(word: PlacedWord) -> GivenVariable:
    name, _, value = word.text.partition("=")
    return GivenVariable(name, value, word.where)


def _pieces(word: PlacedWord) -> list[tuple[str, Location]]:
    """A word for a text of several words: a blank, and the word's pieces."""
    return [(" ", word.where), *word.as_text.pieces(0, len(word.as_text.text))]


def _given_to_shell(words: Sequence[PlacedWord]) -> _Given | None:
    """The text that a command gives to another shell: ``bash -c 'TEXT'``, ``ssh host "TEXT"``; else None."""
    names = [command_word(word.text) for word in words]
    joins, shell = (next((i for i, n in enumerate(names) if n in kind), len(names)) for kind in (_JOINS, _SHELLS))
    if any(len(word.text.split()) > 1 for word in words[joins + 1 :]):
        pieces = [piece for word in words[joins + 1 :] for piece in _pieces(word)]
        return _Given(Text(pieces), _assigned(words[:joins]), names[joins] != "ssh")
    for word, inner in pairwise(words[shell + 1 :]):
        if _READS_TEXT.fullmatch(word.text) and len(inner.text.split()) > 1:
            return _Given(inner.as_text, _assigned(words[:shell]), True)
    return None


def _assigned(words: Sequence[PlacedWord]) -> list[PlacedWord]:
    return [word for word in words if ASSIGNMENT.fullmatch(word.text)]
