"""The sentences that explain one line of a log: what it says by itself, and what a registry says of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from attnreg.engines.logs import sglang_lines, vllm_lines
from attnreg.engines.logs.layers import Expected
from attnreg.engines.logs.reading.known import KnownLine
from attnreg.engines.logs.reading.templates import Match
from attnreg.engines.logs.refusals import held
from attnreg.engines.logs.runs import LoggedRun
from attnreg.engines.logs.tables import TableView, where
from attnreg.errors import few_of_many
from attnreg.selection.consequences import consequence_words

if TYPE_CHECKING:
    from attnreg.explain.answers import Explanation

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
    """The name of a line's backend in a registry. Raises `RequestError` for a backend that the registry lacks."""
    named = backend_of(known, match)
    if named is None:
        return None
    names = [known.like.get(named, ""), *(pattern.replace("{}", named) for pattern in known.rows), named]
    found = next((name for name in names if name in table.registry.backends), None)
    if found is None:
        raise table.absent(named)
    return found


def stated(known: KnownLine, match: Match, run: LoggedRun) -> Iterator[str]:
    """What a line says by itself, whatever the release."""
    backend, fields = backend_of(known, match), match.fields
    if known.says == "order":
        accepted = fields["backends"].split(", ")
        first = f"{backend} is the first of {len(accepted)} backends that accept the layer: {', '.join(accepted)}"
        yield first if len(accepted) > 1 else f"only {backend} accepts the layer"
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
        pages = fields["number_2"]
        yield f"{backend} does not read the pages that were asked for, and a step writes {pages} tokens a page"
    elif known.says == "tower":
        yield f"the vision tower runs {backend}; --attention-backend does not reach it, --mm-encoder-attn-backend does"
    elif known.says == "prompts":
        refuses = "was named for the prompts of MLA, and refuses them"
        yield f"{backend} {refuses if known.refused else 'attends to the prompts of MLA'}"
        yield "--attention-backend is about decoding, --attention-config.mla_prefill_backend about prompts"
    elif known.says == "phases":
        yield f"prompts run {fields['backend_2']}, and decoding runs {fields['backend']}"
    yield from _other_versions(known, match, run)
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


def _other_versions(known: KnownLine, match: Match, run: LoggedRun) -> Iterator[str]:
    """The lines of a run that name another version of the library that a line names."""
    for number, line in run.versions.get(known.row or "", {}).items() if known.says == "runs-version" else ():
        if number != match.fields["number"]:
            yield (
                f"line {line:,} has version {number}: layers of this run, such as a draft's, run another version, or"
                " two engines write this log"
            )


def by_table(known: KnownLine, match: Match, run: LoggedRun, table: TableView) -> Iterator[str]:
    """What a registry says of a line. Raises `RequestError` for a backend that it does not have."""
    explain = _OF_TABLE.get(known.says)
    if explain is not None:
        yield from explain(known, match, run, table)


def _of_order(known: KnownLine, match: Match, run: LoggedRun, table: TableView) -> Iterator[str]:
    return vllm_lines.of_order(_row(known, match, table), match.fields["backends"].split(", "), table)


def _of_named(known: KnownLine, match: Match, run: LoggedRun, table: TableView) -> Iterator[str]:
    return vllm_lines.of_named(_row(known, match, table), table)


def _of_old(known: KnownLine, match: Match, run: LoggedRun, table: TableView) -> Iterator[str]:
    return vllm_lines.of_old(_row(known, match, table))


def _of_stored(known: KnownLine, match: Match, run: LoggedRun, table: TableView) -> Iterator[str]:
    return vllm_lines.of_stored(_row(known, match, table), match.fields["word"], table)


def _of_precluded(known: KnownLine, match: Match, run: LoggedRun, table: TableView) -> Iterator[str]:
    _row(known, match, table)
    for lost in match.fields["backends"].split(", "):
        yield from vllm_lines.of_claim(lost, "block_size", table)


def _of_refused(known: KnownLine, match: Match, run: LoggedRun, table: TableView) -> Iterator[str]:
    """What a named backend accepts of what the engine refused it for, and its rules whose words the reasons have."""
    row, reasons = _row(known, match, table), match.fields["text"]
    yield from vllm_lines.of_refused(row, reasons, run.engine.reasons, table)
    for line in run.engine.refusals:
        if line.refuses and line.template.match(reasons) is not None:
            yield from (refusal.text for refusal in held(line.refuses, row, table))


def _of_config(known: KnownLine, match: Match, run: LoggedRun, table: TableView) -> Iterator[str]:
    return vllm_lines.of_config(match.fields["text"], table)


def _of_version(known: KnownLine, match: Match, run: LoggedRun, table: TableView) -> Iterator[str]:
    return vllm_lines.of_version(match.fields["number"], _row(known, match, table), table)


def _of_tower(known: KnownLine, match: Match, run: LoggedRun, table: TableView) -> Iterator[str]:
    found = list(vllm_lines.of_tower(_row(known, match, table), table))
    yield from found or [f"no order of {table.registry.title} for vision towers has it{table.elsewhere}"]


def _of_prompts(known: KnownLine, match: Match, run: LoggedRun, table: TableView) -> Iterator[str]:
    row = _row(known, match, table)
    for order in (order for orders in table.registry.orders.values() for order in orders):
        names = list(dict.fromkeys(entry.backend for entry in order.entries))
        if row in names and table.possible(order.when):
            yield f"{row} is entry {names.index(row) + 1} of the order {order.title} ({order.where.short})"


def _of_step(known: KnownLine, match: Match, run: LoggedRun, table: TableView) -> Iterator[str]:
    for step in table.registry.steps:
        for effect in table.effects(step) if step.name in known.steps else ():
            because = f": {effect.because}" if effect.because else ""
            yield f"{step.title or step.name} ({effect.where.short}){because}"


def _of_memory(known: KnownLine, match: Match, run: LoggedRun, table: TableView) -> Iterator[str]:
    """The workspaces, or the blocks, of the backends that the run's lines have named."""
    kind = "workspace" if known.says == "memory" else "kernel_blocks"
    said: dict[str, None] = {}
    for name in run.backends:
        backend = table.registry.backends.get(name)
        for variant in backend.variants if backend is not None else ():
            for follows in variant.consequences if table.possible(variant.when) else ():
                if getattr(follows, kind) is not None and table.possible(follows.when):
                    holds = f", {where(follows.when)}" if follows.when.facets else ""
                    said[f"{name} {consequence_words(follows)}{holds} ({follows.where.short})"] = None
    yield from said


def _of_name(known: KnownLine, match: Match, run: LoggedRun, table: TableView) -> Iterator[str]:
    word = match.fields.get("word") or match.fields["backend"]
    yield few_of_many(word, table.registry.backends, f"attnreg list --engine {table.registry.name}")


def _of_refusal(known: KnownLine, match: Match, run: LoggedRun, table: TableView) -> Iterator[str]:
    found = held(known.refuses, known.row, table) if known.refuses else []
    yield from (refusal.text for refusal in found)
    if known.row is not None and known.about is not None:
        claims = list(vllm_lines.of_claim(known.row, known.about, table))
        yield from claims or [f"{known.row} refuses it by an assertion of its own, which the table does not hold"]
    elif not found:
        yield f"no step and no row of {table.registry.title} has this refusal{table.elsewhere}"


def _of_phases(known: KnownLine, match: Match, run: LoggedRun, table: TableView) -> Iterator[str]:
    for name in (match.fields["backend"], match.fields["backend_2"]):
        if name not in table.registry.backends:
            raise table.absent(name)
    yield from ()


def _of_resolution(known: KnownLine, match: Match, run: LoggedRun, table: TableView) -> Iterator[str]:
    """The steps of SGLang's resolution that may have logged a line."""
    row = _row(known, match, table)
    if known.says == "default":
        found = list(sglang_lines.of_default(row, table))
    elif known.says == "pages":
        found = list(sglang_lines.of_pages(row, int(match.fields["number_2"]), table))
    else:
        found = list(sglang_lines.of_written(row, known.about or match.fields.get("word_2", ""), table))
    yield from found or [f"no step of {table.registry.title} does so{table.elsewhere}"]


def default_of(row: str, table: TableView, explanation: Explanation) -> list[str]:
    """The cases of SGLang's default that give a backend and hold for one of the explained layers."""
    selections = [s for answer in explanation.answers for verdict in answer.verdicts for s in verdict.selections]
    return list(dict.fromkeys(text for s in selections for text in sglang_lines.of_default(row, table, s.point())))


_Explain = Callable[[KnownLine, Match, LoggedRun, TableView], Iterator[str]]
_OF_TABLE: dict[str, _Explain] = {
    "order": _of_order,
    "named": _of_named,
    "old": _of_old,
    "stored": _of_stored,
    "precluded": _of_precluded,
    "refused": _of_refused,
    "none": _of_config,
    "unknown-name": _of_name,
    "version": _of_version,
    "runs-version": _of_version,
    "tower": _of_tower,
    "prompts": _of_prompts,
    "blocks": _of_memory,
    "memory": _of_memory,
    "step": _of_step,
    "refusal": _of_refusal,
    "default": _of_resolution,
    "written": _of_resolution,
    "pages": _of_resolution,
    "phases": _of_phases,
}


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
