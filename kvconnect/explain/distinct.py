"""An estimate of how many fingerprints are new, in a fixed memory."""

from __future__ import annotations

import numpy as np

from kvconnect.explain.key_memory import Fingerprints

__all__ = ["DistinctKeys"]

_BITS = 12
_NUM_REGISTERS = 1 << _BITS


class DistinctKeys:
    """Counts distinct fingerprints in 4 KiB: a HyperLogLog of 4,096 registers.

    The estimate is that of Cohen and of Ting (2014): whenever a register changes, the inverse of
    the probability of that change is added. Its standard error is 0.83 / sqrt(4,096) = 1.3 % of the
    number of distinct fingerprints. Not thread-safe.
    """

    def __init__(self) -> None:
        self._registers = np.zeros(_NUM_REGISTERS, np.uint8)
        self._sum = float(_NUM_REGISTERS)  # of 2**-register over all registers

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
