"""The results of verbs: the counts that all have, and those of each."""

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


@dataclass(slots=True)
class Saved(Result):
    """The result of a verb that saves: the blocks, bytes and tokens are those that it saved.

    Attributes:
        present: blocks that were there already.
        bad: blocks left out because they are damaged in the source.
        expired: blocks left out because their own time is over.
    """

    present: int = 0
    bad: int = 0
    expired: int = 0

    def notes(self) -> list[str]:
        """Returns what was there already, and what was left out."""
        notes = [f"{self.present} were there already"]
        notes += [f"{self.bad} are bad"] * bool(self.bad)
        return notes + [f"{self.expired} had expired"] * bool(self.expired)


@dataclass(slots=True)
class Exported(Result):
    """The result of `export`; blocks and tokens are counts of the file.

    Bytes are those of the frames written by this call.

    Attributes:
        resumed: the blocks that an earlier, interrupted export had written.
        bad: damaged blocks, which are left out.
        gone: blocks that the store dropped meanwhile.
    """

    resumed: int = 0
    bad: int = 0
    gone: int = 0

    def notes(self) -> list[str]:
        """Returns what the file had already, and what was left out."""
        counts = {"were there from before": self.resumed, "are bad": self.bad}
        counts["were dropped meanwhile"] = self.gone
        return [f"{count} {what}" for what, count in counts.items() if count]


@dataclass(slots=True)
class Pinned(Result):
    """The result of `pin` and `unpin`: the blocks are those pinned now, or unpinned.

    Attributes:
        refused: blocks for which the share of pinned blocks has no room.
    """

    refused: int = 0

    def notes(self) -> list[str]:
        """Returns what was not pinned."""
        text = f"{self.refused} have no room in the share of pinned blocks (pin_fraction)"
        return [text] * bool(self.refused)
