"""The whole explanation of a line: the layers of the run's model that get its backend, and why no other backend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.engines.logs.runs import LoggedRun
from attnreg.errors import RequestError

if TYPE_CHECKING:
    from attnreg.explain.answers import Answer, Explanation
    from attnreg.models.questions import ModelOptions, ModelQuestions
    from attnreg.platforms import Platform
    from attnreg.registry import Registry
    from attnreg.selection.question import Question
    from attnreg.selection.trace import Selection


class Expected(NamedTuple):
    """What a line says of some layers: their backend, all backends that accept them, and which layers they are.

    accepted: the backends that the engine found valid, in their order; None where the line does not list them. layers:
    ``main``, ``vision`` or ``prompts``. named: whether the user or the model's code named the backend.
    """

    backend: str
    accepted: tuple[str, ...] | None = None
    layers: str = "main"
    named: bool = False


class LayersExplained(NamedTuple):
    """The explanation of the layers that a line is about, if the model is known; and what prevents or limits it."""

    explanation: Explanation | None
    notes: tuple[str, ...] = ()


def explain_layers(
    expected: Expected, run: LoggedRun, config: str, registry: Registry, platforms: Sequence[Platform], alone: bool
) -> LayersExplained:
    """The explanation of the layers to which a registry gives the backend that a line names.

    config: the path of the model's config. platforms: those that the run may have had. alone: whether the run's GPU is
    known, so that platforms has it alone.
    """
    from attnreg.explain.answers import explain, title_of
    from attnreg.models.fields import ConfigError
    from attnreg.models.questions import model_questions

    options, left_out = _options(run, registry)
    try:
        model = model_questions(config, options, registry)
        asked = [question for question in model.questions if _is_about(question, expected.layers, run)]
        found = explain(asked, platforms, registry, backend=_named(expected, registry))
    except (ConfigError, RequestError) as e:
        return LayersExplained(None, (f"the layers of {run.model_words} are not explained: {e}",))
    answers, listed = _agreeing(found.answers, expected)
    if not answers:
        return LayersExplained(None, (_disagreement(found.answers, expected, run, model, alone),))
    fitting = list(dict.fromkeys(s.platform for a in answers for v in a.verdicts for s in v.selections))
    notes = [*left_out, *model.notes]
    if not listed:
        notes.append(_other_list(answers[0].verdicts[0].selection, expected))
    title = title_of(fitting, registry, model.title)
    return LayersExplained(replace(found, title=title, answers=tuple(answers), notes=tuple(notes)))


def _options(run: LoggedRun, registry: Registry) -> tuple[ModelOptions, list[str]]:
    """The options of the model's questions that a run states, and a note for each that is left out."""
    from attnreg.models.questions import ModelOptions

    given: dict[str, Any] = {}
    words = registry.vocabulary.words
    for name, known in (("dtype", words["dtypes"]), ("kv_dtype", words["kv_dtypes"])):
        value = run.value(name)
        if value in known and value != "auto":
            given[name] = value
    if (run.value("block_size") or "").isdigit() and run.engine.name == "vllm":
        given["block_size"] = int(run.value("block_size") or 0)
    ranks = run.value("ranks") or "1"
    notes = ["the layers of the draft are not asked about"] if "draft" in run.facts else []
    return ModelOptions(given=given, ranks=int(ranks) if ranks.isdigit() else 1), notes


def _is_about(question: Question, layers: str, run: LoggedRun) -> bool:
    request = question.request
    # a phase whose backend the user names is none that another line decides
    if request is not None and f"{request.phase}_backend" in run.facts:
        return False
    if request is None:
        return False
    if layers == "vision":
        return request.role == "vision"
    if layers == "prompts":
        return request.phase == "prefill"
    return request.role != "vision"


def _named(expected: Expected, registry: Registry) -> str | None:
    """The backend to ask for by name: a registry of steps names backends itself."""
    return expected.backend if expected.named and expected.layers == "main" else None


def _agreeing(answers: Iterable[Answer], expected: Expected) -> tuple[list[Answer], bool]:
    """The answers with the selections that a line fits, and whether its list of valid backends fits, too."""
    for listed in (True, False):
        kept = []
        for answer in answers:
            verdicts = []
            for verdict in answer.verdicts:
                selections = tuple(s for s in verdict.selections if _fits(s, expected, listed))
                if selections:
                    verdicts.append(replace(verdict, selections=selections))
            if verdicts:
                kept.append(replace(answer, verdicts=tuple(verdicts)))
        if kept or expected.accepted is None:
            return kept, listed
    return [], False


def _fits(selection: Selection, expected: Expected, listed: bool) -> bool:
    if selection.backend is None or selection.backend.name != expected.backend:
        return False
    if expected.accepted is None or not listed:
        return True
    accepted = dict.fromkeys(candidate.name for candidate in selection.candidates if candidate.accepted)
    return tuple(accepted) == expected.accepted


def _other_list(selection: Selection, expected: Expected) -> str:
    """The note on a list of potential backends that is not the table's."""
    here = dict.fromkeys(candidate.name for candidate in selection.candidates if candidate.accepted)
    more = [name for name in expected.accepted or () if name not in here]
    less = [name for name in here if name not in (expected.accepted or ())]
    said = [f"the log lists {', '.join(more)} as valid, and this table does not"] if more else []
    said += [f"this table has {', '.join(less)} as valid, and the log does not"] if less else []
    return f"{'; '.join(said) or 'the log has another sequence'}: the config or an option of the run differs"


def _disagreement(
    answers: Iterable[Answer], expected: Expected, run: LoggedRun, model: ModelQuestions, alone: bool
) -> str:
    """The sentence about a line that no layer of the model fits."""
    named = {s.backend.name for a in answers for v in a.verdicts for s in v.selections if s.backend is not None}
    got = ", ".join(sorted(named)) or "no backend"
    where = "on the GPU of the run" if alone else "on every GPU that it has"
    return (
        f"this table gives the layers of {model.name} {got} {where}, and not {expected.backend}. "
        f"{'The' if alone else 'An'} option, the config or the GPU of the run differs from what the log states"
    )
