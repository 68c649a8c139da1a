"""The generated block of docs/tiles.md with the table of the attention kernel's tiles."""

from __future__ import annotations

from attnreg.kernels.triton.tiles import FACTS, TABLE, Config, Row, UpTo
from attnreg.language.conditions import Clause
from docs.markdown import table

_COLUMNS = (
    ("when", 67),
    ("rows × keys", 13),
    ("warps", 5),
    ("stages", 6),
    ("per SM", 6),
    ("also", 24),
    ("measured", 23),
    ("because", 90),
)


def tiles_block() -> str:
    """The table of tiles, in the order in which rows are tried, and the meaning of each fact in its conditions."""
    words = "\n".join(f"- `{fact}`: {meaning}" for fact, meaning in FACTS.items())
    return f"{table(_COLUMNS, map(_cells, TABLE))}\n\n{words}"


def _cells(row: Row) -> list[str]:
    config = row.config
    when = ", ".join(map(_words, row.when.clauses)) or "else"
    numbers = (config.num_warps, config.num_stages, config.programs_per_sm)
    return [when, _tile(config), *map(str, numbers), _also(config), row.measured or "no", row.because]


def _words(clause: Clause) -> str:
    return {"yes": clause.facet, "no": f"not {clause.facet}"}.get(clause.matcher.text, clause.describe())


def _tile(config: Config) -> str:
    rows = f"up to {config.block_m}" if isinstance(config.block_m, UpTo) else str(config.block_m)
    return f"{rows} × {config.block_n}"


def _also(config: Config) -> str:
    return f"query by {config.block_k} columns" if config.block_k else "whole tiles apart" if config.peel else ""
