"""Code of the guides as HTML: pygments finds its tokens, and a few classes of the style sheet colour them."""

from __future__ import annotations

from markupsafe import Markup, escape
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Keyword, Literal, Name, _TokenType

# kind of a token -> its class; the first that holds it
_CLASSES = {
    Comment: "c",
    Literal.String: "s",
    Literal.Number: "n",
    Keyword: "k",
    Name.Tag: "k",
    Name.Decorator: "k",
}
_LANGUAGES = {"yaml", "python", "pycon", "json", "toml"}


def highlighted(info: str, text: str) -> Markup:
    """A block of code; ``info`` is the first line of its fence, which begins with its language."""
    language = info.partition(" ")[0]
    if language == "console":
        return Markup("\n").join(map(_console_line, text.split("\n")))
    if language not in _LANGUAGES:
        return escape(text)
    tokens = get_lexer_by_name(language, stripnl=False).get_tokens(text)
    return Markup("").join(_token(kind, part) for kind, part in tokens)


def _token(kind: _TokenType, text: str) -> Markup:
    name = next((name for of, name in _CLASSES.items() if kind in of), "")
    return Markup('<span class="{}">{}</span>').format(name, text) if name and text.strip() else escape(text)


def _console_line(line: str) -> Markup:
    """A command with its prompt, or a line of its output."""
    if not line.startswith("$ "):
        return escape(line)
    command, hash_, comment = line[2:].partition("  #")
    shown = Markup('<span class="c">$ </span><b>{}</b>').format(command)
    return shown + Markup('<span class="c">{}</span>').format(hash_ + comment) if hash_ else shown
