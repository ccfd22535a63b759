"""Runs the command ``kvconnect`` as ``python -m kvconnect``."""

import sys

from kvconnect.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
