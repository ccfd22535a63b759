"""``python -m kvconnect`` is the command ``kvconnect``."""

import sys

from kvconnect.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
