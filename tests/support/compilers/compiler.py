"""A process that compiles kernels for many tests, because importing torch and Triton takes longer than some kernels.

The tests cannot compile themselves: a kernel module that was imported for Triton's interpreter cannot be compiled.
"""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from support.compilers import compiling
from support.compilers.compiled import Facts
from support.compilers.compiling import Case, Usage
from support.compilers.gluon import LatentCase

# without line numbers, so that equal instructions are equal text
_ENVIRONMENT = {"TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1"}
# choices of another assembler, which gives other machine code. FlashInfer makes one for the process that imports it
_CHOICES = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")


class CompileError(Exception):
    """The traceback of an error in the compiling process."""


class Compiler:
    """A process that compiles. It starts with the first call.

    causal_only: cut out the attention kernel's path for batches that are not causal.
    """

    def __init__(self, *, causal_only: bool = False) -> None:
        self.causal_only = causal_only
        self._pool: ProcessPoolExecutor | None = None

    def usages(self, cases: tuple[Case, ...], target: str) -> list[Usage]:
        """The resources that each kernel of some cases uses."""
        usages: list[Usage] = self._run(_usages, cases, target)
        return usages

    def latent_facts(self, cases: tuple[LatentCase, ...]) -> list[tuple[str, Facts]]:
        """The name of the case and what MLA's decode kernel in Gluon uses, for each launch of some cases."""
        usages: list[tuple[str, Facts]] = self._run(_latent_facts, cases)
        return usages

    def digests(self, target: str) -> list[tuple[str, str, str]]:
        """The result of `causal_only.digests` for a target."""
        digests: list[tuple[str, str, str]] = self._run(_digests, target)
        return digests

    def recorded_and_measured(self, target: str, every: int) -> list[tuple[str, Facts | None, Facts | None]]:
        """For each kernel of the suite's cases its name, what the record has, and the facts of one in ``every``."""
        found: list[tuple[str, Facts | None, Facts | None]] = self._run(_recorded_and_measured, target, every)
        return found

    def launches(self) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]], int]:
        """The result of `fake_driver.launches`."""
        launches: tuple[list[tuple[Any, ...]], list[tuple[Any, ...]], int] = self._run(_launches)
        return launches

    def compiled_for_addresses(self, odds: list[tuple[str, ...]]) -> list[int]:
        """The result of `fake_driver.compiled_for_addresses`."""
        counts: list[int] = self._run(_compiled_for_addresses, odds)
        return counts

    def compiled_for_lengths(self, lengths: list[int]) -> list[int]:
        """The result of `fake_driver.compiled_for_lengths`."""
        counts: list[int] = self._run(_compiled_for_lengths, lengths)
        return counts

    def compiled_for_types(self, kv_dtypes: list[str]) -> list[list[str]]:
        """The result of `fake_driver.compiled_for_types`."""
        kernels: list[list[str]] = self._run(_compiled_for_types, kv_dtypes)
        return kernels

    def call(self, module: str, function: str, *arguments: Any) -> Any:
        """The result of a function of a module of `support` in that process."""
        return self._run(_by_name, module, function, arguments)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, get_context("spawn"), _begin, (self.causal_only,))
        try:
            found, error = self._pool.submit(_call, function, arguments).result()
        except BrokenProcessPool as e:
            # a compiler may crash: the next call starts a new process
            self.close()
            raise CompileError(f"the process that compiles ended: {e}") from None
        if error:
            raise CompileError(error)
        return found


def prepare_environment() -> None:
    """Sets the variables of a process that compiles, and drops those that choose another assembler than Triton's."""
    os.environ |= _ENVIRONMENT
    for name in _CHOICES:
        os.environ.pop(name, None)


def assemblers() -> list[str]:
    """The paths of the assemblers that Triton takes in this process for SM 8.0 and for SM 10.0."""
    from triton.backends.nvidia.compiler import get_ptxas

    return [str(get_ptxas(arch).path) for arch in (80, 100)]


def _begin(causal_only: bool) -> None:
    prepare_environment()
    if causal_only:
        from support.compilers import causal_only as module

        module.cut()


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, str]:
    """The result, or the traceback as text, because not every exception of a compiler can be pickled."""
    try:
        return function(*arguments), ""
    except Exception:
        return None, traceback.format_exc()[-3000:]


def _usages(cases: tuple[Case, ...], target: str) -> list[Usage]:
    return [usage for case in cases for usage in compiling.compile_case(case, target)]


def _latent_facts(cases: tuple[LatentCase, ...]) -> list[tuple[str, Facts]]:
    from support.compilers import gluon

    return [(case, kernel.facts) for case, kernel in gluon.latent_kernels(cases)]


def _recorded_and_measured(target: str, every: int) -> list[tuple[str, Facts | None, Facts | None]]:
    from support.compilers.compiled import recorded

    kernels = {kernel.key: kernel for kernel in compiling.every_kernel(target)}
    return [
        (kernels[key].source.fn.__name__, recorded().get(key), None if i % every else kernels[key].measured())
        for i, key in enumerate(sorted(kernels))
    ]


def _digests(target: str) -> list[tuple[str, str, str]]:
    from support.compilers import causal_only

    return causal_only.digests(target)


def _launches() -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]], int]:
    from support.compilers import fake_driver

    return fake_driver.launches()


def _compiled_for_addresses(odds: list[tuple[str, ...]]) -> list[int]:
    from support.compilers import fake_driver

    return fake_driver.compiled_for_addresses(odds)


def _compiled_for_lengths(lengths: list[int]) -> list[int]:
    from support.compilers import fake_driver

    return fake_driver.compiled_for_lengths(lengths)


def _compiled_for_types(kv_dtypes: list[str]) -> list[list[str]]:
    from support.compilers import fake_driver

    return fake_driver.compiled_for_types(kv_dtypes)


def _by_name(module: str, function: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(importlib.import_module(f"support.compilers.{module}"), function)(*arguments)
