"""``python -m attnreg``: the attnreg command."""

import sys

from attnreg.cli import main

if __name__ == "__main__":
    sys.exit(main())
