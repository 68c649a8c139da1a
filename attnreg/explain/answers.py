"""The answers of `attnreg explain`: the selection for each question and platform, and the remedies of the losers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.explain.asked import Asker, unreached
from attnreg.explain.block_size import BlockSize, pages_of, stored
from attnreg.explain.own_kernels import run_lines, runs_of
from attnreg.packages.proven import unproven_choice
from attnreg.selection.question import UNREAD
from attnreg.selection.refusal import full_dict
from attnreg.selection.remedies import Remedy, remedy
from attnreg.selection.trace import Reason, Selection
from attnreg.selection.wording import platform_words, registry_words

if TYPE_CHECKING:
    from attnreg.language.engine.runs import IndexKeys, MemoryRules
    from attnreg.models.kv_memory import Memory
    from attnreg.platforms import Platform
    from attnreg.registry import Registry
    from attnreg.request import AttentionRequest
    from attnreg.selection.point import Point
    from attnreg.selection.question import Anew, Question

    Ask = Callable[[AttentionRequest, Platform], Selection]


@dataclass(frozen=True)
class Verdict:
    """The selections of platforms that agree on the winner, on each candidate and on the reasons against it.

    ``anew`` is the function of the same name of a model's question.
    """

    selections: tuple[Selection, ...]
    anew: Anew | None = field(default=None, repr=False, compare=False)

    @property
    def selection(self) -> Selection:
        """The first selection, which represents all of them."""
        return self.selections[0]

    @cached_property
    def remedies(self) -> dict[int, Remedy]:
        """Rank of a refused candidate -> the remedy after which it wins, if the remedy is equal on all platforms."""
        by_rank, chosen = {}, self.selection.chosen
        tried: dict[Any, Selection | None] = {}
        for candidate in self.selection.candidates:
            # the winner may have a second place in the order, where it needs no remedy
            if not candidate.accepted and not (chosen and chosen.name == candidate.name):
                answers = {remedy(s, s.candidates[candidate.rank - 1], self.anew, tried) for s in self.selections}
                if len(answers) == 1 and (answer := answers.pop()) is not None:
                    by_rank[candidate.rank] = answer
        return by_rank

    @cached_property
    def runs(self) -> tuple[str, ...]:
        """Sentences on what attnreg itself runs, if it differs from the selected backend."""
        return run_lines(self.selection)

    def reason(self, rank: int, index: int) -> Reason:
        """One reason against a candidate, with the requested values of all platforms of this verdict."""
        reasons = [s.candidates[rank - 1].reasons[index] for s in self.selections]
        first = reasons[0]
        if first.sentence or len({r.asked for r in reasons}) == 1:
            return first
        return dataclasses.replace(first, asked=", ".join(dict.fromkeys(str(r.asked) for r in reasons)))


@dataclass(frozen=True)
class Answer:
    """A question and its verdicts, one for each set of platforms that agree."""

    question: Question
    verdicts: tuple[Verdict, ...]


class AboutRun(NamedTuple):
    """A sentence of a plan about a run of the layers. ``archs`` is empty if it holds on every platform asked."""

    sentence: str
    archs: tuple[str, ...] = ()

    def text(self, what: str) -> str:
        """The sentence after ``what``: ``a run of these layers does not start on sm90: …``."""
        where = f" on {', '.join(self.archs)}" if self.archs else ""
        return f"{what}{where}: {self.sentence}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {"text": self.sentence, **({"archs": list(self.archs)} if self.archs else {})}


@dataclass(frozen=True)
class Explanation:
    """The answers of one run of ``attnreg explain``, its assumptions (``notes``) and the KV cache of its model.

    ``memory`` is the KV cache as the engine stores it: several if platforms differ, none without a model. ``pages`` are
    the block sizes of that cache, if the registry knows how the engine chooses them. ``stops`` say why a run of the
    model does not start, although each layer has a backend; ``doubts`` say what is not known of the run as a whole.
    """

    registry: Registry
    title: str
    answers: tuple[Answer, ...]
    notes: tuple[str, ...] = ()
    memory: tuple[Memory, ...] = ()
    pages: tuple[BlockSize, ...] = ()
    stops: tuple[AboutRun, ...] = ()
    doubts: tuple[AboutRun, ...] = ()

    @property
    def found(self) -> bool:
        """Whether every request with a known answer gets a backend on every platform, without a known failure.

        A run of a whole model also has to start.
        """
        return not self.stops and all((s.backend or s.unknown) and not s.fails for s in self._selections)

    @property
    def known(self) -> bool:
        """Whether the answer is known for every layer on every platform, and the bytes of each layer's cache.

        If no layer asks for a backend, it is whether the engine serves the run.
        """
        read = all(answer.question.kind != UNREAD for answer in self.answers) and (self._selections or not self.doubts)
        return (
            bool(read) and not any(s.unknown for s in self._selections) and all(memory.known for memory in self.memory)
        )

    @property
    def _selections(self) -> list[Selection]:
        return [s for answer in self.answers for verdict in answer.verdicts for s in verdict.selections]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values: each selection with its trace, the backend that attnreg itself runs, and the remedies."""
        caches = [memory.to_dict() for memory in self.memory]
        memory = {"kv_cache": caches[0]} if len(caches) == 1 else {"kv_caches": caches} if caches else {}
        return {
            "registry": self.registry.title,
            "title": self.title,
            "notes": list(self.notes),
            "answers": [
                {"label": a.question.label, "layers": a.question.layers, "selections": _selections(a)}
                for a in self.answers
            ],
            **memory,
            **({"block_sizes": [page.to_dict() for page in self.pages]} if self.pages else {}),
            **({"does_not_start": [stop.to_dict() for stop in self.stops]} if self.stops else {}),
            **({"run_not_known": [doubt.to_dict() for doubt in self.doubts]} if self.doubts else {}),
        }


def _selections(answer: Answer) -> list[dict[str, Any]]:
    out = []
    for verdict in answer.verdicts:
        for selection in verdict.selections:
            data = full_dict(selection)
            candidates = data.pop("candidates")
            data["runs"] = [run.to_dict() for run in runs_of(selection)]
            data |= {"unproven": [one.to_dict() for one in unproven_choice(selection)], "candidates": candidates}
            for candidate in data["candidates"]:
                would_win = verdict.remedies.get(candidate["rank"])
                candidate["would_win"] = would_win.to_dict() if would_win else None
            out.append(data)
    return out


def explain(
    questions: Iterable[Question],
    platforms: Sequence[Platform],
    registry: Registry,
    *,
    backend: str | None = None,
    draft_backend: str | None = None,
    vision_backend: str | None = None,
    prefill_backend: str | None = None,
    title: str = "",
    notes: Iterable[str] = (),
    memory: Memory | None = None,
) -> Explanation:
    """The explanation of every question on every platform; platforms that agree share a verdict.

    ``backend`` is the backend that the user names, ``draft_backend`` that of the draft's layers, ``vision_backend``
    that of vision towers, ``prefill_backend`` that of the prompts of MLA. The registry's ``options`` say which layers
    each reaches.
    Raises `attnreg.RequestError` for words that the registry does not have. A request without a backend is an answer,
    not an error.
    """
    questions, answers = tuple(questions), []
    given = {"backend": backend, "draft_backend": draft_backend}
    given |= {"vision_backend": vision_backend, "prefill_backend": prefill_backend}
    ask = Asker(registry, given, (question.request for question in questions))

    for question in questions:
        groups: dict[Any, list[Selection]] = {}
        for platform in platforms:
            if question.request is None:
                break
            selection = ask(question.request, platform)
            groups.setdefault(_signature(selection), []).append(selection)
        answers.append(Answer(question, tuple(Verdict(tuple(g), question.anew) for g in groups.values())))
    notes = (*notes, *unreached(ask.given, ask.reached, registry), *_idle_flags(questions, platforms, ask))
    pages: tuple[BlockSize, ...] = ()
    if memory is not None and memory.whole:
        pages = pages_of(questions, platforms, registry, ask, memory.block_size)
    caches = () if memory is None else _as_started(memory, platforms, registry, ask, pages)
    return Explanation(registry, title, tuple(answers), notes, caches, pages)


def title_of(
    platforms: Sequence[Platform],
    registry: Registry,
    what: str = "",
    *,
    choices: Iterable[str] = (),
    here: bool = False,
    installed: bool = False,
) -> str:
    """The title line of an explanation; it states the whole question.

    ``gpt-oss-120b · 36 layers · ROCm gfx942 (MI300X) · every package assumed · vLLM 0.33.0 (data be1919b)``

    what: the model or the request in words. choices: the backends that a user named, in words. here: whether the
    platforms are this machine's. installed: whether their packages are the ones installed here.
    """
    where = platform_words(platforms, registry.vocabulary, here=here, installed=installed)
    return " · ".join(filter(None, (what, *choices, *where, registry_words(registry))))


def _as_started(
    memory: Memory, platforms: Sequence[Platform], registry: Registry, ask: Ask, pages: Iterable[BlockSize]
) -> tuple[Memory, ...]:
    """The KV cache after the engine's start, for each set of platforms that agree."""
    from attnreg.models.kv_memory import as_started

    def on(platform: Platform) -> Callable[[AttentionRequest], AttentionRequest | None]:
        return lambda request: stored(ask(request, platform))

    starts = [(p.arch, on(p), functools.partial(in_run, ask=ask, platform=p)) for p in platforms]
    archs = [platform.arch for platform in platforms]
    states = {arch: page.states.by_state for page in pages if page.states for arch in page.archs or archs}
    return as_started(memory, starts, registry.vocabulary.words, states)


def in_run(memory: Memory, ask: Ask, platform: Platform) -> Memory:
    """The caches with what the engine's rules for the memory of a run add: keys of indexers, and whole windows."""

    def held(request: AttentionRequest) -> tuple[MemoryRules | None, Point]:
        selection = ask(request, platform)
        return selection.registry.memory, selection.point()

    def keys(request: AttentionRequest) -> IndexKeys | None:
        rules, point = held(request)
        return next((k for k in rules.index_keys if k.when.holds(point)), None) if rules is not None else None

    def whole(request: AttentionRequest) -> bool:
        rules, point = held(request)
        return rules is not None and any(when.holds(point) for when in rules.whole_windows)

    def every(request: AttentionRequest) -> bool | None:
        rules, point = held(request)
        return next((whole for when, whole in rules.windows if when.holds(point)), None) if rules is not None else None

    return memory.with_index_keys(keys).with_windows(whole, every)


def _idle_flags(questions: Sequence[Question], platforms: Sequence[Platform], ask: Ask) -> list[str]:
    """A note for each flag that changes no answer."""
    requests = [q.request for q in questions if q.request is not None]
    notes = []
    for flag in sorted({flag for platform in platforms for flag in platform.flags}):
        without = {p: dataclasses.replace(p, flags=p.flags - {flag}) for p in platforms if flag in p.flags}
        pairs = ((ask(r, p), ask(r, q)) for r in requests for p, q in without.items())
        if requests and all(_verdicts(a) == _verdicts(b) for a, b in pairs):
            notes.append(f"flag {flag} changes nothing here: without it, every answer and every reason is the same")
    return notes


def _verdicts(selection: Selection) -> Any:
    """The verdict on every candidate, the warnings, and the known failures of accepted candidates."""
    return selection.candidates, selection.warnings, selection.failures


def _signature(selection: Selection) -> Any:
    """The key that groups selections into verdicts: all printed parts except the requested values."""
    candidates = tuple(
        (c.title, c.emulates, tuple((r.kind, r.facets, r.where, r.sentence) for r in c.reasons))
        for c in selection.candidates
    )
    winner, order, choice = selection.backend, selection.order, selection.choice
    decided = winner and winner.name, order and order.where, choice and choice.where
    follows = selection.warnings, selection.facts, tuple(selection.failures.items())
    return *decided, selection.started, *follows, run_lines(selection), candidates
