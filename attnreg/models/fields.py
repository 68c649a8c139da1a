"""The fields of a model's config.json, each checked as it is read."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Container, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnreg.errors import escaped
from attnreg.files import FileError, read_json

if TYPE_CHECKING:
    from attnreg.language.engine.architectures import Architectures
    from attnreg.language.vocabulary import Facet

MAX_BYTES = 16 * 2**20
MAX_NUMBER = 2**31 - 1
# the pattern of a facet's `like` for a field that is null
NULL = "null"
# the field by which vLLM knows a draft in the speculators format
_SPECULATORS = "speculators_config"
_ACCEPTED = "give a config.json, a directory that holds one, a dict or a config object (nothing is downloaded)"
_FILES = "give a config.json, or a directory that holds one (nothing is downloaded)"
_OBJECT = "expected an object with fields such as num_hidden_layers"


class ConfigError(ValueError):
    """Raised for an unreadable or contradictory config; the message has field, value and cure."""

    def __init__(self, message: str) -> None:
        super().__init__(escaped(message))


class UndescribedMtpError(ConfigError):
    """Raised for MTP layers if neither the family nor the config says anything of them. The model may have some.

    ``why`` is the part of the message that holds for any config of the family.
    """

    def __init__(self, message: str, why: str) -> None:
        super().__init__(f"{message}: {why}")
        self.why = escaped(why)


class ConfigFields:
    """The fields of a config, or of a part of it, for one layer.

    A dotted name is a nested field (``attn_config.softmax_scale``); ``..name`` is a field of the ``whole`` config.

    where: the text before a field's name in error messages. names: field -> other names of it in the family's files.
    defaults: field -> the value that the family's class gives a missing field. A field that is null is not missing; its
    value is None. ``read`` collects the names of the fields that are read, ``defaulted`` the defaults that are used,
    and ``notes`` the assumptions. ``layer`` is the index of the layer, and ``own`` the fields of that layer alone.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        where: str = "",
        names: Mapping[str, tuple[str, ...]] | None = None,
        defaults: Mapping[str, Any] | None = None,
        whole: ConfigFields | None = None,
    ) -> None:
        self.data = data
        self.where = where
        self.names = names or {}
        self.defaults = defaults or {}
        self.whole = whole
        self.defaulted: dict[str, Any] = {}
        self.notes: list[str] = []
        self.read: set[str] = set()
        self.layer: int | None = None
        self.own: Mapping[str, Any] = {}

    def value(self, name: str) -> Any:
        """The value in the config, or the default of the family, or None."""
        if name.startswith(".."):
            return self.whole.value(name[2:]) if self.whole is not None else None
        self.read.add(name)
        for spelling in (name, *self.names.get(name, ())):
            if spelling in self.own:
                return self.own[spelling]
            found, value = _find(self.data, spelling)
            if found:
                return value
        value = self.defaults.get(name)
        if value is not None:
            self.defaulted[name] = value
        return value

    def given(self, name: str) -> bool:
        """Whether the config has the field, with a value other than null."""
        return any(_find(self.data, spelling)[1] is not None for spelling in (name, *self.names.get(name, ())))

    def holds(self, name: str) -> bool:
        """Whether the config has the field, null included, or the family has a default for it."""
        spellings = (name, *self.names.get(name, ()))
        return self.defaults.get(name) is not None or any(s in self.own or _find(self.data, s)[0] for s in spellings)

    def absent(self) -> dict[str, Any]:
        """Field -> the default of the family, for each field that the config lacks under all its names."""
        return {
            name: value
            for name, value in self.defaults.items()
            if not any(_find(self.data, spelling)[0] for spelling in (name, *self.names.get(name, ())))
        }

    def spelt(self, name: str) -> str:
        """The name under which the config has the field."""
        for spelling in (name, *self.names.get(name, ())):
            if spelling in self.own or _find(self.data, spelling)[0]:
                return spelling
        return name

    def error(self, name: str, expected: str) -> ConfigError:
        """The error of a field with a wrong value; ``expected`` describes the right ones."""
        value = self.value(name)
        # a number in quotes is the commonest mistake
        quoted = f" (write {value}, without quotes)" if isinstance(value, str) and value.isdecimal() else ""
        at = f" (of layer {self.layer})" if self.layer is not None and name in self.own else ""
        return ConfigError(f"{self.where}{self.spelt(name)}{at} is {show(value)}; {expected}{quoted}")

    def nested(self, name: str) -> Mapping[str, Any] | None:
        """The object in a field, None if the config lacks the field. Raises `ConfigError` for another value."""
        value = self.value(name)
        return None if value is None else mapping(value, f"{self.where}{name}", "expected an object")

    def word(self, name: str) -> str:
        """The text in a field, "" if the config lacks the field. Raises `ConfigError` for another value."""
        value = self.value(name)
        if not isinstance(value, str | None):
            raise self.error(name, "expected a word")
        return value or ""


Check = Callable[[ConfigFields, str, Any], Any]


def integer(least: int) -> Check:
    """Returns the check of a field for an integer of at least ``least``."""

    def check(fields: ConfigFields, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise fields.error(name, f"expected an integer of at least {least}")
        if not least <= value <= MAX_NUMBER:
            limit = f"at least {least}" if value < least else f"at most {MAX_NUMBER}"
            raise fields.error(name, f"expected {limit}")
        return value

    return check


def number(fields: ConfigFields, name: str, value: Any) -> float:
    """The value, a number of any sign. Raises `ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        raise fields.error(name, f"expected a number of at most {MAX_NUMBER}")
    return value


def positive(fields: ConfigFields, name: str, value: Any) -> float:
    """The value, a number above 0. Raises `ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
        raise fields.error(name, f"expected a number above 0 and at most {MAX_NUMBER}")
    return value


def flag(fields: ConfigFields, name: str, value: Any) -> bool:
    """The value, true or false. Raises `ConfigError`."""
    if not isinstance(value, bool):
        raise fields.error(name, "expected true or false")
    return value


def anything(fields: ConfigFields, name: str, value: Any) -> Any:
    """The value, of any kind."""
    return value


def read_config(config: object) -> tuple[str, Mapping[str, Any]]:
    """The path of a config and its fields. The path is "" if the config is a mapping or an object.

    A draft in the speculators format has the fields of its layers at the top, as `of_speculators` has them.
    """
    path, data = _read_file(config)
    return path, of_speculators(data) if data.get(_SPECULATORS) is not None else data


def of_speculators(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a draft in the speculators format as vLLM reads them: those of its layers, and its vocabulary.

    Its class is that of its way of drafting. What the file says of quantised weights is left out, as vLLM does not read
    it. Source: SpeculatorsConfig.extract_transformers_pre_trained_config.
    """
    layers, method = data.get("transformer_layer_config"), str(data.get("speculators_model_type"))
    dtype = {name: data[name] for name in ("dtype", "torch_dtype") if name in data}
    kept = {name: data[name] for name in (_SPECULATORS, "draft_vocab_size", "target_hidden_size") if name in data}
    kept |= {"speculators_model_type": method, "architectures": [method]}
    if method.startswith("dflash"):
        kept["speculators_causal"] = not data.get("sliding_window_non_causal", True)
    return {**dtype, **(layers if isinstance(layers, Mapping) else {}), **kept}


def refuse_draft(data: Mapping[str, Any], where: str) -> None:
    """Raise `ConfigError` for a draft in the speculators format, which drafts for another model."""
    if (config := data.get(_SPECULATORS)) is not None:
        name = _find(config, "verifier.name_or_path")[1] if isinstance(config, Mapping) else None
        of = f" for {name}" if isinstance(name, str) else ""
        raise ConfigError(f"{where}this is a draft{of}, in the speculators format; give it as the draft of its model")


def _read_file(config: object) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(config, str | os.PathLike):
        return "", mapping(config, "config", _ACCEPTED)
    path = Path(os.fsdecode(config))
    path = path / "config.json" if os.path.isdir(path) else path
    if not os.path.lexists(path):
        raise ConfigError(f"{path}: no such file; {_FILES}")
    try:
        content = read_json(path, MAX_BYTES)
    except FileError as e:
        raise ConfigError(f"{e}; {_FILES}") from None
    if not isinstance(content, dict):
        # such a file may hold anything, even secrets, so the message does not quote it
        raise ConfigError(f"{path}: the content is no object; {_OBJECT}")
    return str(path), content


def show(value: object) -> str:
    """The value as Python writes it, shortened."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return "a number too long to show"


def mapping(value: object, what: str, expected: str) -> Mapping[str, Any]:
    """The value as a mapping. Raises `ConfigError` for another value; the message calls it ``what``."""
    if hasattr(value, "to_dict") and not isinstance(value, type | Mapping):
        value = value.to_dict()
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} is {show(value)}; {expected}")
    return value


def _find(data: Mapping[str, Any], name: str) -> tuple[bool, Any]:
    if name in data:
        return True, data[name]
    value: Any = data
    for step in name.split(".") if "." in name else ():
        if isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        elif isinstance(value, Mapping) and step in value:
            value = value[step]
        else:
            return False, None
    return "." in name, value if "." in name else None


def facets_of(
    config: object,
    facets: Iterable[Facet],
    given: Container[str],
    layers: Mapping[str, Any],
    architectures: Architectures | None = None,
    run: tuple[object, Mapping[str, Any], Mapping[str, Any]] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Facet -> its value in a config, for each facet of a registry that comes from the config.

    given: the facets that the user sets. layers: facts of the whole model; facets read them as the config's section
    ``layers``. architectures: the classes that the engine serves; facets read what it says of the config's as the
    section ``served``. defaults: field -> the value that the model's class gives it, for fields that the config lacks.
    run: config, facts and defaults of the model that the run serves, if this one drafts for it; facets read them as the
    section ``run``.
    """
    wanted = [facet for facet in facets if facet.config and facet.unless not in given]
    if not wanted:
        return {}
    absent = defaults or {}
    data = read_config(config)[1]
    own = {**data, "layers": layers, "served": _served(data, architectures)}
    data = {**own, "run": {**read_config(run[0])[1], "layers": run[1]} if run else own}
    absent = {**absent, **{f"run.{name}": value for name, value in (run[2] if run else absent).items()}}
    values = {facet.name: _facet_in(data, absent, facet) for facet in wanted}
    return {name: value for name, value in values.items() if value is not None}


def _facet_in(data: Mapping[str, Any], defaults: Mapping[str, Any], facet: Facet) -> Any:
    """The value of a facet by its first field that has a value, or that is null if the facet says what null means."""
    meanings = dict(facet.like)
    for name in facet.config:
        found, value = _read(data, name)
        if not found:
            value = defaults.get(name)
        elif value is None and NULL in meanings:
            return meanings[NULL]
        if value is not None:
            return _facet_value(facet, value)
    return meanings.get("")


def _read(data: Mapping[str, Any], name: str) -> tuple[bool, Any]:
    """Whether the data has a field, and its value.

    ``text_config.*.head_dim`` is the largest ``head_dim`` of that section and its ``per_layer_config``, if it has one.
    """
    section, star, field = name.rpartition("*.")
    if not star:
        return _find(data, name)
    whole = _find(data, section[:-1])[1] if section else data
    layers = whole.get("per_layer_config") if isinstance(whole, Mapping) else None
    own = layers.values() if isinstance(layers, Mapping) else layers if isinstance(layers, list) else ()
    values = [part.get(field) for part in (whole, *own) if isinstance(part, Mapping)] if own else []
    largest = max((value for value in values if type(value) is int), default=None)
    return largest is not None, largest


def _served(data: Mapping[str, Any], architectures: Architectures | None) -> Mapping[str, Any]:
    """What an engine's table says of a config's architectures; empty without a table, or without an architecture."""
    names, own = data.get("architectures"), data.get("auto_map")
    if architectures is None or not isinstance(names, list):
        return {}
    code = isinstance(own, Mapping) and any(str(name).startswith("AutoModel") for name in own)
    served = architectures.of([name for name in names if isinstance(name, str) and name], remote=code)
    return {} if served is None else {"architecture": served.architecture, "how": served.how}


def _facet_value(facet: Facet, value: Any) -> Any:
    """The value of a facet that a field's value means; None if it means no value of the facet."""
    # a config object may hold a torch.dtype
    text = str(value).removeprefix("torch.")
    if patterns := [(pattern, v) for pattern, v in facet.like if pattern not in ("", NULL)]:
        return next((v for pattern, v in patterns if fnmatchcase(text.casefold(), pattern.casefold())), None)
    if facet.kind == "integer":
        number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_NUMBER
        return value if number else None
    if facet.kind == "boolean":
        return bool(value) if isinstance(value, bool | int | float) else None
    if facet.kind == "text":
        return value if isinstance(value, str) and value else None
    return next((word for word in facet.words if str(word).casefold() == text.casefold()), None)
