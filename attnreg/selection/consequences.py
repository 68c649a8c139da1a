"""The consequences of a choice: a failure, a dropped part, the kernel that runs, its memory and the stored KV dtype.

Two more are about the whole run: the layouts of the cache, and the level of CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from attnreg.errors import Location
from attnreg.selection.wording import readable

if TYPE_CHECKING:
    from attnreg.language.consequence import Consequence
    from attnreg.language.engine.runs import GraphLevel
    from attnreg.registry import Variant

GRAPH_WORDS: Mapping[GraphLevel, str] = {
    "never": "of no batch",
    "one_token": "of batches with one query token per request",
    "uniform": "of batches with as many query tokens for each request",
    "always": "of every batch",
}
_WITHOUT_CACHE = ("encoder", "encoder_only")


class Following(NamedTuple):
    """One consequence of a choice: a sentence, its line of data, and the value that the sentence states.

    ``value`` is the bytes of a workspace, the kernel's block in tokens, the KV dtype of the stored cache, the layouts
    between commas, or the graph level. It is None for all others. ``fact`` is
    the sentence in short, without remarks; a comparison of two tables compares it. ``facets`` are the facets that
    decide whether the engine fails.
    """

    kind: Literal["fails", "drops", "runs", "unknown", "workspace", "kernel_block", "stores", "layouts", "graphs"]
    text: str
    where: Location
    value: int | str | None = None
    source: str | None = None
    fact: str = ""
    facets: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        values = self._asdict()
        del values["fact"], values["facets"]
        return {**values, "where": str(self.where)}


def following(variant: Variant, point: Mapping[str, Any]) -> Iterator[Following]:
    """The consequences of choosing a variant at a point, without those that are about the whole run.

    Of several entries on blocks the first that holds counts.
    """
    blocks_known = False
    for consequence in variant.consequences:
        if _of_run(consequence) or not consequence.when.holds(point):
            continue
        if consequence.fails:
            text, facets = consequence.fails, consequence.when.facets
            yield Following("fails", text, consequence.where, None, consequence.source, facets=facets)
        elif consequence.drops:
            yield Following("drops", consequence.drops, consequence.where, None, consequence.source, consequence.drops)
        elif text := consequence.runs or consequence.unknown:
            kind: Literal["runs", "unknown"] = "runs" if consequence.runs else "unknown"
            yield Following(kind, text, consequence.where, None, consequence.source, text)
        elif consequence.workspace is not None:
            yield _workspace(consequence, consequence.workspace, point)
        elif known := consequence.stores:
            if point["attn_type"] not in _WITHOUT_CACHE and point["kv_dtype"] != known:
                text = _with(f"the KV cache is stored as {known}", consequence)
                yield Following("stores", text, consequence.where, known, consequence.source, known)
        elif not blocks_known:
            blocks_known = True
            if point["block_size"] is not None and point["attn_type"] not in _WITHOUT_CACHE:
                yield _block(consequence, point["block_size"])


def run_facts(variant: Variant, point: Mapping[str, Any]) -> Iterator[Following]:
    """What choosing a variant at a point means for the whole run: the layouts and the graph level, if known."""
    for known in (layouts_of(variant, point), graphs_of(variant, point)):
        if known is not None and known.layouts is not None:
            names = ", ".join(known.layouts) or "any"
            yield Following("layouts", consequence_words(known), known.where, names, known.source, names)
        elif known is not None and known.graphs is not None:
            yield Following("graphs", consequence_words(known), known.where, known.graphs, known.source, known.graphs)


def layouts_of(variant: Variant, point: Mapping[str, Any]) -> Consequence | None:
    """The entry on the layouts of the KV cache that counts at a point; None if the data does not know them."""
    return next((c for c in variant.consequences if c.layouts is not None and c.when.holds(point)), None)


def graphs_of(variant: Variant, point: Mapping[str, Any]) -> Consequence | None:
    """The entry on the level of CUDA graphs that counts at a point; None if the data does not know it.

    What must hold of some layer of the run is asked of this one.
    """
    entries = (c for c in variant.consequences if c.graphs is not None and c.when.holds(point))
    return next((c for c in entries if c.some is None or c.some.holds(point)), None)


def _of_run(consequence: Consequence) -> bool:
    return consequence.layouts is not None or consequence.graphs is not None


def failure_words(title: str, follows: Following) -> str:
    """The warning about a chosen backend that fails, or leaves out a part of the layer, with its line of data."""
    how = "then fails" if follows.kind == "fails" else "results are wrong"
    return f"{title} is chosen, and {how}: {follows.text} ({follows.where.short})"


def consequence_words(consequence: Consequence) -> str:
    """A consequence in words, for any request: ``takes a workspace of 394 MiB on each GPU``."""
    if consequence.fails:
        return f"fails: {consequence.fails}"
    if consequence.drops:
        return f"drops a part of the layer: {consequence.drops}"
    if consequence.runs:
        return f"runs {consequence.runs}"
    if consequence.unknown:
        return f"not known: {consequence.unknown}"
    if consequence.workspace is not None:
        each = consequence.per_query_element
        more = f", or of {each} B for each element of a step's queries, if that is more" if each is not None else ""
        return _with(f"takes a workspace of {readable(consequence.workspace)} on each GPU{more}", consequence)
    if consequence.stores:
        return _with(f"stores the KV cache as {consequence.stores}", consequence)
    if consequence.layouts is not None:
        slots = f", of {consequence.slots} slots for heads" if consequence.slots is not None else ""
        known = f"the layout {' or '.join(consequence.layouts)}" if consequence.layouts else "every layout"
        return f"reads a KV cache of {known}{slots}"
    if consequence.graphs is not None:
        return f"has CUDA graphs {GRAPH_WORDS[consequence.graphs]}"
    assert consequence.kernel_blocks is not None
    return _with(f"reads blocks of {consequence.kernel_blocks.text} tokens", consequence)


def _workspace(known: Consequence, size: int, point: Mapping[str, Any]) -> Following:
    text = f"a workspace of {readable(size)} on each GPU, beside the KV cache"
    fact = readable(size)
    if known.per_query_element is not None:
        heads = point["num_heads"]
        each = known.per_query_element * point["head_size"] * (heads or 1)
        of = "token" if heads else "token and query head"
        text += f"; {readable(each)} for each {of} of the longest step, if that is more"
        fact += f", or {readable(each)} a {of}"
    return Following("workspace", _with(text, known), known.where, size, known.source, fact)


def _block(known: Consequence, page: int) -> Following:
    assert known.kernel_blocks is not None
    block = known.kernel_blocks.of(page)
    if block is None:
        text = f"the kernel reads blocks of {known.kernel_blocks.text} tokens, and none divides a page of {page}"
        return Following("fails", _with(text, known), known.where, None, known.source, facets=("block_size",))
    how = "each as one block" if block == page else f"in blocks of {block}"
    text = _with(f"pages of {page} tokens, which the kernel reads {how}", known)
    return Following("kernel_block", text, known.where, block, known.source, f"{block} tokens")


def _with(text: str, known: Consequence) -> str:
    return f"{text}; {known.says}" if known.says else text
