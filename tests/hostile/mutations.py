"""Bytes of a protocol on their way, changed at random."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

_OFTEN = 0.2


def mutator(
    chance: random.Random, tokens: Sequence[bytes], counts: Counter[str], *, unchanged: int = 0
) -> Callable[[bytes, int], bytes | None]:
    """What a `Relay` does to pieces of answers, now and then; counts how many it changed.

    Args:
        chance: how.
        tokens: words of the protocol.
        counts: gets ``answers changed``.
        unchanged: bytes of each connection that are.
    """

    def change(data: bytes, passed: int) -> bytes | None:
        if passed < unchanged or chance.random() >= _OFTEN:
            return data
        counts["answers changed"] += 1
        return changed(data)

    def changed(data: bytes) -> bytes | None:
        at = chance.randrange(len(data) + 1)
        if chance.random() < 0.6:  # where the protocol is, not the values
            at = min(at, chance.randrange(64))
        length = chance.choice([1, 1, 2, 8, 100, 5000])
        match chance.randrange(8):
            case 0:
                bit = 1 << chance.randrange(8)
                return data[:at] + bytes(byte ^ bit for byte in data[at : at + 1]) + data[at + 1 :]
            case 1:
                return data[:at] + data[at + length :]
            case 2:
                return data[:at] + chance.randbytes(length) + data[at:]
            case 3:
                return data[:at] + chance.choice(tokens) + data[at + chance.randrange(4) :]
            case 4:
                return data + data[:length]
            case 5:
                return data[at:] + data[:at]
            case 6:
                digits = [n for n, byte in enumerate(data[:400]) if byte in b"0123456789"]
                if not digits:
                    return data
                one = chance.choice(digits)
                return data[:one] + chance.choice([b"9", b"0", b"-", b"99999"]) + data[one + 1 :]
            case _:
                return None if chance.random() < 0.3 else data[:at]

    return change
