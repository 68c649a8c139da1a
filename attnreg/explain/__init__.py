"""Explanations: why a request gets its backend, as text for a terminal and as JSON-ready values."""

from attnreg.explain.answers import explain
from attnreg.explain.render import render
from attnreg.selection.question import Question

__all__ = ["Question", "explain", "render"]
