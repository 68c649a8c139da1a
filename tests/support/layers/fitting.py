"""Launches are of tensors that lie as those which they were bound for: a kernel has their strides as constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from attnreg.kernels.triton.launch import Bound


def spacing_of(constants: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """The strides of a token and of a head of queries and outputs, by pointer, where a kernel's constants have them."""
    found = {}
    for pointer, name in (("query_ptr", "Q"), ("output_ptr", "OUT")):
        if name in constants:
            found[pointer] = constants[name].token, constants[name].head
        elif f"{name}_TOKEN" in constants:
            found[pointer] = constants[f"{name}_TOKEN"], constants[f"{name}_HEAD"]
        elif hasattr(constants.get("C"), f"{name.lower()}_token"):
            found[pointer] = tuple(getattr(constants["C"], f"{name.lower()}_{of}") for of in ("token", "head"))
    return found


@pytest.fixture(autouse=True)
def launches_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch has queries and outputs with the strides that its code was made for."""
    launch = Bound.launch

    def fitting(bound: Bound, tensors: Any, *others: Any, **more: Any) -> None:
        given = dict(zip(bound.variant.function.arg_names, tensors, strict=False))
        for pointer, strides in spacing_of(bound.variant.code.constants(bound.key)).items():
            x = given.get(pointer)
            if isinstance(x, Tensor) and x.dim() == 3:
                apart = zip(x.shape, x.stride(), strides, strict=False)
                assert all(size < 2 or has == bound_for for size, has, bound_for in apart), (
                    pointer,
                    x.stride(),
                    strides,
                )
        launch(bound, tensors, *others, **more)

    monkeypatch.setattr(Bound, "launch", fitting)
