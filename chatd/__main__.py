"""python -m chatd."""

from __future__ import annotations

import sys

from chatd.cli import main

if __name__ == "__main__":
    sys.exit(main())
