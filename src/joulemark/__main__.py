"""``python -m joulemark``: the command line, of this very interpreter."""

from __future__ import annotations

import sys

from joulemark.cli import main

if __name__ == "__main__":
    sys.exit(main())
