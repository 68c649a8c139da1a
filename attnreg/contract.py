"""The version of the contract between an engine and a kernel module, and the functions of such a module.

`attnreg.runtime.interface` is the contract. What is here can be read without torch.
"""

from __future__ import annotations

from types import ModuleType

# A change after which a module that was correct could compute something else, or fail, counts it up.
CONTRACT = 1
# attnreg's own kernel modules, and the name under which its version stands among those of packages
OWN_MODULES, OWN_PACKAGE = "attnreg.kernels.", "attnreg"
FUNCTIONS = ("kv_cache_shape", "plan", "write_kv", "forward")


def missing_functions(module: ModuleType) -> list[str]:
    """The functions of the contract that a module lacks."""
    return [name for name in FUNCTIONS if not callable(getattr(module, name, None))]
