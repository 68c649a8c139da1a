"""Answers for a person or a program: why a request gets the backend that it gets."""

from attnreg.explain.answers import explain
from attnreg.explain.render import render
from attnreg.selection.question import Question

__all__ = ["Question", "explain", "render"]
