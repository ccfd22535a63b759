"""The settings of a tiered store, and the parser of its URL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvconnect.backends.url import StoreUrl
from kvconnect.errors import ConfigurationError, nearest
from kvconnect.redaction import shown_fields

Write = Literal["through", "behind"]

_MAX_TIERS = 8
_EXAMPLE = "tiered:?tiers=memory:,disk:/var/cache/kv"


@dataclass(frozen=True, slots=True)
class TieredSettings:
    """The settings of a `TieredBackend`.

    Attributes:
        write: the mode of each tier, or one for all. Saves wait for a tier with ``through``; a tier
            with ``behind`` is written in the background. At least one tier has ``through``.
        promote: true to copy blocks loaded from a slower tier to the faster ones.
        patience_s: seconds that a lookup waits for a tier. An engine's own budget
            (``lookup_timeout_ms``) should be longer.
        deadline_s: the deadline of each call to a tier.
        queue_nbytes: the most bytes that wait in memory to be written to one tier.
        verify_frames: true to check loaded frames, so that another tier can replace a damaged one.
            False for values that are no frames.
    """

    write: tuple[Write, ...] = ("through",)
    promote: bool = True
    patience_s: float = 0.015
    deadline_s: float = 10.0
    queue_nbytes: int = 256 << 20
    verify_frames: bool = True

    def __post_init__(self) -> None:
        for write in self.write:
            if write not in {"through", "behind"}:
                raise ConfigurationError(
                    f"write={write}: unknown; {nearest(write, ('through', 'behind'))}"
                )
        if self.patience_s <= 0 or self.deadline_s <= 0:
            raise ConfigurationError("patience, deadline: must be above 0 seconds")
        if self.queue_nbytes < 1:
            raise ConfigurationError(f"queue={self.queue_nbytes}: must be at least one byte")

    def write_of_each(self, tiers: int) -> tuple[Write, ...]:
        """Returns the mode of each of `tiers` tiers.

        Raises:
            ConfigurationError: the number of modes differs, or no tier has ``through``.
        """
        if not 1 <= tiers <= _MAX_TIERS:
            raise ConfigurationError(f"tiers: {tiers} are given; 1 to {_MAX_TIERS} are possible")
        writes = self.write * tiers if len(self.write) == 1 else self.write
        if len(writes) != tiers:
            raise ConfigurationError(
                f"write={','.join(self.write)}: {len(writes)} for {tiers} tiers; "
                f"give one for all, or one for each"
            )
        if "through" not in writes:
            raise ConfigurationError(
                f"write={','.join(self.write)}: no tier would have a block when save returns; "
                f"write at least one through, as in write=through,behind"
            )
        return writes


def parse_tiered(url: StoreUrl) -> tuple[list[str], TieredSettings]:
    """Returns the tiers' URLs and their settings.

    Raises:
        ConfigurationError: names the parameter and what is right.
    """
    url.allow("tiers", "write", "promote", "patience", "deadline", "queue")
    if url.location or url.path:
        raise ConfigurationError(f"{url}: has no place of its own; write {_EXAMPLE}")
    tiers = _split(url.query.get("tiers", ""))
    if not tiers:
        raise ConfigurationError(f"{url}: tiers is needed, as in {_EXAMPLE}")
    default = TieredSettings()
    writes: Sequence[str] = url.query.get("write", "through").split(",")
    settings = TieredSettings(
        write=tuple(writes),  # type: ignore[arg-type]  # checked there
        promote=url.choice("promote", "yes", "no") == "yes",
        patience_s=url.duration("patience") or default.patience_s,
        deadline_s=url.duration("deadline") or default.deadline_s,
        queue_nbytes=url.size("queue") or default.queue_nbytes,
    )
    settings.write_of_each(len(tiers))
    return tiers, settings


def _split(text: str) -> list[str]:
    # A comma within a tier's URL is written %2C.
    tiers = [tier.strip().replace("%2C", ",") for tier in text.split(",")]
    shown = dict(shown_fields([("tiers", text)]))["tiers"]
    if text and not all(tiers):
        raise ConfigurationError(f"tiers={shown}: one of them is empty; leave out a comma")
    for tier in tiers:
        if tier.partition(":")[0].lower() == "tiered":
            raise ConfigurationError(
                f"tiers={shown}: a tier cannot be tiered itself; list them all here"
            )
    return [tier for tier in tiers if tier]
