"""Kernels are launched by the names of their parameters, and what that relies on in Triton is as it was."""

import inspect
import tomllib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from packaging.requirements import Requirement
from packaging.version import Version
from support import ROOT
from support.compilers.compiler import Compiler

from attnreg.kernels.triton import launch
from attnreg.kernels.triton.attention import _attention_kernel
from attnreg.kernels.triton.cache import _write_kv_kernel
from attnreg.kernels.triton.inside import releases
from attnreg.kernels.triton.inside.launcher import starter
from attnreg.kernels.triton.launch import Kernel
from attnreg.kernels.triton.splits.merge import _merge_shares_kernel, _merge_splits_kernel

LOOK = (
    "Kernels are started as JITFunction.run in Triton's runtime/jit.py does. Compare it in the new release with "
    "attnreg/kernels/triton/inside, run the other tests here and tests/gpu with it, then name it in READ there."
)
STREAM = 7
# what a launcher is called with, before the kernel's own arguments; up to 3.6 these follow without names of their own
LAUNCHER = [
    "self", "gridX", "gridY", "gridZ", "stream", "function", "kernel_metadata", "launch_metadata", "launch_enter_hook",
    "launch_exit_hook", "args",
]  # fmt: skip
UNNAMED = LAUNCHER[:6] + LAUNCHER[10:]


def test_the_launch_path_was_read_for_the_triton_that_is_installed() -> None:
    assert releases.was_read(triton.__version__), f"Triton {triton.__version__} is installed. {LOOK}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (accepted,) = (one for one in map(Requirement, project["optional-dependencies"]["kernels"]) if one.name == "triton")
    # the oldest that is accepted was read too, and nothing before it
    assert accepted.specifier.contains(releases.READ[0])
    assert not accepted.specifier.contains("3.5.9")
    assert [*releases.READ] == sorted(releases.READ, key=Version)


def test_a_triton_that_was_not_read_starts_kernels_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class Compiled:
        """A compiled kernel of which nothing is known but how Triton's users start one."""

        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *args, stream: calls.append((grid, stream, *args))

    following = f"3.{Version(releases.READ[-1]).minor + 1}.0"
    monkeypatch.setattr(triton, "__version__", following)
    assert not releases.was_read(following)
    starter(Compiled(), (1, 2, 3))(STREAM, [64, None], ("constant",))
    assert calls == [((1, 2, 3), STREAM, 64, None, "constant")]


def test_a_release_is_read_whatever_its_patch() -> None:
    assert all(map(releases.was_read, ("3.6.0", "3.7.0", "3.8.4+git5", "3.9.1rc1")))
    assert not any(map(releases.was_read, ("3.5.1", "3.60.0", "4.6.0")))


@pytest.mark.parametrize(("vendor", "launcher"), [("nvidia", "CudaLauncher"), ("amd", "HIPLauncher")])
def test_launchers_take_what_they_took(vendor: str, launcher: str) -> None:
    module = __import__(f"triton.backends.{vendor}.driver", fromlist=[launcher])
    found = list(inspect.signature(getattr(module, launcher).__call__).parameters)
    expected = UNNAMED if triton.__version__.startswith("3.6.") else LAUNCHER
    assert found == expected, f"{launcher} takes {found}. {LOOK}"


def launcher_of(**changes: Any) -> Any:
    """A launcher for CUDA of the installed Triton, with what one of each release that was read has."""
    from triton.backends.nvidia.driver import CudaLauncher

    launcher = object.__new__(CudaLauncher)
    attributes = {
        "launch_cooperative_grid": "cooperative", "launch_pdl": "dependent", "global_scratch_size": 0,
        "global_scratch_align": 1, "profile_scratch_size": 0, "profile_scratch_align": 1, "num_ctas": 1,
    }  # fmt: skip
    release = Version(triton.__version__)
    if release >= Version("3.7"):
        attributes |= {"arg_annotations": "annotations", "kernel_signature": b"signature"}
    if release >= Version("3.8"):
        attributes |= {"gsan_enabled": False}
    vars(launcher).update(attributes | changes)
    return launcher


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that is asked for nothing. From 3.8 on a launcher looks for one first."""
    monkeypatch.setattr(triton.runtime.driver, "_active", object())


@pytest.mark.usefixtures("no_gpu")
def test_a_launcher_that_is_gone_around_would_do_the_same() -> None:
    calls: list[tuple[Any, ...]] = []
    launcher = launcher_of(launch=lambda *arguments: calls.append(arguments))
    compiled = SimpleNamespace(run=launcher, function="function", packed_metadata="metadata")
    launcher(1, 2, 3, STREAM, "function", "metadata", None, None, None, 64, None, "constant")
    starter(compiled, (1, 2, 3))(STREAM, [64, None], ("constant",))
    assert calls[0] == calls[1], LOOK
    # one with scratch memory is not gone around
    launcher.global_scratch_size, launcher.launch = 16, None
    with pytest.raises(RuntimeError, match="allocat"):
        starter(compiled, (1, 2, 3))(STREAM, [64, None], ("constant",))


def test_a_launcher_that_adds_arguments_is_not_gone_around(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    launcher = launcher_of(gsan_enabled=True, launch=None)
    monkeypatch.setattr(type(launcher), "__call__", lambda self, *arguments: calls.append(arguments))
    compiled = SimpleNamespace(run=launcher, function="function", packed_metadata="metadata")
    starter(compiled, (1, 2, 3))(STREAM, [64, None], ("constant",))
    assert calls == [(1, 2, 3, STREAM, "function", "metadata", None, None, None, 64, None, "constant")]


def test_hooks_can_be_seen() -> None:
    # without a profiler nobody listens, and the launch is not described
    assert triton.knobs.runtime.launch_enter_hook.calls == [], LOOK
    assert triton.knobs.runtime.launch_exit_hook.calls == [], LOOK


@pytest.fixture(scope="module")
def launched() -> Iterator[tuple[list[tuple[Any, ...]], list[tuple[Any, ...]], int]]:
    """What a decode launches the first time, through Triton, and the second; and how many kernels were compiled."""
    compiler = Compiler()
    yield compiler.launches()
    compiler.close()


def test_a_launch_hands_over_what_triton_itself_does(launched: Any) -> None:
    first, second, compiled = launched
    assert [name for name, *_ in second] == ["_write_kv_kernel", "_attention_kernel", "_merge_splits_kernel"]
    assert compiled == 3
    # after the kernel's name: the grid, the stream, the function, its metadata; then what hooks are told; then the
    # arguments, where a pointer is a tensor or its address
    about, hooks = slice(1, 7), slice(7, 10)
    for theirs, ours in zip(first, second, strict=True):
        assert theirs[about] == ours[about], LOOK
        assert _kept(theirs, hooks.stop) == _kept(ours, hooks.stop), LOOK
        assert ours[hooks] == (None, None, None)


def test_code_is_shared_by_calls_whose_pointers_are_alike_one_by_one() -> None:
    compiler = Compiler()
    odds: list[tuple[str, ...]] = [
        (),
        ("query",),
        ("output",),
        ("query",),
        (),
        ("key",),
        ("cache",),
        ("query", "output"),
    ]
    # the write, the attention and the merge; then those among whose pointers there is one that differs from all before
    assert compiler.compiled_for_addresses(odds) == [3, 1, 2, 0, 0, 1, 2, 1]
    compiler.close()


def test_code_is_shared_by_caches_of_any_length() -> None:
    # a cache that grows by concatenation moves its heads further apart with each token
    compiler = Compiler()
    assert compiler.compiled_for_lengths([33, 34, 50]) == [2, 0, 0]
    compiler.close()


def test_code_is_not_shared_by_caches_of_other_types() -> None:
    # where it was, a cache of bfloat16 was read as float16, if a layer with one of float16 had run before
    compiler = Compiler()
    found = compiler.compiled_for_types(["auto", "bfloat16", "auto", "float16", "bfloat16"])
    both = ["_write_kv_kernel", "_latent_attention_kernel"]
    assert found == [both, both, [], [], []]
    compiler.close()


def test_code_is_not_shared_by_tensors_of_other_types(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = Kernel(_fill_kernel).variant(torch.device("cpu"), Code())
    compiled: list[Any] = []
    monkeypatch.setattr(variant, "compile", lambda key, facts, grid, values: compiled.append(facts))
    for dtype in (torch.int32, torch.int64, torch.int32):
        variant.launch((("BLOCK", 8),), (1, 1, 1), to_ptr=torch.zeros(8, dtype=dtype), length=8, value=1)
    assert compiled[0] == compiled[2] != compiled[1]


def test_code_for_amd_is_shared_by_memory_that_offsets_of_32_bits_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_AMD", True)
    variant = Kernel(_fill_kernel).variant(torch.device("meta"), Code())
    near, far = (torch.empty(n, dtype=torch.int8, device="meta") for n in (2**31 - 1, 2**31))
    facts = [variant.pointer_facts([x]) for x in (near, far, far[:8], None)]
    assert facts[0] != facts[1]
    assert facts[1][-1:] == facts[2][-1:] == facts[3][-1:]


def _kept(call: tuple[Any, ...], first: int) -> list[Any]:
    """The arguments of a launch, less the parts of split keys: each call has memory of its own for them."""
    kernel, *_ = call
    functions = (_write_kv_kernel, _attention_kernel, _merge_splits_kernel)
    names = next(function.arg_names for function in functions if function.__name__ == kernel)
    return [x for x, name in zip(call[first:], names, strict=True) if not name.startswith("partial")]


@pytest.mark.parametrize("function", [_attention_kernel, _merge_splits_kernel, _merge_shares_kernel, _write_kv_kernel])
def test_constants_are_the_last_parameters_and_in_capitals(function: Any) -> None:
    constants = [name for name in function.arg_names if function.fn.__annotations__.get(name) is tl.constexpr]
    assert constants == [name for name in function.arg_names if name.isupper()]
    assert function.arg_names[-len(constants) :] == constants


@triton.jit
def _fill_kernel(to_ptr, length, value, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to_ptr + offs, offs * 0 + value, mask=offs < length)


class Code:
    """Constants as a key says."""

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": 1}

    def constants(self, key: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
        return dict(key)


def fill(constants: dict[str, Any], **values: int) -> torch.Tensor:
    """A row of eight numbers, filled in Triton's interpreter."""
    to = torch.zeros(8, dtype=torch.int32)
    variant = Kernel(_fill_kernel).variant(torch.device("cpu"), Code())
    variant.launch(tuple(constants.items()), (1, 1, 1), **values, to_ptr=to)
    return to


@pytest.mark.skipif(isinstance(_fill_kernel, triton.JITFunction), reason="needs Triton's interpreter")
def test_values_are_given_by_name_in_any_order() -> None:
    assert fill({"BLOCK": 8}, length=6, value=3).tolist() == [3] * 6 + [0, 0]
    assert fill({"BLOCK": 8}, value=3, length=6).tolist() == [3] * 6 + [0, 0]


@pytest.mark.parametrize(
    ("values", "given"), [({"length": 6}, "length, to_ptr"), ({"length": 6, "value": 3, "size": 1}, "length, value, ")]
)
def test_values_that_a_kernel_does_not_take_are_an_error_before_the_launch(values: dict[str, int], given: str) -> None:
    with pytest.raises(TypeError, match=f"_fill_kernel takes to_ptr, length, value; given {given}"):
        fill({"BLOCK": 8}, **values)


@pytest.mark.parametrize(("constants", "given"), [({}, ""), ({"BLOCK": 8, "STEP": 1}, "BLOCK, STEP")])
def test_wrong_constants_are_an_error_before_the_launch(constants: Any, given: str) -> None:
    with pytest.raises(TypeError, match=f"_fill_kernel takes BLOCK; given {given}$"):
        fill(constants, length=6, value=3)


@triton.jit
def _late_pointer_kernel(length, to_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    tl.store(to_ptr + tl.arange(0, BLOCK), length)


def test_kernels_take_their_pointers_first() -> None:
    with pytest.raises(TypeError, match="_late_pointer_kernel must take its pointers first"):
        Kernel(_late_pointer_kernel)


@triton.jit
def _copy_kernel(to_ptr, from_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    tl.store(to_ptr + tl.arange(0, BLOCK), tl.load(from_ptr + tl.arange(0, BLOCK)))


def test_plans_know_the_pointers_in_the_kernels_order() -> None:
    Kernel(_copy_kernel, ("to_ptr", "from_ptr"))
    with pytest.raises(TypeError, match=r"_copy_kernel takes to_ptr, from_ptr; given from_ptr, to_ptr$"):
        Kernel(_copy_kernel, ("from_ptr", "to_ptr"))
