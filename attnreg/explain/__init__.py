"""Answers for a person or a program: why a request gets the backend that it gets."""

from attnreg.explain.answers import Question, explain, render

__all__ = ["Question", "explain", "render"]
