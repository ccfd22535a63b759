"""The tools that check whether a backend keeps the contract, for any backend.

Use ``class TestMine(BackendConformance)`` with pytest, `check_backend` or ``kvconnect check URL``
without it. The tools that make stores, networks and disks fail can be used alone.
``docs/how-to/writing-a-backend.md`` walks through one backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvconnect.testing.blocks import BlockMaker
from kvconnect.testing.check import Outcome, Violation
from kvconnect.testing.faults.clock import ShiftedClock
from kvconnect.testing.faults.faulty_backend import FaultyBackend
from kvconnect.testing.faults.faulty_filesystem import FaultyFilesystem
from kvconnect.testing.faults.tcp_fault import TcpFault
from kvconnect.testing.faults.tcp_proxy import TcpProxy
from kvconnect.testing.runner import Report, check_backend
from kvconnect.testing.subject import Address, Subject, Unsupported, Usage

if TYPE_CHECKING:
    from kvconnect.testing.conformance import BackendConformance

__all__ = [
    "Address",
    "BackendConformance",
    "BlockMaker",
    "FaultyBackend",
    "FaultyFilesystem",
    "Outcome",
    "Report",
    "ShiftedClock",
    "Subject",
    "TcpFault",
    "TcpProxy",
    "Unsupported",
    "Usage",
    "Violation",
    "check_backend",
]


def __getattr__(name: str) -> Any:
    # The one name that needs pytest.
    if name == "BackendConformance":
        from kvconnect.testing.conformance import BackendConformance

        return BackendConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
