"""Asks for a plan: `attnreg.plan`, the checks of what a user gives, and the changes after which a run starts."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from attnreg.compile.inputs.configs import config_path
from attnreg.engines.drafts import refuse_foreign_draft
from attnreg.errors import RequestError
from attnreg.explain.answers import AboutRun
from attnreg.models.questions import ModelQuestions
from attnreg.planning.changes import changes_of
from attnreg.planning.conflicts import without_backend
from attnreg.planning.evaluate import UNKNOWN_BYTES, Run, evaluate
from attnreg.planning.memory import Room
from attnreg.planning.plan import Plan as Plan
from attnreg.platforms import Platform
from attnreg.selection.point import placed
from attnreg.selection.wording import readable

if TYPE_CHECKING:
    from attnreg.explain.answers import Explanation
    from attnreg.models.kv_memory import Memory
    from attnreg.models.questions import ModelOptions
    from attnreg.registry import Registry

_CONNECTOR_HELP = "give --kv-transfer-config as the engine takes it, or the name of the connector's class"


class PlanOptions(TypedDict, total=False):
    """The options of `plan`; each has the name of an option of the command."""

    tp: int
    pp: int
    dcp: int
    draft: str
    speculative_tokens: int
    dtype: str
    kv_dtype: str
    draft_kv_dtype: str
    block_size: int
    features: Iterable[str]
    backend: str
    draft_backend: str
    vision_backend: str
    prefill_backend: str
    layout: str
    graphs: str
    connector: str
    kv_transfer_config: str | Mapping[str, Any]
    gpu_memory: int
    weights: int
    memory_share: float
    length: int


def plan(
    model: str | os.PathLike[str],
    platform: Platform | str,
    registry: Registry | str | None = None,
    **options: Unpack[PlanOptions],
) -> Plan:
    """The plan of a run: what an engine decides once for all layers of a model, and whether the run starts.

    model: the path of a config.json or of its directory, a model's id in the hub's cache, or the name of an example.
    platform: a platform, or the name of a product or an architecture. registry: a registry or the name of a bundled
    one; None is attnreg's own. Each option has the name of an option of `attnreg plan`:

    - tp, pp, dcp: ranks of tensor parallelism, stages of pipeline parallelism, ranks of decode context parallelism.
    - draft: the config of a draft, or ``mtp`` for the model's own MTP layers. ``speculative_tokens``: the tokens that
      it proposes for each step.
    - dtype, kv_dtype, draft_kv_dtype, block_size, features: of the requests, as in `AttentionRequest`.
    - backend, draft_backend, vision_backend, prefill_backend: backends that the user names for the layers that each
      option reaches in the engine.
    - layout, graphs: the KV cache layout and the CUDA-graph mode that the user asks for. ``connector``: the layout that
      a KV connector wishes. ``kv_transfer_config``: the engine's, or the name of the connector's class.
    - gpu_memory, weights: the memory of one GPU and the weights on it, in bytes. ``memory_share``: the share of the
      memory that the engine takes, if not its default. ``length``: the tokens of a request.

    Raises `attnreg.ConfigError` for a config that attnreg cannot read, `attnreg.RequestError` for options that no run
    can have, and TypeError for an unknown option.
    """
    from attnreg.loader import registry_of
    from attnreg.models.questions import MTP, ModelOptions

    if unknown := options.keys() - PlanOptions.__annotations__.keys():
        raise TypeError(f"plan() has no option {', '.join(sorted(unknown))}")
    loaded = registry_of(registry)
    values: dict[str, Any] = {**options}
    given: dict[str, Any] = {name: values[name] for name in ("dtype", "kv_dtype", "block_size") if name in values}
    draft = options.get("draft")
    asked = ModelOptions(
        given=given,
        features=frozenset(options.get("features", ())),
        ranks=options.get("tp", 1),
        draft=draft if draft in (None, MTP) else config_path(draft),
        draft_given={"kv_dtype": options["draft_kv_dtype"]} if "draft_kv_dtype" in options else {},
        lengths=(options["length"],) if "length" in options else (),
    )
    backends = ("backend", "draft_backend", "vision_backend", "prefill_backend")
    names = (*backends, "layout", "graphs", "connector", "kv_transfer_config", "speculative_tokens", "dcp")
    more: dict[str, Any] = {name: values[name] for name in names if name in values}
    memory: dict[str, Any] = {name: values.get(name) for name in ("gpu_memory", "weights", "memory_share")}
    where = placed(Platform(platform) if isinstance(platform, str) else platform, loaded)
    path = config_path(os.fspath(model))
    return planned(run_of(path, asked, loaded, where, stages=options.get("pp", 1), **memory, **more))


def run_of(
    config: str,
    options: ModelOptions,
    registry: Registry,
    platform: Platform,
    *,
    gpu_memory: int | None = None,
    weights: int | None = None,
    memory_share: float | None = None,
    kv_transfer_config: str | Mapping[str, Any] | None = None,
    named: Iterable[str] = (),
    notes: Iterable[str] = (),
    **more: Any,
) -> Run:
    """A run, after checks of what a user gives. ``more`` are further fields of `Run`.

    Raises `attnreg.RequestError` for a memory without weights or smaller than them, for ranks that do not divide, and
    for a draft of another model.
    """
    room = _room(gpu_memory, weights, memory_share, registry)
    dcp = more.get("dcp", 1)
    if options.ranks % dcp:
        raise RequestError(
            f"{dcp} ranks of decode context parallelism do not divide {options.ranks} of tensor parallelism",
            "give --dcp a divisor of --tp",
        )
    if options.draft is None and more.get("draft_backend"):
        raise RequestError("--draft-backend says something of a draft", "give --draft too")
    notes = (*notes, *refuse_foreign_draft(config, options.draft, registry))
    _refuse_idle(options, registry, more)
    if registry.stages is not None and more.get("stages", 1) > 1:
        notes = (*notes, f"{registry.name} does not say which models the engine runs in pipeline stages")
    run = Run(
        config=config,
        options=options,
        registry=registry,
        platform=platform,
        room=room,
        named=tuple(named),
        notes=tuple(notes),
        kv_connector=_connector_facets(kv_transfer_config, registry),
        **more,
    )
    if options.draft is None or registry.graphs is None or run.proposed:
        return run
    note = "no --speculative-tokens: the draft is taken to propose 1 in a step"
    return dataclasses.replace(run, notes=(*run.notes, note))


def planned(run: Run) -> Plan:
    """The plan of a run, with changes after which it starts if it does not."""
    plan = evaluate(run)
    return dataclasses.replace(plan, changes=changes_of(run, plan, evaluate)) if plan.conflicts else plan


def judged(
    explanation: Explanation,
    memory: Memory,
    options: ModelOptions,
    platforms: Sequence[Platform],
    registry: Registry,
    backends: Mapping[str, str | None],
) -> Explanation:
    """An explanation of a model's layers with what a plan of their run says beyond them.

    memory: the KV cache of the model. backends: option -> the backend that it names. Nothing is added if the registry
    has no rules for whole runs, and to questions about single phases and roles.
    """
    if (registry.layout is None and registry.graphs is None) or {"phase", "role"} & options.given.keys():
        return explanation
    questions = tuple(answer.question for answer in explanation.answers)
    model = ModelQuestions(questions, memory.models[0].model.name if memory.models else "", "", (), memory)
    found = defaultdict[tuple[str, str], list[str]](list)
    for platform in platforms:
        named: dict[str, Any] = {**backends}
        plan = evaluate(Run(config="", options=options, registry=registry, platform=platform, **named), model)
        for said in (*(("stops", s) for s in _conflicts_of_run(plan)), *(("doubts", s) for s in _doubts_of_run(plan))):
            found[said].append(platform.arch)
    kinds: dict[str, tuple[AboutRun, ...]] = {"stops": (), "doubts": ()}
    for (kind, sentence), archs in found.items():
        kinds[kind] += (AboutRun(sentence, () if len(archs) == len(platforms) else tuple(archs)),)
    return dataclasses.replace(explanation, stops=kinds["stops"], doubts=kinds["doubts"])


def _conflicts_of_run(plan: Plan) -> list[str]:
    """The conflicts of a plan that the answers about its layers do not show."""
    shown = without_backend(dataclasses.replace(group, stops=None) for group in plan.groups)
    settled = [agreed.conflict for agreed in (plan.layout, plan.graphs) if agreed is not None]
    return [
        c.sentence if c in settled or not c.facts else f"{c.sentence}: {c.facts[0].sentence}"
        for c in plan.conflicts
        if c not in shown
    ]


def _doubts_of_run(plan: Plan) -> list[str]:
    """What a plan does not know of the run as a whole, but for its page and its bytes, which explanations print."""
    printed = {UNKNOWN_BYTES.text, *([plan.page.sentence] if plan.page is not None else [])}
    return [said.text for said in plan.unknown if not said.group and said.text not in printed]


def _refuse_idle(options: ModelOptions, registry: Registry, more: Mapping[str, Any]) -> None:
    """Raise `RequestError` for an option that the engine does not read."""
    if more.get("speculative_tokens") and options.draft is None:
        raise RequestError("--speculative-tokens are those of a draft", "give --draft too")
    if more.get("layout") and not (registry.layout is not None and registry.layout.variable):
        message = f"{registry.name} reads no variable that asks for a KV cache layout"
        raise RequestError(message, "leave --layout out")
    if more.get("connector") and registry.layout is None:
        raise RequestError(f"{registry.name} has no rules for KV cache layouts", "leave --connector-layout out")
    if more.get("graphs") and registry.graphs is None:
        raise RequestError(f"{registry.name} has no rules for CUDA graphs", "leave --graphs out")


def _room(gpu_memory: int | None, weights: int | None, share: float | None, registry: Registry) -> Room | None:
    """The memory of one GPU. Raises `RequestError` if one of its parts is missing, or if the weights do not fit."""
    if gpu_memory is None:
        given = "--weights" if weights is not None else "--memory-share"
        if weights is not None or share is not None:
            raise RequestError(f"{given} is about a GPU whose memory is not given", "give --gpu-memory too")
        return None
    if weights is None:
        raise RequestError("what fits depends on the weights, which are not given", "give --weights, those on one GPU")
    taken = share if share is not None else registry.memory.share if registry.memory is not None else 1.0
    if int(gpu_memory * taken) <= weights:
        part = f" × {taken:g}" if taken < 1 else ""
        message = f"the weights take {readable(weights)}, and a GPU has {readable(gpu_memory)}{part}"
        raise RequestError(
            message, "give --weights those on one GPU, or share the model out over more ranks with --tp or --pp"
        )
    return Room(gpu_memory, weights, share)


def _connector_facets(given: str | Mapping[str, Any] | None, registry: Registry) -> dict[str, Any]:
    """The facets of a KV connector: its class, and whether it has options of its own; empty without a connector.

    given: the engine's ``kv_transfer_config``, as a mapping, as JSON or as the name of the connector's class. Raises
    `RequestError` if it is none of these, and for a registry without connectors.
    """
    if given is None:
        return {}
    if "connector" not in registry.vocabulary.facets:
        raise RequestError(f"{registry.name} has no rules for KV connectors", "leave --kv-transfer-config out")
    name: Any = given
    options, module = None, None
    if isinstance(given, Mapping) or given.lstrip()[:1] in ("{", "["):
        try:
            config = given if isinstance(given, Mapping) else json.loads(given)
        except (ValueError, RecursionError):
            config = None
        if not isinstance(config, Mapping):
            raise RequestError("--kv-transfer-config is no JSON object", _CONNECTOR_HELP)
        name, options = config.get("kv_connector"), config.get("kv_connector_extra_config")
        module = config.get("kv_connector_module_path")
    if not isinstance(name, str) or not name.strip():
        raise RequestError("--kv-transfer-config names no kv_connector", _CONNECTOR_HELP)
    # a class of the user's own is none of the engine's, whatever its name
    return {"connector": f"{module}.{name}" if module else name, **({"connector_options": True} if options else {})}
