"""Whether an error is a tool's, a compiler's or an interpreter's, and so says nothing of what a kernel claims."""

from __future__ import annotations

from attnreg.errors import first_cause

# where Triton compiles and interprets: a function of a module, or any of it
_PLACES = {"triton.compiler.compiler": "compile", "triton.runtime.interpreter": None}
# the modules of the errors that PyTorch's compiler raises
_COMPILERS = {"torch._dynamo.exc", "torch._inductor.exc"}
# what a kernel itself asserts while it is compiled
_ASSERTED = "CompileTimeAssertionFailure"


def is_of_a_tool(error: BaseException) -> bool:
    """Whether an error was raised while a kernel was compiled or interpreted, other than by what the kernel asserts.

    More resources than a GPU has, which are counted once a kernel is compiled, are the kernel's own fault.
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
