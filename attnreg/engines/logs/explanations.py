"""The sentences that explain one line of a log: what it says by itself, and what a registry says of it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from attnreg.engines.logs import sglang_lines, vllm_lines
from attnreg.engines.logs.known import KnownEngine, KnownLine
from attnreg.engines.logs.layers import Expected
from attnreg.engines.logs.refusals import held
from attnreg.engines.logs.runs import Run
from attnreg.engines.logs.tables import TableView, where
from attnreg.engines.logs.templates import Match
from attnreg.errors import did_you_mean
from attnreg.selection.consequences import consequence_words

# the kinds of fields whose text is not printed: an engine may have put anything into them
_HIDDEN = ("text",)


def shown_line(known: KnownLine, match: Match) -> str:
    """A line as it is printed: the engine's words and the values, with `…` in place of any other text."""
    template = known.template
    parts = [template.literals[0]]
    for name, kind, literal in zip(template.names, template.kinds, template.literals[1:], strict=True):
        value = "…" if kind in _HIDDEN else match.fields[name]
        parts += [value, literal]
    # the words of a refusal are a part of its line
    return "".join(parts) + (" …" if known.says == "refusal" else "")


def backend_of(known: KnownLine, match: Match) -> str | None:
    """The backend that a line is about; None if it names none."""
    named = match.fields.get("BACKEND") or match.fields.get("backend")
    return named or known.named or known.row


def row_of(known: KnownLine, match: Match, table: TableView) -> str | None:
    """The name of a line's backend in a registry. Raises `RequestError` for a backend that the registry does not have."""
    named = backend_of(known, match)
    if named is None:
        return None
    names = [known.like.get(named, ""), *(pattern.replace("{}", named) for pattern in known.rows), named]
    found = next((name for name in names if name in table.registry.backends), None)
    if found is None:
        raise table.absent(named)
    return found


def stated(known: KnownLine, match: Match, run: Run) -> Iterator[str]:
    """What a line says by itself, whatever the release."""
    backend, fields = backend_of(known, match), match.fields
    if known.says == "order":
        accepted = fields["backends"].split(", ")
        yield f"{backend} is the first of {len(accepted)} backends that accept the layer: {', '.join(accepted)}"
    elif known.says in ("named", "old") and known.platform is None and "backend" in run.facts:
        fact = run.facts["backend"]
        same = fact.value.casefold() == (backend or "").casefold()
        yield f"line {fact.line:,} has attention_backend {fact.value}" if same else f"{backend} was taken"
    elif known.says == "precluded":
        yield f"{backend} was chosen because a block of {fields['number']} tokens rules out {fields['backends']}"
    elif known.says == "refused":
        reasons = [text for text in run.engine.reasons if text in fields["text"]]
        yield f"{backend} was named, and its class refuses the layer{': ' + ', '.join(reasons) if reasons else ''}"
    elif known.says == "default":
        yield f"{backend} is the default where neither the user nor the model names a backend"
    elif known.says == "written":
        about = known.words or fields.get("word_2") or known.about
        yield f"{backend} was written for {about} by one step of the resolution; a later step may write another"
    elif known.says == "pages":
        yield f"{backend} does not read the pages that were asked for, and a step writes {fields['number_2']} tokens a page"
    elif known.says == "tower":
        yield f"the vision tower runs {backend}; --attention-backend does not reach it, --mm-encoder-attn-backend does"
    elif known.says == "prompts":
        took = "was named for the prompts of MLA, and refuses them" if known.refused else "attends to the prompts of MLA"
        yield f"{backend} {took}; --attention-backend is about decoding, --attention-config.mla_prefill_backend about prompts"
    elif known.says == "phases":
        yield f"prompts run {fields['backend_2']}, and decoding runs {fields['backend']}"
    if known.means:
        sentence = known.means
        for name, value in fields.items():
            sentence = sentence.replace("{" + name + "}", value)
        yield sentence.rstrip(".")
    layouts = re.findall(r"'([A-Z]{3,6})'", fields.get("text", "")) if "layout" in known.template.text else []
    if layouts:
        yield f"the layouts that are named: {', '.join(dict.fromkeys(layouts))}"
    if known.options:
        yield f"options about it: {', '.join(known.options)}"


def by_table(known: KnownLine, match: Match, run: Run, table: TableView) -> Iterator[str]:
    """What a registry says of a line. Raises `RequestError` for a backend that it does not have."""
    fields, says = match.fields, known.says
    if known.engine == "sglang" and says not in ("note", "step", "graphs", "memory", "refusal", "unknown-name"):
        yield from _of_sglang(known, match, table)
    elif says == "order":
        yield from vllm_lines.of_order(_row(known, match, table), fields["backends"].split(", "), table)
    elif says in ("named", "old"):
        yield from vllm_lines.of_named(_row(known, match, table), table)
    elif says == "stored":
        yield from vllm_lines.of_stored(_row(known, match, table), fields["word"], table)
    elif says == "precluded":
        _row(known, match, table)
        for lost in fields["backends"].split(", "):
            yield from vllm_lines.of_claim(lost, "block_size", table)
    elif says == "refused":
        row = _row(known, match, table)
        yield from vllm_lines.of_refused(row, fields["text"], run.engine.reasons, table)
        yield from _held_in(fields["text"], run.engine, row, table)
    elif says == "none":
        yield from vllm_lines.of_config(fields["text"], fields["word"], table)
    elif says == "version":
        yield from vllm_lines.of_version(fields["number"], _row(known, match, table), table)
    elif says == "tower":
        found = list(vllm_lines.of_tower(_row(known, match, table), table))
        yield from found or [f"no order of {table.registry.title} for vision towers has it{table.elsewhere}"]
    elif says == "prompts":
        row = _row(known, match, table)
        orders = [o for orders in table.registry.orders.values() for o in orders if table.possible(o.when)]
        for order in orders:
            names = list(dict.fromkeys(entry.backend for entry in order.entries))
            if row in names:
                yield f"{row} is entry {names.index(row) + 1} of the order {order.title} ({order.where.short})"
    elif says == "step":
        for step in table.registry.steps:
            for effect in table.effects(step) if step.name in known.steps else ():
                because = f": {effect.because}" if effect.because else ""
                yield f"{step.title or step.name} ({effect.where.short}){because}"
    elif says in ("memory", "blocks"):
        yield from _following(run, "workspace" if says == "memory" else "kernel_blocks", table)
    elif says == "unknown-name":
        yield did_you_mean(fields.get("word") or fields["backend"], table.registry.backends)
    elif says == "refusal":
        yield from _refusals(known, table)


def expected(known: KnownLine, match: Match, table: TableView) -> Expected | None:
    """What a line says of the layers of its model; None for a line that is about no choice of a backend."""
    if known.says == "order":
        return Expected(_row(known, match, table), tuple(dict.fromkeys(match.fields["backends"].split(", "))))
    if known.says == "named":
        return Expected(_row(known, match, table), named=True)
    if known.says == "tower":
        return Expected(_row(known, match, table), layers="vision")
    if known.says == "prompts" and not known.refused:
        return Expected(_row(known, match, table), layers="prompts")
    if known.says in ("default", "written") and "default prefill" not in known.template.text:
        return Expected(_row(known, match, table))
    return None


def _row(known: KnownLine, match: Match, table: TableView) -> str:
    row = row_of(known, match, table)
    assert row is not None
    return row


def _of_sglang(known: KnownLine, match: Match, table: TableView) -> Iterator[str]:
    fields = match.fields
    if known.says == "phases":
        table.require(fields["backend"])
        table.require(fields["backend_2"])
        return
    row = _row(known, match, table)
    if known.says == "default":
        found = list(sglang_lines.of_default(row, table))
    elif known.says == "pages":
        found = list(sglang_lines.of_pages(row, int(fields["number_2"]), table))
    else:
        found = list(sglang_lines.of_written(row, known.about or fields.get("word_2", ""), table))
    yield from found or [f"no step of {table.registry.title} does so{table.elsewhere}"]


def _refusals(known: KnownLine, table: TableView) -> Iterator[str]:
    found = held(known.refuses, known.row, table) if known.refuses else []
    yield from (refusal.text for refusal in found)
    if known.row is not None and known.about is not None:
        found_claims = list(vllm_lines.of_claim(known.row, known.about, table))
        yield from found_claims or [f"{known.row} refuses it by an assertion of its own, which the table does not hold"]
    elif not found:
        yield f"no step and no row of {table.registry.title} has this refusal{table.elsewhere}"


def _held_in(text: str, engine: KnownEngine, row: str, table: TableView) -> Iterator[str]:
    """The refusals of a backend whose words stand in the reasons that an engine gave."""
    for known in engine.refusals:
        if known.refuses and known.template.match(text) is not None:
            yield from (refusal.text for refusal in held(known.refuses, row, table))


def _following(run: Run, kind: str, table: TableView) -> Iterator[str]:
    """The workspaces, or the blocks, of the backends that the run's lines have named."""
    said: dict[str, None] = {}
    for name in run.backends:
        backend = table.registry.backends.get(name)
        for variant in backend.variants if backend is not None else ():
            for follows in variant.consequences if table.possible(variant.when) else ():
                if getattr(follows, kind) is not None and table.possible(follows.when):
                    holds = f", {where(follows.when)}" if follows.when.facets else ""
                    said[f"{name} {consequence_words(follows)}{holds} ({follows.where.short})"] = None
    yield from said
