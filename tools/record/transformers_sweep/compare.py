"""What the classes of one architecture do through attnreg, and by eager with the same weights and inputs: compared."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers_truth.variants import default

import attnreg
import attnreg.integrations.transformers as attention
from transformers_sweep import tiny
from transformers_sweep.arguments import search
from transformers_sweep.inputs import Inputs, inputs_of
from transformers_sweep.record import Row, no_row
from transformers_sweep.scenarios import Outputs, Scenario, floats, scenarios

# two orders of summing, through a few layers in float32
TOLERANCE = 2e-4
REFUSALS = (attnreg.UnclaimedError, attnreg.NoBackendError, attnreg.SpecError, attnreg.BatchError)


def difference(expected: Outputs, found: Outputs, rows: Tensor | None = None) -> float:
    """The largest difference, relative to the largest number of the tensor that it is in.

    rows: [batch, tokens] bool, the rows that are compared of tensors that have a row for each token; None for all.
    """
    worst = 0.0
    for name, right in expected.items():
        left = found.get(name)
        if left is None or left.shape != right.shape:
            return float("inf")
        right, left = right.double(), left.double()
        if rows is not None and right.shape[:2] in (rows.shape, (len(rows), rows.shape[1] + 1)):
            # a class may append a token of its own
            kept = torch.nn.functional.pad(rows, (0, right.shape[1] - rows.shape[1]), value=True)
            right, left = right[kept], left[kept]
        finite = torch.isfinite(right)
        if not torch.equal(finite, torch.isfinite(left)):
            return float("inf")
        right, left = right[finite], left[finite]
        if right.numel():
            worst = max(worst, float((left - right).abs().max()) / (float(right.abs().max()) or 1.0))
    return worst


class NothingRunsError(Exception):
    """No arguments are known that a class runs with by eager."""


def first_that_runs(cls: type[PreTrainedModel], model_type: str) -> tuple[PreTrainedModel, Row, Inputs, Outputs]:
    """A small model by eager, its configuration, arguments of a plain call and what comes of it.

    Raises NothingRunsError where a model can be built and none runs, and the error of building where none can be built.
    The error describes the smallest copy and the likeliest arguments.
    """
    if cls.forward is torch.nn.Module.forward:
        raise NothingRunsError("it has no forward: its parts are called one by one")
    unbuilt: list[Exception] = []
    errors: list[str] = []
    for data in tiny.copies(default(model_type)):
        if (unbuilt or errors) and not tiny.is_buildable(cls, data):
            continue
        try:
            model = tiny.build(cls, data)
        except Exception as e:
            unbuilt.append(e)
            continue
        for given in inputs_of(model):
            try:
                return model, data, given, floats(model(**given))
            except Exception as e:
                errors.append(_line(e))
        found = search(model, partial(_outputs, model))
        if found:
            return model, data, *found
        errors.append("no inputs are known for it")
    if unbuilt and not errors:
        raise unbuilt[0]
    raise NothingRunsError(errors[0])


def sweep_class(model_type: str, cls: type[PreTrainedModel]) -> Row:
    """What a class does in each scenario: a row of the record."""
    row: Row = {"family": model_type, "class": cls.__name__, "by": "", "outcomes": {}}
    outcomes: dict[str, list[str]] = row["outcomes"]
    with torch.no_grad():
        try:
            eager, data, given, found = first_that_runs(cls, model_type)
        except NothingRunsError as e:
            outcomes["plain"] = ["not run", f"by eager: {e}"]
            return row
        try:
            attention.register(registry=attnreg.load_registry("default"))
            ours = _made(cls, data, eager, "attnreg")
        except REFUSALS as e:
            outcomes["build"] = ["refused", _line(e)]
            return row
        except Exception as e:
            outcomes["build"] = ["broken", _line(e)]
            return row
        sdpa = functools.cache(lambda: _by_sdpa(cls, data, eager))
        for scenario in scenarios(eager, given, found):
            outcomes[scenario.name] = _outcome(eager, sdpa, ours, scenario)
        row["by"] = _by(ours, {outcome for outcome, *_ in outcomes.values()})
    return row


def _by(model: PreTrainedModel, outcomes: set[str]) -> str:
    """Who computed or refused attention: attnreg, the classes' own eager code, or code that calls no function."""
    if attention.runs(model) or outcomes & {"refused", "broken"}:
        return "attnreg"
    parts = (m for m in model.modules() if isinstance(m, PreTrainedModel))
    return "own eager code" if any(m.config._attn_implementation == "eager" for m in parts) else "no attention function"


def _outputs(model: PreTrainedModel, given: Inputs) -> Outputs:
    return floats(model(**given))


def _made(cls: type[PreTrainedModel], data: Row, like: PreTrainedModel, name: str) -> PreTrainedModel:
    config = transformers.CONFIG_MAPPING[data["model_type"]].from_dict(copy.deepcopy(data))
    with torch.device("cpu"):
        made: PreTrainedModel = cls._from_config(config, attn_implementation=name, experts_implementation="eager")
    made.load_state_dict(like.state_dict())
    moved: PreTrainedModel = cast("Any", made).to(torch.get_default_device())
    return moved.eval()


def _by_sdpa(cls: type[PreTrainedModel], data: Row, eager: PreTrainedModel) -> PreTrainedModel | None:
    """The model by PyTorch's attention; None where the class has none."""
    try:
        return _made(cls, data, eager, "sdpa")
    except Exception:
        return None


def _line(error: BaseException) -> str:
    # wherever packages are installed
    said = " ".join(str(error).split()).replace(f"{Path(transformers.__file__).parent.parent}/", "")
    return f"{type(error).__name__}: {said}"[:300]


def _outcome(eager: Any, sdpa: Any, ours: Any, scenario: Scenario) -> list[str]:
    """The outcome of a scenario, and what it says."""

    def answer(model: Any) -> Outputs:
        torch.manual_seed(5)
        return scenario.run(model)

    try:
        expected = answer(eager)
    except Exception as e:
        return ["not run", f"by eager: {_line(e)}"]
    try:
        found = answer(ours)
    except REFUSALS as e:
        return ["refused", _line(e)]
    except Exception as e:
        return ["broken", _line(e)]
    apart = difference(expected, found)
    if apart <= TOLERANCE:
        return ["agrees"]
    # a row without a key: eager takes the mean of all keys, attnreg zeros, as PyTorch's attention does
    alike = sdpa() is not None and difference(answer(sdpa()), found) <= TOLERANCE
    if scenario.tokens is not None and (alike or difference(expected, found, scenario.tokens) <= TOLERANCE):
        return ["agrees"]
    return ["as sdpa", "sdpa differs from eager, too"] if alike else ["differs", f"by {apart:.1g}"]


def sweep_family(model_type: str, begin: Callable[[str], None] = lambda name: None) -> list[Row]:
    """The rows of a family: of the first class with a head that can be built, and of its base.

    begin: called with the name of each class before it is built.
    """
    try:
        tasks = tiny.classes(model_type)
    except Exception as e:
        return [no_row(model_type, "", "not built", _line(e))]
    base = tasks.pop("base", None)
    rows: list[Row] = []
    for cls in [*tasks.values(), base]:
        if cls is None or (cls is not base and any("build" not in row["outcomes"] for row in rows)):
            continue
        begin(cls.__name__)
        try:
            rows.append(sweep_class(model_type, cls))
        except Exception as e:
            rows.append(no_row(model_type, cls.__name__, "not built", _line(e)))
    built = [row for row in rows if "build" not in row["outcomes"]]
    # a class that is for another config of the composite is no class of this family
    return built or rows[-1:] or [no_row(model_type, "", "not built", "LookupError: transformers has no class for it")]
