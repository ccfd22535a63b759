"""The time to the first token of a prompt in a store: computed, loaded, or both until they meet."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

from kvconnect.errors import ConfigurationError
from kvconnect.overlap import Decision, FirstToken, meeting

__all__ = ["ExternalHit", "LoadRates"]


class ExternalHit(NamedTuple):
    """A prompt of which the store has a part that the engine has not.

    Attributes:
        tokens: the tokens of that part; at least 1.
        rest: tokens after it, which no tier has; at least 1.
    """

    tokens: int
    rest: int


@dataclass(frozen=True, slots=True)
class LoadRates:
    """The speed of a store beside that of a model.

    A load fills whole blocks, the last one first. Computing fills them from the first one on. The
    two meet between two blocks, at the place that makes the later of them earliest.

    Attributes:
        label: the store's rate as the user wrote it.
        load_tokens_per_s: the store's rate.
        prefill_tokens_per_s: prompt tokens that the model computes in a second; ``inf``: at once.
        tokens_per_block: at least 1.
        store_first_byte_s: seconds until a load's first byte.
        step_s: seconds that each step takes beside its tokens.
        step_tokens: prompt tokens of a step at most; ``None``: no limit.

    Raises:
        ConfigurationError: names the field, the value and what is right.
    """

    label: str
    load_tokens_per_s: float
    prefill_tokens_per_s: float
    tokens_per_block: int
    store_first_byte_s: float = 0.0
    step_s: float = 0.0
    step_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.load_tokens_per_s > 0:
            raise ConfigurationError(f"store_rate: {self.label} must be above 0")
        for name in ("store_first_byte_s", "step_s"):
            value: float = getattr(self, name)
            if not (value >= 0 and isfinite(value)):
                raise ConfigurationError(f"{name}: {value} must be a number of seconds, 0 or more")
        if self.step_tokens is not None and self.step_tokens < 1:
            raise ConfigurationError(f"step_tokens: {self.step_tokens} must be at least 1")

    def first_token(self, hit: ExternalHit) -> FirstToken:
        """Returns the seconds after `hit`. Of equal ways, the one that moves least is chosen."""
        blocks = -(-hit.tokens // self.tokens_per_block)
        rest_s = self.compute_s(hit.rest)
        computed_s = self.compute_s(hit.tokens + hit.rest)
        loaded_s = self.load_s(blocks) + rest_s
        met_s = self._meeting_s(blocks) + rest_s
        both_s = min(computed_s, loaded_s, met_s)
        decision = Decision.BOTH
        if computed_s == both_s:
            decision = Decision.COMPUTE
        elif loaded_s == both_s:
            decision = Decision.LOAD
        return FirstToken(computed_s, loaded_s, both_s, decision)

    def compute_s(self, num_tokens: int) -> float:
        """Returns the seconds of the steps that compute `num_tokens`, at least 1."""
        steps = 1 if self.step_tokens is None else -(-num_tokens // self.step_tokens)
        return steps * self.step_s + num_tokens / self.prefill_tokens_per_s

    def load_s(self, num_blocks: int) -> float:
        """Returns the seconds until `num_blocks`, at least 1, are loaded."""
        num_tokens = num_blocks * self.tokens_per_block
        return self.store_first_byte_s + num_tokens / self.load_tokens_per_s

    def _meeting_s(self, blocks: int) -> float:
        """Returns the seconds until `blocks` are filled from both ends, by each at least one."""
        if blocks < 2:
            return inf

        # The load brings one block at least.
        _, seconds = meeting(
            blocks - 1,
            lambda count: self.compute_s(count * self.tokens_per_block),
            lambda count: self.load_s(blocks - count),
        )
        return seconds
