"""The version of the contract between an engine and a kernel module, and the functions of such a module.

`attnreg.runtime.interface` is the contract. This module needs no torch.
"""

from __future__ import annotations

from types import ModuleType

# increased by every change after which a correct module could compute something else, or fail
CONTRACT = 1
# the prefix of attnreg's own kernel modules, and attnreg's name among packages
OWN_MODULES, OWN_PACKAGE = "attnreg.kernels.", "attnreg"
FUNCTIONS = ("kv_cache_shape", "plan", "write_kv", "forward")


def missing_functions(module: ModuleType) -> list[str]:
    """The functions of the contract that a module lacks."""
    return [name for name in FUNCTIONS if not callable(getattr(module, name, None))]
