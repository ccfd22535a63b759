"""Imports what only a checkout of kvconnect has: other benchmarks, floors, peers and soaks.

These are the package ``kvconnect_bench`` in ``tests/benchmarks``, which is not installed.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from kvconnect.errors import ConfigurationError

_FOLDER = Path(__file__).resolve().parents[2] / "tests" / "benchmarks"


def has_checkout() -> bool:
    """Returns whether this kvconnect is run from a checkout."""
    return (_FOLDER / "kvconnect_bench").is_dir()


def from_checkout(module: str, what: str) -> Any:
    """Returns the module ``kvconnect_bench.MODULE``.

    Args:
        module: name of the module.
        what: the feature that needs the module; the error begins with it.

    Raises:
        ConfigurationError: kvconnect was installed without the package ``kvconnect_bench``.
    """
    if not has_checkout():
        raise ConfigurationError(
            f"{what}: needs a checkout of kvconnect, installed with pip install -e"
        )
    if str(_FOLDER) not in sys.path:
        sys.path.append(str(_FOLDER))
    return import_module(f"kvconnect_bench.{module}")
