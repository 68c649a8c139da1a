"""What attnreg uses of PyTorch's inside, and what it relies on there, as the releases had it that were read.

None of it is documented, so a release may change it without a word. Each test below shows one thing that is relied on.
"""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from support import ROOT
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_map

# the releases whose source was read: the Python code, and the stubs of what is compiled
READ = ("2.11", "2.13", "2.14", "2.15")
# interface -> the modules of attnreg that use it, and what they rely on
INSIDE: dict[str, tuple[tuple[str, ...], str]] = {
    "torch._C._dynamo.guards.TensorGuards": (
        ("runtime/tensors.py",),
        "check(*tensors) compares dtype, device, sizes and strides; None is a size or stride that is free",
    ),
    "torch._C._TorchDispatchModeKey": (("runtime/tensors.py",), "PROXY and FAKE are the modes that trace"),
    "torch._C._get_dispatch_mode": (("runtime/tensors.py",), "the mode of a key that is on, else None"),
    "_len_torch_dispatch_stack_pre_dispatch": (
        ("runtime/tensors.py",),
        "above 0 where operations are recorded before they are dispatched",
    ),
    "is_in_torch_dispatch_mode": (
        ("runtime/tensors.py", "runtime/states/merge.py", "runtime/ops.py", "runtime/validation.py"),
        "true within any dispatch mode, tracing included",
    ),
    "FakeTensor": (
        ("runtime/tensors.py", "runtime/arguments.py", "runtime/validation.py"),
        "the class of tensors without memory",
    ),
    "forward_ad._current_level": (
        (
            "runtime/tensors.py",
            "runtime/arguments.py",
            "runtime/validation.py",
            "integrations/tensors.py",
            "integrations/transformers/latent/modules.py",
        ),
        "-1 outside forward mode, at least 0 within",
    ),
    "torch._C._functorch.peek_interpreter_stack": (
        ("runtime/validation.py", "integrations/transformers/latent/modules.py"),
        "None outside torch.func",
    ),
    "torch._C._AutoDispatchBelowAutograd": (("runtime/validation.py",), "a context in which autograd is passed by"),
    "torch._C._cuda_getDevice": (("kernels/triton/launch.py",), "the current device, where torch has CUDA"),
    "torch._C._is_any_autocast_enabled": (("integrations/tensors.py",), "whether autocast is on for any device"),
    "torch._C._get_tracing_state": (("integrations/tensors.py",), "None outside torch.jit.trace"),
    "torch._C._len_torch_function_stack": (
        ("integrations/transformers/latent/modules.py",),
        "how many modes of torch functions are on; a default device is one",
    ),
    "DeviceContext": (("integrations/transformers/latent/modules.py",), "the mode of a default device"),
    "torch.utils._pytree": (
        (
            "integrations/transformers/masks.py",
            "integrations/transformers/latent/lazy.py",
            "integrations/transformers/forms/stand_ins.py",
        ),
        "tree_flatten and tree_map reach the tensors in lists, tuples and dicts",
    ),
    "torch._dynamo.config": (("kernels/flex_attention.py",), "patch(recompile_limit=...) raises the limit for a while"),
    "torch._dynamo.exc": (("conformance/tools.py",), "the module of the compiler's errors, by its name"),
    "torch.cuda._sleep": (("tuning/stopwatch.py",), "has the GPU wait for a number of its clocks"),
    'getattr(os.environ, "_data"': (
        ("runtime/validation.py",),
        "Python's: the bytes of each variable, which cost less to look up",
    ),
}
# what stands for a use that is of one of these
_USE = re.compile(
    r"torch\._C\.(?!_dynamo\b)\w+(?:\.peek_interpreter_stack)?|torch\._dynamo\.\w+|torch\.cuda\._\w+"
    r"|torch\.(?:utils\.)?_\w+ import|forward_ad\._\w+"
)
PLACES = sorted({place for places, _ in INSIDE.values() for place in places})
_LOOK = (
    "PyTorch's inside was read for {read}, and {here} is installed. Read again in its source what follows, run these "
    "tests, and name the release in READ here:\n{what}"
)


def test_it_was_read_for_the_torch_that_is_installed() -> None:
    here = Version(torch.__version__)
    what = "\n".join(f"- {name}, for {', '.join(places)}: {relied}" for name, (places, relied) in INSIDE.items())
    read = f"{here.major}.{here.minor}" in READ
    assert read, _LOOK.format(read=", ".join(READ), here=torch.__version__, what=what)
    assert [*READ] == sorted(READ, key=Version)


def test_each_use_is_listed() -> None:
    """Each interface stands in the modules that it is listed for, and no other module reaches into PyTorch."""
    package = ROOT / "attnreg"
    for name, (places, _) in INSIDE.items():
        for place in places:
            text = (package / place).read_text(encoding="utf-8")
            parent, _, last = name.rpartition(".")
            assert name in text or (last in text and (not parent or parent.rpartition(".")[2] in text)), (name, place)
    users = {str(file.relative_to(package)) for file in package.rglob("*.py") if _USE.search("\n".join(_code(file)))}
    assert users <= set(PLACES)


def _code(file: Path) -> list[str]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return [line.partition(" # ")[0] for line in lines if not line.lstrip().startswith("#")]


def test_guards_of_compiled_inputs_tell_tensors_apart() -> None:
    x, other = torch.zeros(4, 8), torch.zeros(5, 8)
    check = torch._C._dynamo.guards.TensorGuards(x, dynamic_dims_sizes=[[None, 8]], dynamic_dims_strides=[[8, 1]]).check
    assert check(x)
    assert check(other)
    for wrong in (x.half(), torch.zeros(4, 9), torch.zeros(8, 4).T, torch.zeros(4, 8, device="meta")):
        assert not check(wrong)


def test_modes_that_trace_are_seen() -> None:
    keys = torch._C._TorchDispatchModeKey
    seen: list[tuple[bool, bool, bool, int]] = []

    def look() -> None:
        on = [torch._C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FAKE)]
        seen.append((is_in_torch_dispatch_mode(), on[0], on[1], _len_torch_dispatch_stack_pre_dispatch()))

    def traced(x: torch.Tensor) -> torch.Tensor:
        look()
        return x + 1

    look()
    with FakeTensorMode() as mode:
        look()
        assert isinstance(mode.from_tensor(torch.zeros(2)), FakeTensor)
    make_fx(traced)(torch.zeros(2))
    make_fx(traced, pre_dispatch=True)(torch.zeros(2))
    assert seen[0] == (False, False, False, 0)
    assert seen[1] == (True, False, True, 0)
    assert seen[2][:2] == (True, True)
    assert (seen[3][0], seen[3][3] > 0) == (True, True)


def test_forward_mode_has_a_level() -> None:
    assert forward_ad._current_level == -1
    with forward_ad.dual_level():
        assert forward_ad._current_level == 0
    assert forward_ad._current_level == -1


def test_functions_of_torch_func_and_of_traces_are_seen() -> None:
    found: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(torch._C._functorch.peek_interpreter_stack() is not None)
        found.append(torch._C._get_tracing_state() is not None)
        return x + 1

    look(torch.zeros(2))
    torch.func.vmap(look)(torch.zeros(2, 2))
    torch.jit.trace(look, torch.zeros(2), check_trace=False)
    assert found == [False, False, True, False, False, True]


def test_below_autograd_nothing_is_recorded() -> None:
    x = torch.zeros(2, requires_grad=True)
    with torch._C._AutoDispatchBelowAutograd():
        assert not (x + 1).requires_grad
    assert (x + 1).requires_grad


def test_autocast_and_a_default_device_are_seen() -> None:
    assert not torch._C._is_any_autocast_enabled()
    with torch.autocast("cpu"):
        assert torch._C._is_any_autocast_enabled()
    before = torch._C._len_torch_function_stack()
    with DeviceContext(torch.device("cpu")):
        assert torch._C._len_torch_function_stack() == before + 1


def test_trees_reach_every_tensor() -> None:
    x = torch.zeros(2)
    tree: Any = {"a": [x, (x, 3)], "b": None}
    assert sum(leaf is x for leaf in tree_flatten(tree)[0]) == 2
    assert tree_map(lambda leaf: 1 if leaf is x else leaf, tree) == {"a": [1, (1, 3)], "b": None}


@pytest.mark.slow(reason="imports the compiler")
def test_the_compiler_has_its_switches() -> None:
    import torch._dynamo

    assert issubclass(torch._dynamo.exc.TorchDynamoException, RuntimeError)
    before = torch._dynamo.config.recompile_limit
    with torch._dynamo.config.patch(recompile_limit=before + 1):
        assert torch._dynamo.config.recompile_limit == before + 1
    assert torch._dynamo.config.recompile_limit == before


def test_clocks_of_a_gpu_are_a_number() -> None:
    assert [*inspect.signature(torch.cuda._sleep).parameters] == ["cycles"]
    # without CUDA launches ask torch.cuda for the device
    assert callable(getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device))


def test_variables_are_bytes_within(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNREG_INSIDE", "1")
    assert os.environ._data[b"ATTNREG_INSIDE"] == b"1"  # type: ignore[attr-defined]
