"""What selection is given: a registry, loaded from its files, and kernel modules, imported; and `select` over both."""

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

from attnreg.compile.cache import kept
from attnreg.compile.inputs.bundled import bundled_registries as bundled_registries
from attnreg.compile.inputs.bundled import release_name, source_text
from attnreg.compile.inputs.plugins import Plugin, broken, choose, installed_plugins
from attnreg.contract import missing_functions
from attnreg.environment import PLUGINS_VARIABLE, REGISTRY_VARIABLE, environment_problems
from attnreg.errors import LeftOut, Location, Problem, RegistryError, RequestError, VersionError, in_words, shown
from attnreg.errors import RegistryWarning as RegistryWarning
from attnreg.locks import ForkSafeLock
from attnreg.packages.installed import installed_version
from attnreg.registry import Registry, Variant
from attnreg.selection.refusal import NoBackendError
from attnreg.selection.selector import evaluate

# what reads and compiles is imported where a registry is not kept: it takes longer than all else of a cold command
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

    source: None for ``$ATTNREG_REGISTRY`` or else the default; the name of a bundled registry (`bundled_registries`); a
    directory that holds backends.yaml and priorities.yaml; or an overlay file, which names what it ``extends``.
    overlays: one or more files, or mappings of the same form; a later one may change what an earlier one states. One
    that ``extends`` a registry is laid over that one only; without a source, that one is the source. trust: top-level
    packages outside attnreg from which a row's ``module`` may come. allow_outside: overlays may extend any file, and
    not only what lies below their own directory: an overlay may be a stranger's.

    Packages that declare an ``attnreg.registries`` entry point add their overlay to the bundled registries that it
    extends. plugins: the names of those that may; None for those in ``$ATTNREG_PLUGINS``, or else all. One that is
    broken is left out, with a `RegistryWarning`; ``Registry.left_out`` has its problems.

    Raises `RegistryError` with every problem of every other file, each with its location and a cure, and TypeError for
    an argument of another kind.
    """
    several = _checked(source, overlays, trust=trust, plugins=plugins)
    registry = _load(source, several, trust, plugins, allow_outside)
    for problem in registry.plugin_problems:
        warnings.warn(problem, RegistryWarning, stacklevel=2)
    return registry


def _checked(source: object, overlays: object, **names: object) -> list[Overlay]:
    """The overlays as a list. Raises TypeError for an argument of `load_registry` that is of another kind."""
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
    """No garbage is looked for: nothing of a registry is any while it is made, and the look takes up to a third."""
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
    # whose names are not known: one that is chosen by name is not among them
    left_out += unreadable if names is None and not os.environ.get(PLUGINS_VARIABLE) else []
    name = None if overlays or plugins or trusted else _bundled(source)
    if name is not None:
        registry = kept(name, lambda: replace(_compiled(name, (), trusted, [], left_out), left_out=()))
        return replace(registry, left_out=tuple(left_out)) if left_out else registry
    return _compiled(source, overlays, trusted, plugins, left_out, allow_outside)


def _bundled(source: str | os.PathLike[str] | None) -> str | None:
    """The name of the bundled registry that a source is; None for any other source."""
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
    """A registry as it is compiled of its files; plugins with which it does not compile join those left out."""
    from attnreg.compile.inputs.reading import Reading

    reading = Reading(set(trusted), plugins, allow_outside)
    reading.parts.left_out += [plugin.text for plugin in left_out]
    try:
        registry = _read(reading, source, overlays)
    # data of another package may show a fault of attnreg's own, and must not take everything down either
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
    """The plugins with which a bundled registry compiles, one after the other, and those with which it does not."""
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
    """The registry that `select` uses by default. The first call loads it and warns of variables without effect."""
    global _default
    if _default is None:
        with _lock:
            if _default is None:
                _default = _load(None, (), (), None)
                problems = [*environment_problems(os.environ, _default.vocabulary), *_default.plugin_problems]
                # after the assignment, so that a warning that is an error is raised only once
                for message in problems:
                    warnings.warn(message, RegistryWarning, stacklevel=3)
    return _default


def select(
    request: AttentionRequest,
    platform: Platform,
    registry: Registry | None = None,
    backend: str | None = None,
    *,
    to_run: bool = False,
) -> Selection:
    """The backend for one layer on one platform, with the verdict on every candidate.

    Every candidate of the first order that applies is evaluated completely. The first that serves the request natively
    is chosen, else the first that accepts it by emulating a feature. ``backend`` names the only backend to evaluate, or
    one variant of it (``FLASH_ATTN/FA3``); no other is chosen in its place, unless a fallback of the registry says so.
    With ``to_run`` the kernel module must load here too. It is imported in this process: an import that hangs or
    crashes takes the process with it. `attnreg doctor` tries each import in a process of its own.

    Deterministic, thread-safe and without side effects; the registry caches selections.

    Raises `NoBackendError` (the trace as ``.selection``) where no backend is valid, `RequestError` for a word that the
    registry does not know.
    """
    if type(to_run) is not bool:
        raise RequestError(f"to_run is {shown(to_run)}; expected True or False")
    registry = default_registry() if registry is None else registry
    selection = evaluate(request, platform, registry, backend, unloadable=unloadable if to_run else None)
    if selection.backend is None:
        raise NoBackendError(selection)
    return selection


def load_kernel(registry: Registry, backend: str) -> ModuleType:
    """The kernel module of a backend, imported. Raises ImportError with the reason where there is none to import.

    backend: a row's name, or that of one variant (``FLASH_ATTN/FA3``); of a row the first variant counts. The module
    has every function of the contract (`attnreg.contract.FUNCTIONS`). `VersionError`, an ImportError too, names the
    installed versions that the module does not fit.
    """
    row = registry.row(backend)
    assert row is not None, backend
    name = row.variants[0].module
    if name is None:
        raise ImportError(f"{backend} has no kernel module in {registry.title}: the row is knowledge only")
    if not registry.imports:
        raise ImportError(f"{backend} is served by {name} of another engine; {registry.title} imports nothing")
    # a module that another thread imports is waited for
    module = _imported(name) if name in sys.modules else _fitting(name, backend, row.variants[0], registry)
    missing = missing_functions(module)
    if missing:
        raise ImportError(f"{name}, the kernel module of {backend}, has no {', '.join(missing)}")
    return module


def unloadable(registry: Registry, backend: str) -> str:
    """Why the kernel module of a backend cannot be run here; "" where it can. The module is imported."""
    try:
        load_kernel(registry, backend)
    # a kernel module may fail to import in any way; each is a reason, with its text
    except Exception as e:
        return f"cannot be run: {in_words(e)}"
    return ""


def _fitting(name: str, backend: str, variant: Variant, registry: Registry) -> ModuleType:
    """The kernel module of a variant, imported beside packages in versions that it fits."""
    needs = {r for clause in variant.requires.clauses if clause.facet == "packages" for r in clause.matcher.mentions}
    words = registry.vocabulary.packages
    versions = {r.package: version for r in needs if (version := installed_version(words[r.package]))}
    unmet = [r for r in needs if r.package in versions and not r.met_by(tuple(versions.items()))]
    if unmet:
        wanted, there = (", ".join(sorted(texts)) for texts in (map(str, unmet), _named(versions, unmet)))
        raise VersionError(f"{backend} needs {wanted}; installed is {there}")
    try:
        return _imported(name)
    # a name that another version of a package has moved; a text of an adapter's own says more
    except (AttributeError, ImportError) as e:
        if type(e) not in (AttributeError, ImportError) or not versions:
            raise
        there = ", ".join(sorted(_named(versions, needs)))
        raise VersionError(f"{name} does not fit {there}: {in_words(e)}") from e


def _named(versions: Mapping[str, str], needs: Iterable[Requirement]) -> set[str]:
    return {f"{r.package} {versions[r.package]}" for r in needs if r.package in versions}


def _imported(name: str) -> ModuleType:
    """A module by its name. One that ends the process while it is imported raises ImportError instead."""
    try:
        return importlib.import_module(name)
    except BaseException as e:
        # a package may be installed before the next try
        importlib.invalidate_caches()
        if isinstance(e, Exception) or (isinstance(e, KeyboardInterrupt) and not _is_raised_by_code(e)):
            raise
        raise ImportError(f"the import of {name} ended in {in_words(e)}") from e


def _is_raised_by_code(error: BaseException) -> bool:
    """Whether a statement of a module raised the error, and not a signal such as that of Ctrl-C."""
    import dis

    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
