# the name that programs import; the ops are defined on the runtime's floor, whose layers call them
from attnreg.runtime.ops import *  # noqa: F403
from attnreg.runtime.ops import __all__ as __all__
from attnreg.runtime.ops import __doc__ as __doc__  # noqa: A004
