"""The kit's markers, which its plug-in registers where the package is installed."""

from __future__ import annotations

from kvconnect.testing import plugin


def pytest_configure(config):
    plugin.pytest_configure(config)
