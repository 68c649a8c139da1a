"""Helpers that several test files share.

compilers   what compilers make of the kernels, without a GPU: compiled, recorded, compared
layers      layers and batches that run: small ones, odd ones, and the conditions of an engine
stand_ins   stand-ins for other packages, with the signatures that they have
registries  registries, overlays and requests that are small enough to try all of
rows        selections as rows: a change to one request, the backend expected, the exact reasons
models      configs, small models of transformers, and what was observed of real ones
workers     functions that workers run in processes of their own, and ways to end them
pages       the docs and the site: their Markdown, their pages, and a browser
suite       the suite itself: how much it tries, what it makes once, the sentences that it expects
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
