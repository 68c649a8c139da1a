"""Finds errors of compilers and interpreters: they neither prove nor refute a kernel's claim."""

from __future__ import annotations

from attnreg.errors import first_cause

# module of Triton -> its function that compiles, or None for any function
_PLACES = {"triton.compiler.compiler": "compile", "triton.runtime.interpreter": None}
# the modules of the errors that PyTorch's compiler raises
_COMPILERS = {"torch._dynamo.exc", "torch._inductor.exc"}
# the error of an assertion in the kernel's own code at compile time
_ASSERTED = "CompileTimeAssertionFailure"


def is_of_a_tool(error: BaseException) -> bool:
    """Whether a compiler or an interpreter raised an error, and not an assertion of the kernel itself.

    A compiled kernel that needs more resources than the GPU has is the kernel's own fault.
    """
    if type(first_cause(error)).__name__ == _ASSERTED:
        return False
    if type(error).__module__ in _COMPILERS:
        return True
    frame = error.__traceback__
    while frame is not None:
        code, module = frame.tb_frame.f_code, frame.tb_frame.f_globals.get("__name__")
        if module in _PLACES and _PLACES[module] in (None, code.co_name):
            return True
        frame = frame.tb_next
    return False
