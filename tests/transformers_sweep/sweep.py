"""Every architecture that transformers can build here, tiny and random, through attnreg and by eager, compared.

python tests/transformers_sweep/sweep.py --record OUT.jsonl    # all of them
python tests/transformers_sweep/sweep.py --family bert -v      # one, in full
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import logging
import multiprocessing
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers_sweep import tiny
from transformers_sweep.scenarios import BATCH, Outputs, Scenario, scenarios, text
from transformers_truth.variants import default

import attnreg
import attnreg.integrations.transformers as attention

# two orders of summing, through a few layers in float32
TOLERANCE = 2e-4
SECONDS = 90
REFUSALS = (attnreg.UnclaimedError, attnreg.NoBackendError, attnreg.SpecError, attnreg.BatchError)
Row = dict[str, Any]


def inputs_of(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Arguments of a plain call to try, the likeliest first."""
    config = model.config
    known = inspect.signature(model.forward).parameters
    if "input_ids" in known and getattr(model, "main_input_name", "input_ids") in ("input_ids", "decoder_input_ids"):
        plain: dict[str, Any] = {"input_ids": text()}
        if "decoder_input_ids" in known:
            plain["decoder_input_ids"] = text(seed=2)[:, :8]
        yield plain
    generator = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", 32)
    size = size if isinstance(size, int) else 32
    channels = getattr(config, "num_channels", 3)
    if "input_values" in known:
        yield {"input_values": noise(BATCH, 4000)}
        yield {"input_values": noise(BATCH, 1, 4000)}
    if "input_features" in known:
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 16)
        more = {"decoder_input_ids": text(seed=2)[:, :8]} if "decoder_input_ids" in known else {}
        for shape in ((BATCH, bins, 256), (BATCH, 64, bins), (BATCH, 64, 160)):
            yield {"input_features": noise(*shape), **more}
    if "pixel_values" in known:
        images = noise(BATCH, channels if isinstance(channels, int) else 3, size, size)
        yield {"pixel_values": images}
        if "input_ids" in known:
            yield {"input_ids": text(), "pixel_values": images}
    if "input_ids" in known:
        yield {"input_ids": text()}


def compare(expected: Outputs, found: Outputs, scenario: Scenario, causal: bool) -> float:
    """The largest difference, relative to the largest number of the tensor that it is in."""
    worst = 0.0
    for name, right in expected.items():
        left = found.get(name)
        if left is None or left.shape != right.shape:
            return float("inf")
        right, left = right.double(), left.double()
        if causal and scenario.tokens is not None and right.shape[:2] == scenario.tokens.shape:
            right, left = right[scenario.tokens], left[scenario.tokens]
        if not bool(torch.isfinite(right).all()):
            both = torch.isfinite(right)
            if not torch.equal(both, torch.isfinite(left)):
                return float("inf")
            right, left = right[both], left[both]
        if right.numel():
            largest = float(right.abs().max()) or 1.0
            worst = max(worst, float((left - right).abs().max()) / largest)
            if left.isnan().any():
                return float("inf")
    return worst


def is_causal(model: PreTrainedModel) -> bool:
    """Whether rows of padding mean nothing: what they see is up to the mask of a decoder."""
    return (
        model.can_generate()
        or bool(getattr(model.config, "is_decoder", False))
        or any(getattr(m, "is_causal", False) is True for m in model.modules())
    )


def first_that_runs(model: PreTrainedModel) -> tuple[dict[str, Any] | None, str]:
    error = "no inputs are known for it"
    for given in inputs_of(model):
        try:
            model(**given)
        except Exception as e:
            error = f"{type(e).__name__}: {e}"
            continue
        return given, ""
    return None, error


def sweep_class(model_type: str, task: str) -> Iterator[Row]:
    data = tiny.small(default(model_type))
    cls = tiny.classes(model_type)[task]
    eager = tiny.build(cls, data)
    row: Row = {"family": model_type, "class": cls.__name__}
    with torch.no_grad():
        given, error = first_that_runs(eager)
        if given is None:
            yield {**row, "scenario": "plain", "outcome": "not run", "detail": f"by eager: {error[:200]}"}
            return
        try:
            attention.register(registry=attnreg.load_registry("default"))
            ours = cls._from_config(_config(data), attn_implementation="attnreg", experts_implementation="eager")
        except REFUSALS as e:
            yield {**row, "scenario": "build", "outcome": "refused", "detail": _line(e)}
            return
        except Exception as e:
            yield {**row, "scenario": "build", "outcome": "broken", "detail": _line(e)}
            return
        ours.load_state_dict(eager.state_dict())
        ours.eval()
        sdpa = _by_sdpa(cls, data, eager)
        causal = is_causal(eager)
        for scenario in scenarios(eager, given):
            yield {**row, "scenario": scenario.name, **_outcome(eager, sdpa, ours, scenario, causal)}


def _by_sdpa(cls: type[PreTrainedModel], data: Row, eager: PreTrainedModel) -> PreTrainedModel | None:
    """The model by PyTorch's attention, which says what a row without a key is; None where the class has none."""
    try:
        made = cls._from_config(_config(data), attn_implementation="sdpa", experts_implementation="eager")
    except Exception:
        return None
    made.load_state_dict(eager.state_dict())
    return made.eval()


def _config(data: Row) -> Any:
    return transformers.CONFIG_MAPPING[data["model_type"]].from_dict(copy.deepcopy(data))


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _outcome(eager: Any, sdpa: Any, ours: Any, scenario: Scenario, causal: bool) -> Row:
    try:
        torch.manual_seed(5)
        expected = scenario.run(eager)
    except Exception as e:
        return {"outcome": "not run", "detail": f"by eager: {_line(e)}"}
    before = sum(r.calls for r in attention.runs(ours))
    try:
        torch.manual_seed(5)
        found = scenario.run(ours)
    except REFUSALS as e:
        return {"outcome": "refused", "detail": _line(e)}
    except Exception as e:
        return {"outcome": "broken", "detail": _line(e)}
    calls = sum(r.calls for r in attention.runs(ours)) - before
    rel = compare(expected, found, scenario, causal)
    if rel > TOLERANCE and sdpa is not None and scenario.tokens is not None:
        # rows without a key: eager takes the mean of all, PyTorch's attention gives zeros
        torch.manual_seed(5)
        rel = min(rel, compare(scenario.run(sdpa), found, scenario, causal=False))
    outcome = "agrees" if rel <= TOLERANCE else "differs"
    return {"outcome": outcome, "rel": float(f"{rel:.2g}"), "calls": calls}


def sweep_family(model_type: str) -> list[Row]:
    """The rows of the first class of a family that can be built and run, the one with a head before its base."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {SECONDS} s of the processor")

    # the process's own time: on a busy machine it passes more slowly than the clock's
    signal.signal(signal.SIGPROF, stop)
    rows: list[Row] = []
    try:
        tasks = tiny.classes(model_type)
    except Exception as e:
        return [{"family": model_type, "class": "", "scenario": "build", "outcome": "not built", "detail": _line(e)}]
    for task in [t for t in tasks if t != "base"][:1] + [t for t in tasks if t == "base"]:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            rows += sweep_class(model_type, task)
        except Exception as e:
            name = tasks[task].__name__
            rows.append(
                {"family": model_type, "class": name, "scenario": "build", "outcome": "not built", "detail": _line(e)}
            )
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return rows


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def quiet() -> None:
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--family", action="append")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("-v", action="store_true")
    options = parser.parse_args()
    families = options.family or sorted(CONFIG_MAPPING_NAMES)[:: options.every]
    rows: list[Row] = []
    if options.workers == 1 or len(families) == 1:
        quiet()
        found: Any = map(sweep_family, families)
    else:
        pool = multiprocessing.get_context("spawn").Pool(options.workers, initializer=quiet, maxtasksperchild=30)
        found = pool.imap(sweep_family, families)
    record = options.record and options.record.open("w", buffering=1)
    for some in found:
        rows += some
        if record:
            record.writelines(json.dumps(row) + "\n" for row in some)
        for row in some:
            if options.v or row["outcome"] in ("differs", "broken"):
                say(json.dumps(row))
    say(f"{dict(Counter(r['outcome'] for r in rows))} of {len({r['family'] for r in rows})} families")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
