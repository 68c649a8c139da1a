"""The report of a run, one page of Markdown: what is new, then for each release what moves and what is left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from packaging.version import Version

from release_watch.recording import Outcome, Summary
from release_watch.standing import Standing

TITLES = {"vllm": "vLLM", "sglang": "SGLang", "transformers": "transformers"}
# lines of a table or list in the report; the summaries have all
MOST = 40


def page(standings: Sequence[Standing], outcomes: Sequence[Outcome], asked_for: str = "") -> str:
    """The report. Its first line is a heading that names the newer releases, or says that there is none.

    asked_for: how the releases of ``outcomes`` were chosen, if they are not the newer ones.
    """
    newer = [f"{TITLES[s.engine]} {v}" for s in standings for v in s.newer]
    lines = [f"# New releases: {', '.join(newer)}" if newer else "# No new releases", ""]
    lines += [*_overview(standings), ""]
    if outcomes:
        failed = [f"{TITLES[o.engine]} {o.version}" for o in outcomes if not o.complete]
        done = len(outcomes) - len(failed)
        text = f"{done} of {len(outcomes)} {asked_for or 'newer'} releases recorded."
        lines += [text + (f" Not recorded, or in part: {', '.join(failed)}." if failed else ""), ""]
    for outcome in outcomes:
        lines += [f"## {TITLES[outcome.engine]} {outcome.version}", "", *_release(outcome), ""]
    return "\n".join(lines).rstrip() + "\n"


def _overview(standings: Iterable[Standing]) -> Iterator[str]:
    yield "| package | newest here | newest on the index | newer | missing between the bundled ones |"
    yield "| --- | --- | --- | --- | --- |"
    gone = []
    for s in standings:
        cells = (str(s.bundled[-1]), str(s.newest or "none"), _versions(s.newer), _versions(s.between))
        yield f"| {' | '.join((TITLES[s.engine], *cells))} |"
        gone += [f"{TITLES[s.engine]} {v}" for v in s.gone]
    if gone:
        yield ""
        yield f"Bundled, and not on the index: {', '.join(gone)}."


def _versions(versions: Sequence[Version]) -> str:
    return ", ".join(map(str, versions)) or "none"


def _release(outcome: Outcome) -> Iterator[str]:
    summary = outcome.summary
    if summary is None:
        yield f"Not recorded: {_cell(outcome.problem)}"
        yield ""
        yield f"The log is `{outcome.engine}-{outcome.version}/recorder.log`. The next run goes on with the recording."
        return
    yield f"Recorded: {summary.recorded}."
    if summary.proposed:
        yield f"Proposed: `{summary.proposed}`."
    yield ""
    yield from _moved(summary)
    for heading, entries in (("Failed", summary.failed), ("Left for a person", summary.left)):
        if entries:
            yield ""
            yield f"{heading}:"
            yield ""
            yield from _cut([f"- {_cell(entry)}" for entry in entries])


def _moved(summary: Summary) -> Iterator[str]:
    if summary.moved is None:
        yield f"What moves against {summary.against} is not known."
    elif not summary.moved:
        yield f"Nothing moves against {summary.against}, in {summary.compared:,} compared cases."
    else:
        yield f"Moves against {summary.against}, in {summary.compared:,} compared cases:"
        yield ""
        yield "| model | architecture | before | after | why, or with what |"
        yield "| --- | --- | --- | --- | --- |"
        rows = [(m.model, ", ".join(m.archs), m.before, m.after, m.why) for m in summary.moved]
        yield from _cut([f"| {' | '.join(map(_cell, row))} |" for row in rows])


def _cut(lines: Sequence[str]) -> Iterator[str]:
    yield from lines[:MOST]
    if len(lines) > MOST:
        yield ""
        yield f"{len(lines) - MOST} more are in `summary.json`."


def _cell(text: str) -> str:
    """A text for one line of Markdown: on one line, without a table's bars or HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
