"""A store that tests read and damage; caches and prompts of tests of recurrent states."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

import numpy as np
import torch
from late_store import LateStore
from observed import check_rest, tokens

from kvconnect import LLM, KvCacheConfig, RequestOutput, SamplingParams
from kvconnect.backend import Capabilities
from kvconnect.keys import BlockKey

RESTORED = [64, 32, 0, 0, 48]
"""What is reused of `several`. Snapshots are every 32 tokens, at ends and at branches."""


def cache(**more: object) -> KvCacheConfig:
    """With a snapshot every two blocks."""
    given = {"tokens_per_block": 16, "max_tokens": 1024, "state_interval": 32}
    return KvCacheConfig(**given | more)


def reused(outputs: Iterable[RequestOutput]) -> list[int]:
    """The tokens of each prompt that were reused from the device."""
    return [one.reused_device_tokens for one in outputs]


def loaded(outputs: Iterable[RequestOutput]) -> list[int]:
    """The tokens of each prompt that came from a store."""
    return [one.reused_store_tokens for one in outputs]


def restarted(llm: LLM) -> None:
    """Empties the device's cache, once all saves are written and no request holds a block."""
    check_rest(llm)
    assert llm._engine._connector._worker._saves.flush(60)


class FrameStore(LateStore):
    """A store that lists nothing.

    Attributes:
        at_load: called before each load.
    """

    capabilities = Capabilities()
    at_load: Callable[[], Awaitable[None]] | None = None

    @property
    def groups(self) -> dict[BlockKey, int]:
        """Returns the pool group of each key that was ever saved."""
        return {key: group for key, (group, _) in self.blocks.items()}

    @property
    def num_states(self) -> int:
        """Returns how many frames hold states."""
        return sum(self.groups[key] > 0 for key in self.frames)

    def drop_states(self) -> None:
        """Drops all frames of states."""
        self.frames = {key: one for key, one in self.frames.items() if not self.groups[key]}

    async def load(self, keys: Sequence[BlockKey], into: Sequence[torch.Tensor]) -> int:
        if self.at_load is not None:
            await self.at_load()
        return await super().load(keys, into)


def random_trees(
    cached: LLM,
    fresh: LLM,
    rng: np.random.Generator,
    count: int,
    forget: Callable[[LLM], object] = lambda _: None,
) -> list[RequestOutput]:
    """Asks both engines for prompts of at most 60 tokens that branch off each other.

    Checks that the answers are equal, and returns those of `cached`. Calls `forget` for it now and
    then.
    """
    known: list[list[int]] = [[]]
    answers = []
    for _ in range(0, count, 4):
        batch = []
        for _ in range(4):
            stem = known[rng.integers(len(known))]
            stem = stem[: rng.integers(len(stem) + 1)]
            batch.append([*stem, *rng.integers(0, 3, rng.integers(1, 20)).tolist()][-60:])
        params = SamplingParams(max_tokens=int(rng.integers(1, 9)), ignore_eos=True)
        outputs = cached.generate(batch, params)
        assert tokens(outputs) == tokens(fresh.generate(batch, params))
        known += [[*one, *out.output_token_ids] for one, out in zip(batch, outputs, strict=True)]
        answers += outputs
        if rng.integers(2):
            forget(cached)
    return answers
