"""The generated tables of every measured case: kernels and the host in docs/speed_cases.md, engines on their pages."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnreg.packages.kernel_code import kernel_digest
from docs.markdown import table
from docs.registries import bundled


@dataclass(frozen=True)
class _Engine:
    """How the record of a benchmark of whole engines is shown.

    versions: the packages whose versions are printed. figures: load, name in the record, words, and form of each line.
    backends: name in the record -> head of its column.
    """

    benchmark: str
    versions: tuple[str, ...]
    figures: tuple[tuple[str, str, str, str], ...]
    backends: Mapping[str, str]


_VLLM = _Engine(
    benchmark="vllm_engine",
    versions=("vllm",),
    figures=(
        ("64 of 2k + 256", "tokens/s", "output tokens a second", "{:,.0f}"),
        ("64 of 2k + 256", "decode ms", "ms of a step that only decodes", "{:.2f}"),
        ("64 of 2k + 256", "builder us", "µs for a step's metadata, on the host", "{:.0f}"),
        ("8 of 32k + 128", "tokens/s", "output tokens a second", "{:,.0f}"),
        ("1 of 32k, first token", "first token s", "seconds to the first token", "{:.2f}"),
        ("1 of 128k + 32", "first token s", "seconds to the first token", "{:.2f}"),
        ("1 of 128k + 32", "ms a token", "ms between tokens", "{:.2f}"),
        ("1 of 128k + 32", "decode ms", "ms of a step that only decodes", "{:.2f}"),
    ),
    backends={"TRITON_ATTN": "`TRITON_ATTN`", "attnreg": "`ATTNREG`", "FLASH_ATTN": "`FLASH_ATTN`"},
)
_SGLANG = _Engine(
    benchmark="sglang_engine",
    versions=("sglang", "sglang-kernel"),
    figures=(
        ("64 of 2k + 256", "tokens/s", "output tokens a second", "{:,.0f}"),
        ("64 of 2k + 256", "decode ms", "ms of a step that only decodes", "{:.2f}"),
        ("8 of 32k + 128", "tokens/s", "output tokens a second", "{:,.0f}"),
        ("8 of 32k + 128", "decode ms", "ms of a step that only decodes", "{:.2f}"),
        ("1 of 32k, first token", "seconds", "seconds to the first token", "{:.2f}"),
        ("64 of 8k shared + 128", "tokens/s", "output tokens a second", "{:,.0f}"),
        ("64 of 8k shared + 128", "decode ms", "ms of a step that only decodes", "{:.2f}"),
    ),
    backends={"triton": "`triton`", "attnreg": "attnreg", "fa3": "`fa3`"},
)
# the backends that have a column, in this order
_BESIDE = (
    "HOPPER_ATTN",
    "TRITON_ATTN",
    "FLASH_ATTN/FA3",
    "FA3, fp8 queries",
    "TORCH_SDPA/cuDNN",
    "cuDNN, dense copies",
)
# a ratio of HOPPER_ATTN's time -> the sign behind it; \* marks peers that are less exact
_RATIOS = {"ratio": "", "ratio_rough": "\\*"}
# a backend's name in the record -> its name in vLLM


def _records(root: Path, benchmark: str) -> list[Any]:
    """The records of a benchmark, one for each machine, the latest first."""
    files = (root / "benchmarks/results").glob(f"{benchmark}*.json")
    records = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(files)]
    return sorted(records, key=lambda record: record["machine"]["date"], reverse=True)


def one_record(root: Path, benchmark: str) -> dict[str, Any]:
    """The content of a benchmark's file of figures."""
    file = root / "benchmarks/results" / f"{benchmark}.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def machine_words(record: Mapping[str, Any], kernels: Iterable[str], *also: str) -> str:
    """What the figures of a record hold for: device, versions, date, and whether today's kernels were timed.

    kernels: the rows of attnreg's registry that were timed. also: names of other facts of the machine to print.
    """
    machine = record["machine"]
    versions = [f"{name} {machine[name]}" for name in ("attnreg", "torch", "triton", *also) if name in machine]
    words = f"{', '.join([machine.get('device', 'one processor'), *versions, machine['date']])}."
    timed, registry = record.get("kernels", {}), bundled("default")
    changed = [name for name in sorted(kernels) if timed.get(name) != kernel_digest(registry, name)]
    if not changed:
        return words
    names = ", ".join(f"`{name}`" for name in changed)
    return f"{words} *Earlier code:* {names} {'has' if len(changed) == 1 else 'have'} changed since."


def speed_block(root: Path, benchmark: str, kernels: Iterable[str]) -> str:
    """For each record: the machine, its ceilings, and a table of cases with figure, mark and peers in the same run.

    kernels: the rows of attnreg's registry that the benchmark times.
    """
    return "\n\n".join(_speed(record, kernels) for record in _records(root, benchmark))


def _speed(record: dict[str, Any], kernels: Iterable[str]) -> str:
    rows = []
    for figure in record["figures"]:
        errors = {name: f" ({error:.1e})" for name, error in figure.get("peer_errors", {}).items()}
        peers = ", ".join(
            f"{name} {time_words(t)}{errors.get(name, '')}" for name, t in figure.get("peers", {}).items()
        )
        error = f"{figure['error']:.1e}" if figure.get("error") is not None else ""
        met = "met" if figure["met"] else "missed"
        rows.append([figure["case"], time_words(figure["us"]), f"{figure['mark']:,}, {met}", peers, error])
    head = f"{machine_words(record, kernels)} Times in µs."
    ceilings = ", ".join(f"{name} {value:,}" for name, value in record["ceilings"].items())
    columns = (("case", 34), ("attnreg", 11), ("mark", 12), ("peers (their errors)", 60), ("error", 8))
    return f"{head} Ceilings measured in the same run: {ceilings}.\n\n{table(columns, rows)}"


def side_by_side_block(root: Path) -> str:
    """The machine, and a table of cases: the times of HOPPER_ATTN and its peers, its ratio to the best, the mark."""
    record = one_record(root, "side_by_side")
    figures = record["figures"]
    # a peer without a time in any case has no column
    known = [*dict.fromkeys((*_BESIDE, *figures[0]["us"]))]
    names = [n for n in known if any(not isinstance(f["us"].get(n, ""), str) for f in figures)]
    rows = []
    for figure in figures:
        times = [figure["us"].get(name, "") for name in names]
        ratios = [f"{figure[name]:.2f}{sign}" for name, sign in _RATIOS.items() if figure.get(name)]
        shown = ("–" if isinstance(t, str) else time_words(t) for t in times)
        rows.append([figure["case"], *shown, ", ".join(ratios), _mark_beside(figure)])
    head = f"{machine_words(record, ('HOPPER_ATTN', 'TRITON_ATTN'))} Times in µs. "
    head += f"HOPPER_ATTN takes {_mean(figures, 'ratio', 'of the time of the best peer that is as exact')}. "
    head += "Over fp8 caches FA3 has queries in fp8 too (\\*). "
    head += f"HOPPER_ATTN takes {_mean(figures, 'ratio_rough', 'of its time there')}."
    worst = {n: max((f["errors"][n] for f in figures if n in f["errors"]), default=None) for n in names}
    found = ", ".join(f"{name} {error:.1e}" for name, error in worst.items() if error is not None)
    head += f" The largest relative errors against float64: {found}."
    columns = (("case", 50), *((name, 16) for name in names), ("of the best peer", 16), ("mark", 14))
    return f"{head}\n\n{table(columns, rows)}"


def _mean(figures: list[dict[str, Any]], name: str, of: str) -> str:
    ratios = [figure[name] for figure in figures if figure.get(name)]
    ahead = sum(ratio < 1 for ratio in ratios)
    mean = f"{statistics.geometric_mean(ratios):.2f} {of}, in the geometric mean of {len(ratios)} cases"
    return f"{mean}. It is faster in {ahead} of them"


def _mark_beside(figure: dict[str, Any]) -> str:
    met = "met" if figure.get("met") else "missed"
    if "of_best" in figure:
        return f"{figure['of_best']} of the best peer, {met}"
    return "" if figure["mark"] is None else f"{figure['mark']:,}, {met}"


def host_block(root: Path) -> str:
    """The machine, and a table of the host's costs: figure and mark."""
    record = one_record(root, "host")
    rows = []
    for figure in record["figures"]:
        mark = figure["mark"]
        met = "" if mark is None else f"{mark:,}, {'met' if figure['us'] <= mark else 'missed'}"
        rows.append([figure["case"], time_words(figure["us"]), met])
    head = machine_words(record, ("TRITON_ATTN",), "python")
    return f"{head} Times in µs.\n\n{table((('case', 46), ('time', 11), ('mark', 12)), rows)}"


def graphs_block(root: Path) -> str:
    """The machine, and a table of decodes in graphs: a column for each cache. Brackets: with known lengths."""
    record = one_record(root, "graphs")
    times: dict[str, dict[str, str]] = {}
    for figure in record["figures"]:
        peer = figure["backend"].startswith("FLASH_ATTN")
        name = figure["backend"] if peer else figure["over"]
        shown = time_words(figure["us"]) if peer else f"{time_words(figure['us'])} ({time_words(figure['known'])})"
        times.setdefault(figure["case"], {})[name] = shown
    names = [*dict.fromkeys(name for found in times.values() for name in found)]
    rows = [[case, *(found.get(name, "–") for name in names)] for case, found in times.items()]
    ours = [figure for figure in record["figures"] if not figure["backend"].startswith("FLASH_ATTN")]
    ratios = [figure["us"] / figure["known"] for figure in ours]
    head = f"{machine_words(record, {figure['backend'] for figure in ours})} Times in µs. "
    head += "A number in brackets is the time with known lengths. A graph takes "
    head += f"{statistics.geometric_mean(ratios):.2f} of that in the geometric mean, and {max(ratios):.2f} at worst. "
    head += "The largest relative error against float64: "
    head += f"{max(figure['error'] for figure in record['figures']):.1e}."
    return f"{head}\n\n{table((('requests and keys', 30), *((name, 16) for name in names)), rows)}"


def engine_block(root: Path) -> str:
    """vLLM's engine: for each machine and model a table of the loads, with each backend's figure and the mark."""
    return "\n\n".join(_engines(_VLLM, record) for record in _records(root, _VLLM.benchmark))


def sglang_block(root: Path) -> str:
    """SGLang's engine: for each machine and model a table of the loads, with each backend's figure and the mark."""
    return "\n\n".join(_engines(_SGLANG, record) for record in _records(root, _SGLANG.benchmark))


def _engines(engine: _Engine, record: dict[str, Any]) -> str:
    by = {(row["model"], row["load"], row["backend"]): row for row in record["figures"] if row["load"]}
    marks = {(mark["model"], mark["load"], mark["figure"]): mark for mark in record["marks"]}
    parts = [machine_words(record, engine_rows(record), *engine.versions)]
    for model in dict.fromkeys(row["model"] for row in record["figures"]):
        # the backends that were measured
        names = {name: words for name, words in engine.backends.items() if any(key[::2] == (model, name) for key in by)}
        columns = (("load", 21), ("figure", 37), *((words, 13) for words in names.values()), ("mark", 42))
        rows = []
        for load, figure, words, form in engine.figures:
            found = [by.get((model, load, backend)) for backend in names]
            cells = ["–" if row is None or figure not in row else form.format(row[figure]) for row in found]
            if any(row is not None and figure in row for row in found):
                rows.append([load.partition(",")[0], words, *cells, _mark(marks.get((model, load, figure)))])
        days = [
            f"{words} on {', '.join(sorted({row['date'] for key, row in by.items() if key[::2] == (model, name)}))}"
            for name, words in names.items()
        ]
        parts.append(f"**{model}**, measured with {'; '.join(days)}\n\n{table(columns, rows)}")
    return "\n\n".join(parts)


def engine_rows(record: Mapping[str, Any]) -> tuple[str, ...]:
    """attnreg's rows that ran in a record of whole engines: those of the plug-in, or those that the record names."""
    return tuple(record.get("rows", ("HOPPER_ATTN", "TRITON_ATTN")))


def _mark(mark: dict[str, Any] | None) -> str:
    if mark is None:
        return ""
    bound, met = "at least" if mark["mark"] > 1 else "at most", "met" if mark["met"] else "missed"
    return f"{mark['ratio']:.3f} of `{mark['beside']}`, {bound} {mark['mark']:.3g}: {met}"


def time_words(value: float | str | None) -> str:
    """A time in words. A text instead of a time has a colon; the words before it are the reason."""
    if value is None:
        return "–"
    return value.partition(":")[0] if isinstance(value, str) else f"{value:,.1f}"
