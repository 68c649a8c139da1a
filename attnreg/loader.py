"""Loads registries from files, imports kernel modules, and defines `select`, which uses both."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from attnreg.compile.cache import cached
from attnreg.compile.inputs.bundled import bundled_registries as bundled_registries
from attnreg.compile.inputs.bundled import bundled_source, help_for_registry, release_name, source_text
from attnreg.compile.inputs.plugins import Plugin, broken, choose, installed_plugins
from attnreg.contract import missing_functions
from attnreg.environment import PLUGINS_VARIABLE, REGISTRY_VARIABLE, environment_problems
from attnreg.errors import LeftOut, Location, Problem, RegistryError, RequestError, VersionError, in_words, shown
from attnreg.errors import RegistryWarning as RegistryWarning
from attnreg.locks import ForkSafeLock
from attnreg.packages.installed import installed_version
from attnreg.registry import Registry, Variant

# modules that read and compile are imported only for a registry that is not cached: they take most of a cold command
if TYPE_CHECKING:
    from attnreg.compile.inputs.reading import Overlay, Reading
    from attnreg.language.matchers import Requirement
    from attnreg.platforms import Platform
    from attnreg.request import AttentionRequest
    from attnreg.selection.trace import Selection


def load_registry(
    source: str | os.PathLike[str] | None = None,
    overlays: Overlay | Sequence[Overlay] = (),
    *,
    trust: Iterable[str] = (),
    plugins: Iterable[str] | None = None,
    allow_outside: bool = False,
) -> Registry:
    """The registry that a source names, changed by overlays in the order given.

    - source: the name of a bundled registry (`bundled_registries`), a directory with backends.yaml and priorities.yaml,
      or an overlay file, whose ``extends`` names its registry. None: ``$ATTNREG_REGISTRY``, else the default.
    - overlays: one or more files, or mappings of the same form; a later one may change an earlier one's data. An
      overlay with ``extends`` fits that registry only; without a source, that registry is the source.
    - trust: top-level packages outside attnreg that a row's ``module`` may belong to.
    - allow_outside: let overlays extend files outside their own directory. By default they may not, because the author
      of an overlay may be unknown.
    - plugins: the names of the plugins that may take part. None: those in ``$ATTNREG_PLUGINS``, else all. A plugin is a
      package with an entry point ``attnreg.registries``; its overlay is added to the bundled registries that it
      extends. A broken plugin is left out, with a `RegistryWarning`; ``Registry.left_out`` has its problems.

    Raises `RegistryError` with every problem of every other file, each with its location and a cure. Raises TypeError
    for an argument of a wrong type.
    """
    several = _checked(source, overlays, trust=trust, plugins=plugins)
    registry = _load(source, several, trust, plugins, allow_outside)
    for problem in registry.plugin_problems:
        warnings.warn(problem, RegistryWarning, stacklevel=2)
    return registry


def _checked(source: object, overlays: object, **names: object) -> list[Overlay]:
    """The overlays as a list. Raises TypeError for an argument of `load_registry` of a wrong type."""
    path = (str, bytes, os.PathLike)
    if source is not None and not isinstance(source, path):
        raise TypeError(f"source is {source!r}; expected the name of a bundled registry, or a path")
    listed = isinstance(overlays, Iterable) and not isinstance(overlays, (*path, Mapping))
    several: list[Any] = [*cast(Iterable[Any], overlays)] if listed else [overlays]
    for overlay in several:
        if not isinstance(overlay, (*path, Mapping)):
            raise TypeError(f"overlays names {overlay!r}; expected paths, or mappings of the form of such a file")
    for name, value in names.items():
        if value is not None and not isinstance(value, Iterable):
            raise TypeError(f"{name} is {value!r}; expected names, for example ['acme']")
    return several


@contextmanager
def _without_collection() -> Iterator[None]:
    """Turns garbage collection off: compiling a registry makes no garbage, and the search takes up to a third of it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@_without_collection()
def _load(
    source: str | os.PathLike[str] | None,
    overlays: Sequence[Overlay],
    trust: Iterable[str],
    names: Iterable[str] | None,
    allow_outside: bool = False,
) -> Registry:
    """`load_registry` without its warnings."""
    trusted = frozenset({trust} if isinstance(trust, str) else trust)
    installed, unreadable = installed_plugins()
    plugins, left_out = choose(installed, names, os.environ)
    # unreadable plugins have no names, so they only count if all plugins take part
    left_out += unreadable if names is None and not os.environ.get(PLUGINS_VARIABLE) else []
    name = None if overlays or plugins or trusted else _bundled(source)
    if name is not None:
        registry = cached(name, lambda: replace(_compiled(name, (), trusted, [], left_out), left_out=()))
        return replace(registry, left_out=tuple(left_out)) if left_out else registry
    return _compiled(source, overlays, trusted, plugins, left_out, allow_outside)


def _bundled(source: str | os.PathLike[str] | None) -> str | None:
    """The name of the bundled registry that a source names; None for any other source."""
    name = release_name(os.environ.get(REGISTRY_VARIABLE) or "default" if source is None else source_text(source))
    return name if name in bundled_registries() else None


def _compiled(
    source: str | os.PathLike[str] | None,
    overlays: Sequence[Overlay],
    trusted: frozenset[str],
    plugins: list[Plugin],
    left_out: list[LeftOut],
    allow_outside: bool = False,
) -> Registry:
    """A registry, compiled from its files; plugins that prevent compilation are added to ``left_out``."""
    from attnreg.compile.inputs.reading import Reading

    reading = Reading(set(trusted), plugins, allow_outside)
    reading.parts.left_out += [plugin.text for plugin in left_out]
    try:
        registry = _read(reading, source, overlays)
    # any exception: a plugin's data may trigger a fault of attnreg itself, which must not stop everything
    except Exception:
        if reading.extended is None or not plugins:
            raise
        plugins, broken_ones = _sound(reading.extended, plugins, trusted)
        left_out += broken_ones
        reading = Reading(set(trusted), plugins, allow_outside)
        reading.parts.left_out += [plugin.text for plugin in left_out]
        registry = _read(reading, source, overlays)
    return replace(registry, left_out=tuple(left_out))


def _read(reading: Reading, source: str | os.PathLike[str] | None, overlays: Sequence[Overlay]) -> Registry:
    laid = [overlay for o in overlays if (overlay := reading.open(o)) is not None]
    if source is not None:
        reading.add_source(source_text(source))
    elif named := os.environ.get(REGISTRY_VARIABLE):
        reading.add_source(named, f"; ${REGISTRY_VARIABLE} names it")
    else:
        base = [overlay for overlay in laid if overlay.extends is not None][:1]
        reading.add_source((base[0].extends if base else None) or "default", above=tuple(base))
    for overlay in laid:
        reading.add_overlay(overlay)
    return reading.compile()


def _sound(bundled: str, plugins: Sequence[Plugin], trusted: frozenset[str]) -> tuple[list[Plugin], list[LeftOut]]:
    """The plugins with which a bundled registry compiles, added one by one, and those with which it does not."""
    from attnreg.compile.inputs.reading import Reading

    _read(Reading(set(trusted)), bundled, ())
    sound: list[Plugin] = []
    broken_ones: list[LeftOut] = []
    for plugin in plugins:
        reading = Reading(set(trusted), [*sound, plugin])
        reading.parts.left_out += [other.text for other in broken_ones]
        try:
            _read(reading, bundled, ())
        except RegistryError as e:
            broken_ones.append(broken(plugin.name, e.problems))
        except Exception as e:
            problem = Problem(Location(plugin.label, 1, 1), f"it cannot be read: {type(e).__name__}: {e}")
            broken_ones.append(broken(plugin.name, [problem]))
        else:
            sound.append(plugin)
    return sound, broken_ones


_default: Registry | None = None
_lock = ForkSafeLock()


def default_registry() -> Registry:
    """The registry that `select` uses by default. The first call loads it and warns about variables without effect."""
    global _default
    if _default is None:
        with _lock:
            if _default is None:
                _default = _load(None, (), (), None)
                problems = [*environment_problems(os.environ, _default.vocabulary), *_default.plugin_problems]
                # after the assignment, so that a warning that is turned into an error is raised only once
                for message in problems:
                    warnings.warn(message, RegistryWarning, stacklevel=3)
    return _default


_named_registries: dict[str, Registry] = {}


def registry_of(registry: Registry | str | None) -> Registry:
    """A registry, the bundled one of a name such as ``vllm-0.33``, or the default one for None.

    A name is loaded once. Raises `RequestError` for a name that no bundled registry has.
    """
    if registry is None:
        return default_registry()
    # any object may come, also one whose class cannot be read
    if type(registry) is not str:
        return cast(Registry, registry)
    if bundled_source(registry) is None:
        help_ = f"{help_for_registry(registry)}; load_registry loads a directory or an overlay"
        raise RequestError(f"registry is {shown(registry)}; no bundled registry has that name", help_)
    with _lock:
        if registry not in _named_registries:
            _named_registries[registry] = load_registry(registry)
    return _named_registries[registry]


def select(
    request: AttentionRequest,
    platform: Platform | str,
    registry: Registry | str | None = None,
    backend: str | None = None,
    *,
    to_run: bool = False,
) -> Selection:
    """The backend for one layer on one platform, with the verdict on every candidate.

    Every candidate of the first order that applies is evaluated completely. The first that serves the request natively
    is chosen, else the first that accepts it by emulating a feature. ``backend`` names the only backend to evaluate, or
    one variant of it (``FLASH_ATTN/FA3``); only a fallback of the registry can choose another one. With ``to_run`` the
    kernel module must load here, too. It is imported in this process, so an import that hangs or crashes affects the
    whole process. `attnreg doctor` tries each import in a child process.

    ``platform`` may be a name alone, such as ``H100``, and ``registry`` the name of a bundled registry: ``vllm-0.33``.

    Deterministic, thread-safe and without side effects; the registry caches selections.

    Raises `NoBackendError` (the trace as ``.selection``) if no backend is valid, and `RequestError` for a word that the
    registry does not know.
    """
    # imported here, because loading a registry needs neither: they take a third of the time to import the loader
    from attnreg.selection.refusal import NoBackendError
    from attnreg.selection.selector import evaluate

    if type(to_run) is not bool:
        raise RequestError(f"to_run is {shown(to_run)}; expected True or False")
    # called here, so that its warning names the line of the caller
    registry = default_registry() if registry is None else registry_of(registry)
    if type(platform) is str:
        from attnreg.platforms import Platform

        platform = Platform(platform)
    where = cast("Platform", platform)
    selection = evaluate(request, where, registry, backend, unloadable=unloadable if to_run else None)
    if selection.backend is None:
        raise NoBackendError(selection)
    return selection


def load_kernel(registry: Registry, backend: str) -> ModuleType:
    """The kernel module of a backend, imported. Raises ImportError with the reason if it cannot be imported.

    backend: the name of a row or of one variant (``FLASH_ATTN/FA3``); for a row the first variant counts. The module
    has every function of the contract (`attnreg.contract.FUNCTIONS`). `VersionError`, a subclass of ImportError, names
    the installed versions that the module does not fit.
    """
    row = registry.row(backend)
    assert row is not None, backend
    name = row.variants[0].module
    if name is None:
        raise ImportError(f"{backend} has no kernel module in {registry.title}: the row is knowledge only")
    if not registry.imports:
        raise ImportError(f"{backend} is served by {name} of another engine; {registry.title} imports nothing")
    # a module in sys.modules may still be importing in another thread; importlib waits for it
    module = _imported(name) if name in sys.modules else _fitting(name, backend, row.variants[0], registry)
    missing = missing_functions(module)
    if missing:
        raise ImportError(f"{name}, the kernel module of {backend}, has no {', '.join(missing)}")
    return module


def unloadable(registry: Registry, backend: str) -> str:
    """Why the kernel module of a backend cannot be run here; "" if it can. It imports the module."""
    try:
        load_kernel(registry, backend)
    # the import of a kernel module may raise anything; the text of the exception is the reason
    except Exception as e:
        return f"cannot be run: {in_words(e)}"
    return ""


def _fitting(name: str, backend: str, variant: Variant, registry: Registry) -> ModuleType:
    """The kernel module of a variant, imported after a check of the installed packages' versions."""
    needs = {r for clause in variant.requires.clauses if clause.facet == "packages" for r in clause.matcher.mentions}
    words = registry.vocabulary.packages
    versions = {r.package: version for r in needs if (version := installed_version(words[r.package]))}
    unmet = [r for r in needs if r.package in versions and not r.met_by(tuple(versions.items()))]
    if unmet:
        wanted, there = (", ".join(sorted(texts)) for texts in (map(str, unmet), _named(versions, unmet)))
        raise VersionError(f"{backend} needs {wanted}; installed is {there}")
    try:
        return _imported(name)
    # another version of a package has moved a name; an adapter's own exception type has a better message
    except (AttributeError, ImportError) as e:
        if type(e) not in (AttributeError, ImportError) or not versions:
            raise
        there = ", ".join(sorted(_named(versions, needs)))
        raise VersionError(f"{name} does not fit {there}: {in_words(e)}") from e


def _named(versions: Mapping[str, str], needs: Iterable[Requirement]) -> set[str]:
    return {f"{r.package} {versions[r.package]}" for r in needs if r.package in versions}


def _imported(name: str) -> ModuleType:
    """A module by its name. If its import tries to end the process, it raises ImportError instead."""
    try:
        return importlib.import_module(name)
    except BaseException as e:
        # the user may install a package before the next try
        importlib.invalidate_caches()
        if isinstance(e, Exception) or (isinstance(e, KeyboardInterrupt) and not _is_raised_by_code(e)):
            raise
        raise ImportError(f"the import of {name} ended in {in_words(e)}") from e


def _is_raised_by_code(error: BaseException) -> bool:
    """Whether a statement of a module raised the error, not a signal such as that of Ctrl-C."""
    import dis

    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
