"""The stand-ins for SGLang have no name that the record of its interfaces lacks."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from typing import Any

import pytest
from support.stand_ins import sglang_modules as stand_ins

from attnreg.integrations.interfaces import differences
from attnreg.integrations.sglang.record import NEEDED, RECORD

# what the record has of a class: its names, or the parameters of its methods
PLACES = {name: place for place in {**NEEDED, **RECORD} if (name := place[1])}
# names of SGLang's mix-in for DeepSeek's models
OTHERS = {"ForwardBatch": {"mha_return_lse"}}


def names(cls: Any) -> set[str]:
    if dataclasses.is_dataclass(cls):
        return {f.name for f in dataclasses.fields(cls)}
    if issubclass(cls, enum.Enum):
        return set(cls.__members__)
    return {name for name in vars(cls) if not name.startswith("_")}


@pytest.mark.parametrize(
    "cls", [stand_ins.AttentionBackend, stand_ins.ForwardBatch, stand_ins.ForwardMode, stand_ins.AttentionType,
            stand_ins.SharedReadEnds, stand_ins.IdSpaceKind, stand_ins.KVWriteLoc, stand_ins.EagleVerifyInput],
)  # fmt: skip
def test_stand_ins_have_names_of_sglangs(cls: type) -> None:
    known = {**NEEDED, **RECORD}[PLACES[cls.__name__]].split()
    assert names(cls) - set(known) - OTHERS.get(cls.__name__, set()) == set()


@pytest.mark.parametrize(
    "name", ["RadixAttention.__init__", "KVWriteLoc.for_batch", "AttentionBackend.forward", "SWAKVPool.set_kv_buffer",
             "MHATokenToKVPool.set_kv_buffer", "MLATokenToKVPool.set_kv_buffer", "HybridLinearKVPool.set_kv_buffer"],
)  # fmt: skip
def test_their_functions_take_parameters_of_sglangs(name: str) -> None:
    cls, method = name.split(".")
    parameters = inspect.signature(getattr(getattr(stand_ins, cls), method)).parameters
    known = RECORD[PLACES[name]].split()
    assert {p for p in parameters if parameters[p].kind is not inspect.Parameter.VAR_POSITIONAL} <= {*known, "scales"}


def test_the_stand_ins_differ_from_the_record_by_what_they_lack(
    sglang: stand_ins.Context,
) -> None:
    found = [*differences({PLACES["ForwardBatch"]: RECORD[PLACES["ForwardBatch"]]}, {})]
    assert len(found) == 1
    assert "has no input_ids" in found[0]
    assert "now has mha_return_lse" in found[0]
    gone = [*differences({("sglang.srt.nowhere", "Thing"): "a"}, {("sglang.srt.runtime_context", ""): "get_nothing"})]
    assert gone[0].startswith("sglang.srt.nowhere.Thing is gone")
    assert gone[1] == "sglang.srt.runtime_context has no get_nothing"
