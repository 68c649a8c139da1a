"""The generated blocks and pictures of docs/speed.md: one table for each question, from benchmarks/results."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from docs import charts
from docs.charts import Dot
from docs.markdown import table
from docs.speed import engine_rows, machine_words, one_record, time_words

# the peers of HOPPER_ATTN in the record that are attnreg's own kernels
_OWN = ("HOPPER_ATTN", "TRITON_ATTN")
# a part of a case's name -> the kind of the case; the first that fits
_KINDS = (
    (" decodes at ", "tokens and prompts in one batch"),
    ("decode", "decode"),
    (" queries on ", "16 to 512 queries on a long context"),
    ("heads of", "prompts, heads other than 128"),
    ("", "prompts, heads of 128"),
)
# the kernel and what it computes -> the beginning of its cases' names, and the backend in a case of several
_BY_RELEASE = (
    ("HOPPER_ATTN, prompts", ("prefill", "gpt-oss"), "HOPPER_ATTN"),
    ("HOPPER_ATTN, decodes and mixed batches", ("decode b", "decode fp8", "60"), "HOPPER_ATTN"),
    ("TRITON_ATTN, prompts", ("prefill", "gpt-oss"), "TRITON_ATTN"),
    ("TRITON_ATTN, decodes and mixed batches", ("decode b", "60"), "TRITON_ATTN"),
    ("TRITON_ATTN, decodes over fp8", ("decode fp8",), "TRITON_ATTN"),
    ("HOPPER_MLA, decodes", ("HOPPER_MLA decode",), ""),
    ("HOPPER_MLA_SPARSE, decodes", ("HOPPER_MLA_SPARSE",), ""),
    ("TRITON_MLA, decodes", ("decode b", "decode fp8"), ""),
    ("TRITON_MLA_SPARSE, decodes", ("sparse decode",), ""),
    ("HOPPER_PREFILL, prompts of MLA", ("HOPPER_PREFILL",), ""),
    ("TRITON_PREFILL, prompts of MLA", ("prefill",), ""),
    ("TURBOQUANT, decodes", ("decode turboquant",), ""),
    ("merge of partial attention", ("merge",), ""),
)
_HOST = (
    "a step's batch and plan, b64", "one launch", "forward with the cache's update, b1",
    "the same through the op for both", "the same through ops.attention",
)  # fmt: skip
_IMAGES = "docs/images"


def report_blocks(root: Path) -> dict[str, str]:
    """Name of each generated block of the page -> its Markdown."""
    return {
        "answer": _answer(root),
        "peers": _peers(root),
        "any-gpu": _any_gpu(root),
        "graphs": _graphs(root),
        "packed": _packed(root),
        "latents": _latents(root),
        "engines": _engines(root),
        "host": _host(root),
        "releases": _releases(root),
    }


def report_pictures(root: Path) -> dict[str, str]:
    """Path of each chart of the page -> its SVG."""
    beside = {f"{kind} ({len(dots)})": dots for kind, dots in _by_kind(root).items()}
    graphs = {over: [Dot(f["case"], f["us"] / f["known"]) for f in some] for over, some in _over(root).items()}
    packed = {
        _format(figure): {"TURBOQUANT": figure["us"], "TRITON_ATTN, bfloat16": figure["peers"]["TRITON_ATTN bf16"]}
        for figure in _whole_batches(root)
    }
    releases = {
        f"{kernel}, {release}": dots for release, found in _by_release(root).items() for kernel, dots in found.items()
        if release == "3.8.0" or not kernel.startswith("merge")
    }  # fmt: skip
    drawn = {
        "speed_peers": charts.ratios(
            "speed-peers", "HOPPER_ATTN beside the best peer on an H200", "time of HOPPER_ATTN / time of the best peer",
            beside,
        ),
        "speed_graphs": charts.ratios(
            "speed-graphs", "Decodes in a CUDA graph for any lengths, on an H200",
            "time in a graph / time with known lengths", graphs,
        ),
        "speed_packed": charts.bars(
            "speed-packed", "64 requests decode over 8k keys each, on an H200; µs", "µs", packed
        ),
        "speed_releases": charts.ratios(
            "speed-releases", "The kernels under Triton 3.8 and 3.9, on an H200", "time / time under Triton 3.6.0",
            releases,
        ),
    }  # fmt: skip
    return {f"{_IMAGES}/{name}.svg": picture for name, picture in drawn.items()}


def _answer(root: Path) -> str:
    """The page in five sentences."""
    exact = [f for f in one_record(root, "side_by_side")["figures"] if f["ratio"]]
    rough = [f for f in one_record(root, "side_by_side")["figures"] if not f["ratio"] and f.get("ratio_rough")]
    dots = [Dot(figure["case"], figure["ratio"]) for figure in exact]
    slower = [f"{dot.name} ({dot.ratio:.2f})" for dot in dots if dot.ratio >= 1]
    graphs = [Dot(f["case"], f["us"] / f["known"]) for some in _over(root).values() for f in some]
    packed = sorted(f["us"] / f["peers"]["TRITON_ATTN bf16"] for f in _whole_batches(root))
    ahead = f"{sum(figure['ratio_rough'] < 1 for figure in rough)} of {len(rough)}"
    faster = f"{len(dots) - len(slower)} of {len(dots)}"
    share = f"{packed[0]:.2f} to {packed[-1]:.2f}"
    worst = f"{max(dot.ratio for dot in graphs):.2f}"
    lines = (
        f"Over 16-bit caches HOPPER_ATTN is faster than the best peer in {faster} batches. Its mean is {_mean(dots)}.",
        f"Peers are faster in {'; '.join(slower)}.",
        f"Over fp8 caches it is faster in {ahead}. The peer, FlashAttention 3, rounds the queries to fp8 there.",
        f"A CUDA graph takes {_mean(graphs)} of the time of a planned launch in the mean, and {worst} at worst.",
        f"Decodes over packed caches take {share} of TRITON_ATTN's time over bfloat16.",
    )
    return "\n".join(f"- {line}" for line in lines)


def _peers(root: Path) -> str:
    record = one_record(root, "side_by_side")
    rows = []
    for kind, dots in _by_kind(root).items():
        found = sorted(dots, key=lambda dot: dot.ratio)
        ahead = sum(dot.ratio < 1 for dot in dots)
        rows.append([kind, f"{ahead} of {len(dots)}", _mean(dots), _named(found[0]), _named(found[-1])])
    every = [dot for dots in _by_kind(root).values() for dot in dots]
    rows.append(
        ["**all**", f"**{sum(dot.ratio < 1 for dot in every)} of {len(every)}**", f"**{_mean(every)}**", "", ""]
    )
    refused = _refused(record["figures"])
    left_out = f"\n\nNot in this run: {'; '.join(refused)}." if refused else ""
    columns = (("kind of batch", 36), ("faster in", 10), ("mean", 6), ("best", 44), ("worst", 44))
    return f"{machine_words(record, _OWN)}\n\n{table(columns, rows)}{left_out}"


def _by_kind(root: Path) -> dict[str, list[Dot]]:
    """Kind of batch -> the ratio to the best peer of each of its cases. Over fp8 the peer is FA3 with fp8 queries."""
    kinds: dict[str, list[Dot]] = {}
    for figure in one_record(root, "side_by_side")["figures"]:
        ratio = figure["ratio"] or figure.get("ratio_rough")
        if ratio:
            kind = next(kind for part, kind in _KINDS if part in figure["case"])
            kind += "" if figure["ratio"] else ", fp8 cache"
            kinds.setdefault(kind.replace("heads of 128, fp8 cache", "fp8 cache"), []).append(
                Dot(figure["case"], ratio)
            )
    return kinds


def _refused(figures: Sequence[Mapping[str, Any]]) -> list[str]:
    """The peers without a time in any case, each with the reason that the record holds."""
    names = dict.fromkeys(name for figure in figures for name in figure["us"])
    out = []
    for name in names:
        times = [figure["us"][name] for figure in figures if name in figure["us"]]
        if all(isinstance(time, str) for time in times):
            reason = times[0].partition("refused: ")[2].partition(";")[0]
            out.append(f"{name} ({reason})")
    return out


def _any_gpu(root: Path) -> str:
    record = one_record(root, "attention")
    figures = [f for f in record["figures"] if f["peers"] and not f["case"].startswith("ROCM")]
    peers = [*dict.fromkeys(name for figure in figures for name in figure["peers"])]
    rows = [
        [figure["case"], time_words(figure["us"]), *(time_words(figure["peers"].get(name)) for name in peers)]
        for figure in figures
    ]
    columns = (("case", 34), ("TRITON_ATTN", 12), *((name, 12) for name in peers))
    return f"{machine_words(record, ('TRITON_ATTN',))}\n\n{table(columns, rows)}"


def _graphs(root: Path) -> str:
    record = one_record(root, "graphs")
    rows = []
    for over, some in _over(root).items():
        dots = [Dot(figure["case"], figure["us"] / figure["known"]) for figure in some]
        worst = max(dots, key=lambda dot: dot.ratio)
        most = max(some, key=lambda figure: figure["us"] - figure["known"])
        rows.append(
            [over, str(len(dots)), _mean(dots), _named(worst), f"{most['us'] - most['known']:.0f} ({most['case']})"]
        )
    kernels = tuple({figure["backend"] for some in _over(root).values() for figure in some})
    columns = (("KV cache", 28), ("batches", 8), ("mean", 6), ("worst", 40), ("most µs", 34))
    return f"{machine_words(record, kernels)}\n\n{table(columns, rows)}"


def _over(root: Path) -> dict[str, list[Mapping[str, Any]]]:
    """Kind of cache -> attnreg's decodes over it in graphs."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for figure in one_record(root, "graphs")["figures"]:
        if not figure["backend"].startswith("FLASH_ATTN"):
            found.setdefault(figure["over"], []).append(figure)
    return found


def _whole_batches(root: Path) -> list[Mapping[str, Any]]:
    return [
        f for f in one_record(root, "turboquant")["figures"] if f["case"].startswith("decode") and "b64 8k" in f["case"]
    ]


def _format(figure: Mapping[str, Any]) -> str:
    return str(figure["case"].split()[1]).removeprefix("turboquant_")


def _packed(root: Path) -> str:
    rows = []
    for figure in _whole_batches(root):
        dense = figure["peers"]["TRITON_ATTN bf16"]
        rows.append([f"`turboquant_{_format(figure)}`", time_words(figure["us"]), time_words(dense),
                     f"{figure['us'] / dense:.2f}", f"{figure['floor'] / figure['us']:.0%}"])  # fmt: skip
    columns = (
        ("format", 24),
        ("TURBOQUANT", 11),
        ("TRITON_ATTN, bfloat16", 22),
        ("ratio", 6),
        ("of the memory's speed", 22),
    )
    return f"{machine_words(one_record(root, 'turboquant'), ('TURBOQUANT',))}\n\n{table(columns, rows)}"


def _latents(root: Path) -> str:
    record = one_record(root, "mla")
    rows, kernels = [], set()
    for figure in record["figures"]:
        kernel, _, case = figure["case"].partition(" ")
        if kernel.startswith("HOPPER"):
            kernels.add(kernel)
            peers = {name: time for name, time in figure["peers"].items() if not isinstance(time, str)}
            shown = ", ".join(f"{name} {time_words(time)}" for name, time in peers.items())
            ratio = f"{figure['us'] / min(peers.values()):.2f}" if peers else "–"
            rows.append([f"`{kernel}`", case, time_words(figure["us"]), shown or "none", ratio])
    columns = (("kernel", 20), ("case", 44), ("time", 9), ("peers", 40), ("of the best", 11))
    return f"{machine_words(record, sorted(kernels))}\n\n{table(columns, rows)}"


def _engines(root: Path) -> str:
    record = one_record(root, "vllm_engine")
    by = {(f["model"], f["load"], f["backend"]): f for f in record["figures"]}
    rows = []
    for model, load in dict.fromkeys((f["model"], f["load"]) for f in record["figures"] if f["load"]):
        name, words = (
            ("first token s", "time to the first token") if "first" in load else ("tokens/s", "tokens a second")
        )
        own, *others = (by.get((model, load, backend)) for backend in ("attnreg", "TRITON_ATTN", "FLASH_ATTN"))
        # a step that only decodes says most about a kernel, and its time is no part of the first figure
        for figure, text in ((name, words), ("decode ms", "time of a step that only decodes")):
            if own is not None and figure in own:
                cells = [
                    f"{own[figure] / other[figure]:.2f}" if other and other.get(figure) else "–" for other in others
                ]
                rows.append([model, load.partition(",")[0], text, *cells])
    columns = (("model", 10), ("load", 18), ("figure", 32), ("of `TRITON_ATTN`'s", 18), ("of `FLASH_ATTN`'s", 17))
    head = machine_words(record, engine_rows(record), "vllm")
    return f"{head}\n\n{table(columns, rows)}"


def _host(root: Path) -> str:
    record = one_record(root, "host")
    times = {figure["case"]: figure["us"] for figure in record["figures"]}
    first = "forward with the cache's update, b1"
    rows = [[case.replace("the same", first.partition(",")[0]), time_words(times[case])] for case in _HOST]
    return f"{machine_words(record, ('TRITON_ATTN',), 'python')}\n\n{table((('what', 62), ('µs', 8)), rows)}"


def _releases(root: Path) -> str:
    found = _by_release(root)
    rows = []
    for kernel, *_ in _BY_RELEASE:
        cells = []
        for release in found:
            values = sorted(dot.ratio for dot in found[release].get(kernel, []))
            cells.append(f"{values[0]:.2f} to {values[-1]:.2f}" if values else "not timed")
        rows.append([kernel, *cells])
    runs = one_record(root, "triton_releases")["runs"]
    days = sorted({run["machine"]["date"] for run in runs})
    machine = runs[0]["machine"]
    head = f"{machine['device']}, torch {machine['torch']}, {' and '.join(days)}."
    head += " Each release ran on the machine on which Triton 3.6.0 ran before or after it."
    return f"{head}\n\n{table((('kernel', 40), *((f'Triton {release}', 14) for release in found)), rows)}"


def _by_release(root: Path) -> dict[str, dict[str, list[Dot]]]:
    """Release of Triton -> kernel -> the ratio of each case's time to that under 3.6.0; of a case the latest run."""
    runs = one_record(root, "triton_releases")["runs"]
    latest: dict[str, dict[tuple[str, str], float]] = {}
    base: dict[str, dict[str, float]] = {}
    for run in runs:
        # a run under the first release stands before those that are compared with it
        if run["machine"]["triton"] == runs[0]["machine"]["triton"]:
            base = {figure["case"]: figure["us"] for figure in run["figures"]}
            continue
        for figure in run["figures"]:
            for backend, us in figure["us"].items():
                ratio = us / base[figure["case"]][backend]
                latest.setdefault(run["machine"]["triton"], {})[figure["case"], backend] = ratio
    out: dict[str, dict[str, list[Dot]]] = {}
    for release, ratios in latest.items():
        for (case, backend), ratio in ratios.items():
            # of the kernels whose cases begin alike, the one with the longest beginning
            fits = [(len(start), kernel) for kernel, starts, own in _BY_RELEASE if own == backend
                    for start in starts if case.startswith(start)]  # fmt: skip
            if fits:
                out.setdefault(release, {}).setdefault(max(fits)[1], []).append(Dot(case, ratio))
    return out


def _mean(dots: Iterable[Dot]) -> str:
    return f"{statistics.geometric_mean(dot.ratio for dot in dots):.2f}"


def _named(dot: Dot) -> str:
    return f"{dot.ratio:.2f} ({dot.name})"
