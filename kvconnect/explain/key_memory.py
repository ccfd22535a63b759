"""Bounded memories of blocks by 64-bit fingerprints of their prefixes, and these fingerprints."""

from __future__ import annotations

import os
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvconnect.tokens import TokenArray

Fingerprints: TypeAlias = npt.NDArray[np.uint64]

_BITS = 12
_NUM_REGISTERS = 1 << _BITS
_SHIFT = np.uint64(31)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mixed(values: Fingerprints) -> Fingerprints:
    """Returns a bijective mix of the bits of `values` (the finalizer of splitmix64)."""
    values = (values ^ (values >> _SHIFT)) * _FIRST
    values = (values ^ (values >> _SHIFT)) * _SECOND
    return values ^ (values >> _SHIFT)


class Fingerprinter:
    """Makes fingerprints of prefixes of whole blocks.

    Two different prefixes have the same fingerprint with a probability below 2**-40. The weights
    are random, so that no client can choose prompts that collide.

    Args:
        tokens_per_block: the tokens per block of a whole block.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self._size = tokens_per_block
        random = np.frombuffer(os.urandom(8 * (tokens_per_block + 1)), np.uint64)
        self._weights, self._step = random[1:] | np.uint64(1), random[0] | np.uint64(1)

    def prefixes(self, tokens: TokenArray) -> tuple[Fingerprints, bool]:
        """Returns the fingerprint of each prefix of blocks, and true if the last one is a tail.

        Args:
            tokens: int32. A last block that is not full counts, too.
        """
        size = self._size
        count, rest = divmod(len(tokens), size)
        blocks = np.zeros((count + bool(rest), size), np.uint64)
        blocks.ravel()[: len(tokens)] = tokens
        blocks.ravel()[: len(tokens)] += np.uint64(1)  # token 0 differs from no token
        hashes = blocks @ self._weights
        hashes += np.arange(len(hashes), dtype=np.uint64) * self._step
        return mixed(np.cumsum(mixed(hashes), dtype=np.uint64)), bool(rest)


class KeyMemory:
    """Remembers a number for each of the last fingerprints. Not thread-safe.

    A table of `num_slots` slots, 12 bytes each. A fingerprint overwrites another one in its slot:
    after n others it is lost with the probability ``1 - exp(-n / num_slots)``. A fingerprint that
    was never added is found with a probability below 2**-40.

    Args:
        num_slots: a power of two.
    """

    def __init__(self, num_slots: int = 1 << 18) -> None:
        self._mask = np.uint64(num_slots - 1)
        self._keys = np.zeros(num_slots, np.uint64)
        self._values = np.zeros(num_slots, np.uint32)

    def add(self, keys: Fingerprints, value: int) -> None:
        """Stores `value` for each of `keys`, in place of earlier values."""
        slots = keys & self._mask
        self._keys[slots] = keys
        self._values[slots] = value

    def find(self, keys: Fingerprints) -> npt.NDArray[np.int64]:
        """Returns the value of each of `keys`, -1 for those that are not stored."""
        slots = keys & self._mask
        return np.where(self._keys[slots] == keys, self._values[slots].astype(np.int64), -1)

    def clear(self) -> None:
        """Removes all values."""
        self._keys[:] = 0


class DistinctKeys:
    """Counts distinct fingerprints in 4 KiB: a HyperLogLog of 4,096 registers.

    The estimate is that of Cohen and of Ting (2014): whenever a register changes, the inverse of
    the probability of that change is added. Its standard error is 0.83 / sqrt(4,096) = 1.3 % of the
    number of distinct fingerprints. Not thread-safe.
    """

    def __init__(self) -> None:
        self._registers = np.zeros(_NUM_REGISTERS, np.uint8)
        self._sum = float(_NUM_REGISTERS)  # the sum of 2**-register over all

    def add(self, keys: Fingerprints) -> float:
        """Adds `keys`; returns an estimate of how many of them are new."""
        places = (keys >> np.uint64(64 - _BITS)).astype(np.intp)
        low = keys & np.uint64((1 << (64 - _BITS)) - 1)
        # The number of the lowest one bit, from 1 on; `low` is 0 once in 2**52 keys.
        lowest = (low & (~low + np.uint64(1))).astype(np.float64)
        ranks = np.frexp(lowest)[1].astype(np.uint8)
        new = 0.0
        for at in np.flatnonzero(ranks > self._registers[places]).tolist():
            place, rank = places[at], ranks[at]
            before = self._registers[place]
            if rank > before:
                new += _NUM_REGISTERS / self._sum
                self._sum += 2.0 ** -int(rank) - 2.0 ** -int(before)
                self._registers[place] = rank
        return new
