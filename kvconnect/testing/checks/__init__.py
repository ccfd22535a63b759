"""The checks, a module per group of the contract. Importing this registers them, in this order.

Imports the rest of the kit except `runner` and the modules above it. Begin with `contract`.
"""

from collections.abc import Sequence  # noqa: I001 - the order is that of the report

from kvconnect.testing.check import Check, registered
from kvconnect.testing.checks import contract as contract
from kvconnect.testing.checks import concurrency as concurrency
from kvconnect.testing.checks import capabilities as capabilities
from kvconnect.testing.checks import keys as keys
from kvconnect.testing.checks import integrity as integrity
from kvconnect.testing.checks import faults as faults
from kvconnect.testing.checks import expiry as expiry
from kvconnect.testing.checks import resources as resources
from kvconnect.testing.checks import eviction as eviction
from kvconnect.testing.checks import pins as pins
from kvconnect.testing.checks import crash as crash
from kvconnect.testing.checks import network as network
from kvconnect.testing.checks import model as model
from kvconnect.testing.checks import end_to_end as end_to_end

__all__ = ["all_checks"]


def all_checks() -> Sequence[Check]:
    """Returns every check of the kit, in the order of the report."""
    return tuple(registered)
