"""Compiles the kernel module of a row: its package, the version of the contract that it follows, and its options."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from attnreg.compile.parts import Reporter, RowData
from attnreg.compile.schema.tables import VariantData
from attnreg.compile.source.yaml_source import shown
from attnreg.compile.validation import FilePart
from attnreg.contract import CONTRACT, OWN_MODULES
from attnreg.errors import Location, did_you_mean
from attnreg.language.numbers import Float
from attnreg.registry import Option

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+\Z")
_KINDS: dict[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


@dataclass(slots=True)
class Module:
    """The kernel module of a row after its overlays; a later overlay overrides an earlier one."""

    name: str | None = None
    where: Location | None = None
    contract: int | None = None
    options: dict[str, Option] = field(default_factory=dict)


class ModuleCompiler:
    """Compiles the keys `module`, `contract` and `options` of rows, and reports what is wrong with them."""

    def __init__(self, reporter: Reporter, trusted: frozenset[str], imports: bool) -> None:
        """trusted: the packages that modules may belong to. imports: whether modules are imported at all."""
        self.reporter = reporter
        self.trusted = trusted
        self.imports = imports

    def apply(self, module: Module, part: FilePart[RowData]) -> Module:
        """The module after one more part: the row itself, or an overlay's change of it."""
        module = self.named(module, part)
        for name, raw in part.model.options.items():
            self._set_option(module, part, name, raw)
        return module

    def named(self, module: Module, part: FilePart[RowData | VariantData]) -> Module:
        """The module that a part names; without the key `module`, the given one."""
        data = part.model
        if data.module is not None:
            # a new module starts without the old one's contract and options
            module = Module(data.module, part.key_at("module"), data.contract)
            if self._check_name(part, data.module):
                self._check_contract(part, data.module, data.contract)
        elif data.contract is not None:
            message = "a contract is stated beside the `module` that is made for it"
            self.reporter.report(part, ("contract",), message, "state both, or remove it", key=True)
        return module

    def _check_name(self, part: FilePart[RowData | VariantData], name: str) -> bool:
        """Whether a row may name this module: it is trusted, attnreg's own, or never imported. Reports any other."""
        root = name.partition(".")[0]
        if root == "attnreg" and name.endswith(".__init__"):
            help_ = f"name the module itself, as in {OWN_MODULES}triton_attn"
            self.reporter.report(part, ("module",), f"`{name}` names a package by its file", help_)
            return False
        if _MODULE.match(name) and (not self.imports or name.startswith(OWN_MODULES) or root in self.trusted):
            return True
        if not _MODULE.match(name):
            self.reporter.report(part, ("module",), f"`{name}` is not a dotted module path")
        elif root == "attnreg":
            message = "the kernel modules of attnreg itself are those in attnreg.kernels"
            self.reporter.report(part, ("module",), message)
        else:
            help_ = f"trust it explicitly: load_registry(..., trust=['{root}']), --trust {root}, or an entry point"
            self.reporter.report(part, ("module",), f"the package {root} is not trusted to be imported", help_)
        return False

    def _check_contract(self, part: FilePart[RowData | VariantData], name: str, contract: int | None) -> None:
        if contract is None:
            if self.imports and not name.startswith(OWN_MODULES):
                message = "the row does not say which contract its module is made for"
                help_ = (
                    f"write the module for attnreg/runtime/interface.py, and add `contract: {CONTRACT}`, its version"
                )
                self.reporter.report(part, ("module",), message, help_)
        elif contract != CONTRACT:
            message = f"the module is made for contract {contract}, and this attnreg has contract {CONTRACT}"
            help_ = f"install a version of the module for contract {CONTRACT}"
            help_ += f", or an attnreg that has contract {contract}" if contract > CONTRACT else ""
            self.reporter.report(part, ("contract",), message, help_)

    def _set_option(self, module: Module, part: FilePart[RowData], name: str, raw: object) -> None:
        """Declare an option beside the module, or change the value of an existing option."""
        path, value = ("options", name), float(raw) if isinstance(raw, Float) else raw
        if not isinstance(value, bool | int | float | str) or (isinstance(value, float) and not math.isfinite(value)):
            self.reporter.report(part, path, f"expected text, a finite number, true or false, got {shown(raw)}")
        elif meant := part.document.boolean_elsewhere(raw, *part.path, *path):
            help_ = f"write {meant}, or quote it where the module reads the text"
            self.reporter.report(part, path, f"`{raw}` is text here, and no boolean", help_)
        elif part.model.module is not None:
            module.options[name] = value
        elif name not in module.options:
            help_ = did_you_mean(name, module.options) if module.options else "options are stated beside `module`"
            self.reporter.report(part, path, f"the module has no option `{name}`", help_, key=True)
        else:
            kind = type(module.options[name])
            if type(value) is kind or (kind is float and type(value) is int):
                module.options[name] = kind(value)
            else:
                self.reporter.report(part, path, f"expected {_KINDS[kind]}, got {shown(raw)}")
