"""Ranks in processes of their own; `job` is importable from here on."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
