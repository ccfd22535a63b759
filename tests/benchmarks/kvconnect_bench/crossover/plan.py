"""The cells of the measurement, and its results."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CrossoverPlan:
    """The cells of the measurement, and how each is measured.

    Attributes:
        rates: of the store, as multiples of the machine's own.
        first_byte_ms: from a call to its first byte.
        prompts: tokens of a prompt.
        users: prompts at once; more than one only with the prompts of `users_prompt` tokens.
        users_prompt: see `users`.
        prefix_users: users that share one prefix; 0: not measured.
        prefix_tokens: of that prefix.
        repeats: medians of so many.
        max_num_tokens: of a step.
    """

    rates: tuple[float, ...] = (0.125, 0.25, 0.5, 1, 2, 4, 16)
    first_byte_ms: tuple[float, ...] = (0.0, 50.0)
    prompts: tuple[int, ...] = (1024, 4096, 16384)
    users: tuple[int, ...] = (1, 4)
    users_prompt: int = 4096
    prefix_users: int = 50
    prefix_tokens: int = 10_240
    repeats: int = 3
    max_num_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class Cell:
    """The medians of one cell, in seconds to the first token; of several users the mean of each.

    Attributes:
        rate: of the store, as a multiple of the machine's own.
        first_byte_ms: of the store.
        prompt: tokens of a prompt.
        users: prompts at once.
        computed: without a store.
        loaded: with a store, waiting for loads.
        ours: with a store, computing beside loads.
    """

    rate: float
    first_byte_ms: float
    prompt: int
    users: int
    computed: float
    loaded: float
    ours: float

    @property
    def ratio(self) -> float:
        """Returns ours as a share of the better one of the two others."""
        return self.ours / min(self.computed, self.loaded)

    @property
    def is_close(self) -> bool:
        """Returns whether the two others are within a factor of 1.5."""
        return max(self.computed, self.loaded) <= 1.5 * min(self.computed, self.loaded)


@dataclass(frozen=True, slots=True)
class Crossover:
    """The results of a measurement.

    Attributes:
        cells: one for each combination.
        shared: 50 users of one prefix: seconds to the first token without a store, and with one.
        between: seconds between two tokens of a request that runs while a prompt comes from the
            store: waiting for the load, and computing beside it.
    """

    cells: tuple[Cell, ...]
    shared: tuple[float, float] | None
    between: tuple[float, float]
