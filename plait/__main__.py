"""`python -m plait`: the command line."""

from __future__ import annotations

import sys

from plait.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
