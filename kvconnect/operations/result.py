"""The result of a verb: the counts that all verbs have."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kvconnect.operations.choice import Chosen


@dataclass(slots=True)
class Result:
    """The result of a verb; after an error or an interruption, the part that was done.

    Attributes:
        blocks: blocks that the verb changed, wrote or saved, counted in every tier.
        bytes: the bytes of their frames.
        tokens: the tokens of the blocks of pool group 0, each counted in one tier only.
        missing: tokens of the given prompts that are not stored.
        missing_keys: given keys that no block has.
        unknown: blocks left out that may be the tenant's: the store does not know their tenants.
        opened: true once the store was opened; the counts are meaningless before.
        complete: true if all was done.
    """

    blocks: int = 0
    bytes: int = 0
    tokens: int = 0
    missing: int = 0
    missing_keys: int = 0
    unknown: int = 0
    opened: bool = False
    complete: bool = False

    def set_missing(self, chosen: Chosen) -> None:
        """Sets the counts of wanted tokens and keys that are not among the `chosen` blocks."""
        self.missing, self.missing_keys = chosen.missing, chosen.missing_keys
        self.unknown = chosen.unknown

    def notes(self) -> list[str]:
        """Returns what a report says beside the counts that every verb has."""
        return []

    def numbers(self) -> dict[str, object]:
        """Returns the counts by their names, as commands and the server show them."""
        found = asdict(self)
        del found["opened"]
        return found
