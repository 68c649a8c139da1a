"""Records: proofs of claims, and speeds beside peers; and the page with the pictures of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from docs.registries import bundled
from docs.speed import machine_words, one_record

from attnreg.compile.inputs.bundled import registry_root
from attnreg.language.facets import PROVEN
from attnreg.packages.records import Record, whole_records
from attnreg.registry import Registry
from docs_site.charts import Chart, Row, dots
from docs_site.frame import Asset, Page, Site
from docs_site.serving import Serving


@dataclass(frozen=True)
class Proof:
    """One run of `attnreg verify` for a backend. ``earlier``: it ran an earlier kernel, and does not prove today's."""

    record: Record
    earlier: bool

    @property
    def result(self) -> Mapping[str, Any]:
        return self.record.result

    @property
    def worst(self) -> float:
        """The largest ratio of an error to its bound."""
        return max((t["share"] for facet in self.result["claims"].values() for t in facet.values()), default=0.0)

    @property
    def claims(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Each facet with the tallies of its values, in the order of the proofs; empty for an earlier kernel."""
        claims = {} if self.earlier else self.result["claims"]
        return [(name, claims[name]) for name in (*PROVEN, "features") if name in claims]

    @property
    def versions(self) -> str:
        return ", ".join(f"{name} {version}" for name, version in self.result["versions"].items())


@cache
def proofs() -> Mapping[str, list[Proof]]:
    """Backend of the default registry -> its runs. Raises `RecordsError` if a record has a problem."""
    out: dict[str, list[Proof]] = {}
    registry = bundled("default")
    for record in (record for file in whole_records(registry_root()) for record in file.rows):
        proof = Proof(record, earlier=not record.is_current(registry))
        out.setdefault(record.title.partition("/")[0], []).append(proof)
    return out


# benchmark -> the beginning of a case's name, and the backend whose kernel the case times; the first that fits
_TIMED = {
    "attention": {"": "TRITON_ATTN"},
    "mla": {"sparse decode": "TRITON_MLA_SPARSE", "decode": "TRITON_MLA", "prefill": "TRITON_PREFILL"},
    "turboquant": {"": "TURBOQUANT"},
}


def figures(root: Path, benchmark: str = "attention") -> tuple[str, list[dict[str, Any]]]:
    """The machine of a recorded benchmark in words; and the figures of backends, each with its backend's name."""
    record = one_record(root, benchmark)
    out = []
    for figure in record["figures"]:
        # a case of another backend begins with its name
        first, _, rest = figure["case"].partition(" ")
        case = rest if first.isupper() else figure["case"]
        others = (name for start, name in _TIMED[benchmark].items() if case.startswith(start))
        if backend := first if first.isupper() else next(others, ""):
            out.append({**figure, "backend": backend, "case": case})
    return _about(record, *dict.fromkeys(figure["backend"] for figure in out)), out


def speed_chart(root: Path, backend: str) -> Chart | None:
    """The times of a backend beside its peers in the same run; None if no record has any."""
    for benchmark in _TIMED:
        own = [figure for figure in figures(root, benchmark)[1] if figure["backend"] == backend]
        if own:
            rows = [Row(f["case"], _times(backend, f), f.get("floor"), "", _spreads(backend, f)) for f in own]
            return _beside(one_record(root, benchmark), backend, backend, rows)
    record = one_record(root, "side_by_side")
    # a variant of a row is timed under its own name: FLASH_ATTN/FA3
    names = dict.fromkeys(name for f in record["figures"] for name in _known(f["us"]))
    series = next((name for name in names if name.partition("/")[0] == backend), "")
    rows = [row for row in _side_by_side(record) if series in row.values]
    return _beside(record, backend, series, rows[:10]) if rows else None


def _beside(record: Mapping[str, Any], backend: str, series: str, rows: Sequence[Row]) -> Chart:
    note = f"{_about(record, backend)} {medians(rows)}"
    return dots(f"speed-{backend}", f"{backend} beside other kernels", note, "µs", rows, series)


def medians(rows: Sequence[Row]) -> str:
    """What the marks of times are, and whether they have error bars: older records have one figure of each case."""
    with_bar = [row for row in rows if row.spreads]
    if not with_bar:
        return "Medians in µs; the record has no spread, so no error bars. Less is faster."
    some = "" if len(with_bar) == len(rows) else " A case without a bar is from a run that recorded no spread."
    return f"Medians in µs; a bar goes from the 10th to the 90th percentile of the samples.{some} Less is faster."


def _about(record: Mapping[str, Any], *kernels: str) -> str:
    """What the figures of a record hold for, without Markdown. kernels: the rows that were timed."""
    return machine_words(record, kernels).replace("*", "").replace("`", "")


def _known(times: Mapping[str, Any]) -> dict[str, float]:
    """The times of those that ran: of the others a record has the reason."""
    return {who: us for who, us in times.items() if isinstance(us, (int, float))}


def _times(backend: str, figure: Mapping[str, Any]) -> dict[str, float]:
    return _known({backend: figure["us"], **figure.get("peers", {})})


def _spreads(backend: str, figure: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    return _ends({backend: figure.get("spread"), **figure.get("peer_spreads", {})})


def _ends(spreads: Mapping[str, Sequence[float] | None]) -> dict[str, tuple[float, float]]:
    return {who: (ends[0], ends[1]) for who, ends in spreads.items() if ends}


def _side_by_side(record: Mapping[str, Any]) -> list[Row]:
    """The cases of a run of side_by_side.py."""
    return [Row(f["case"], _known(f["us"]), spreads=_ends(f.get("spread", {}))) for f in record["figures"]]


def peers_chart(root: Path) -> Chart:
    """Every case of the attention benchmark's widest run: HOPPER_ATTN beside all others."""
    record = one_record(root, "side_by_side")
    rows = _side_by_side(record)
    note = f"{_about(record, 'HOPPER_ATTN', 'TRITON_ATTN')} {medians(rows)}"
    return dots("speed-peers", "Attention beside every peer", note, "µs", rows, "HOPPER_ATTN")


# a figure of graphs.py -> its name in a chart
_GRAPH = {"us": "in a graph", "known": "batch known before"}


def graphs_charts(root: Path) -> list[Chart]:
    """The cost of a CUDA graph, whose batch may change, beside a launch for one known batch: a chart for each cache."""
    record = one_record(root, "graphs")
    kinds = dict.fromkeys((f["backend"], f["over"]) for f in record["figures"])
    out = []
    for backend, over in kinds:
        some = [f for f in record["figures"] if (f["backend"], f["over"]) == (backend, over)]
        rows = [
            Row(f["case"], _in_words(f), spreads=_ends(_in_words(f["spread"]) if "spread" in f else {})) for f in some
        ]
        name = f"graphs-{backend}-{over}".replace("/", "-").replace(", ", "-").replace(" ", "-")
        kernels = () if backend.startswith("FLASH_ATTN") else (backend,)
        note = f"{_about(record, *kernels)} A case names its requests and their keys. {medians(rows)}"
        out.append(dots(name, f"{backend} over {over}", note, "µs", rows, "in a graph"))
    return out


def _in_words(by_figure: Mapping[str, Any]) -> dict[str, Any]:
    return {words: by_figure[figure] for figure, words in _GRAPH.items()}


def quality_charts(root: Path) -> list[Chart]:
    """What a smaller KV cache costs: the divergence of attention for each format, and of a whole model's next token."""
    record = one_record(root, "kv_quality")
    versions = f"torch {record['machine']['torch']}, {record['machine']['date']}"
    out = []
    for source in dict.fromkeys(f["source"] for f in record["figures"]):
        some = sorted((f for f in record["figures"] if f["source"] == source), key=lambda f: -f["bytes"])
        rows = [Row(f["format"], {"KL": f["kl"]}, None, f"{f['bytes']} bytes") for f in some if f["kl"] > 0]
        title = f"Keys and values of {source}, heads of {some[0]['head_size']}"
        note = f"Divergence of the attention distribution from float32; less is better. {versions}. "
        note += "The bytes are of a token and KV head."
        out.append(dots(f"kv-quality-{source}", title, note, "KL", rows, "KL"))
    rows = [
        Row(f["format"], {"KL": f["kl"]}, None, f"perplexity {f['perplexity']:.2f}, same token {f['same_token']:.0%}")
        for f in record["models"]
        if f["kl"] > 0
    ]
    title = f"Next tokens of {record['models'][0]['source']}"
    note = f"Divergence of the whole model's next token from float32; less is better. {versions}."
    return [*out, dots("kv-quality-model", title, note, "KL", rows, "KL")]


def pages(site: Site) -> Iterator[Page | Asset]:
    """The page of everything that was measured, and the data of its charts."""
    registry = site.registries["default"]
    timed = dict.fromkeys(f["backend"] for benchmark in _TIMED for f in figures(site.root, benchmark)[1])
    speed = [chart for name in timed if (chart := speed_chart(site.root, name))]
    charts = {
        "peers": [peers_chart(site.root)],
        "graphs": graphs_charts(site.root),
        "quality": quality_charts(site.root),
    }
    # the architectures with a run first: a telephone shows their columns without scrolling
    ran = {proof.record.arch for some in proofs().values() for proof in some if not proof.earlier}
    archs = sorted(registry.vocabulary.architectures.values(), key=lambda arch: arch.name not in ran)
    values = {
        "map": proof_map(registry, site.serving("default"), [arch.name for arch in archs]),
        "archs": archs,
        "speed": speed,
        **charts,
        "runs": [(name, proof) for name, some in proofs().items() for proof in some],
    }
    yield Page("measured.html", "measured.html.j2", "What was measured", values, "measured", "default")
    for some in charts.values():
        yield from (chart.file() for chart in some)


def proof_map(registry: Registry, serving: Serving, archs: Sequence[str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """For each backend with a kernel its state on some architectures: its class, and the number of cases.

    The classes are ``ran``, ``stood`` where another device stood in, ``claimed``, and "" for no claim.
    """
    out = []
    for row in registry.backends.values():
        if not row.modules:
            continue
        cells = []
        for arch in archs:
            some = [p for p in proofs().get(row.name, ()) if p.record.arch == arch and not p.earlier]
            cases = sum(p.result["cases"] for p in some)
            claimed = any(place.row is row for place in serving.on[arch])
            kind = (
                "stood" if cases and all(p.record.stands_in for p in some) else "ran" if cases else "claimed" * claimed
            )
            cells.append((kind, f"{cases}" if cases else ""))
        out.append((row.name, cells))
    return out
