"""A naive model of a live sequence. See `naive_blocks`."""

from __future__ import annotations

from naive_blocks import Holder

from kvconnect import errors


class Sequence(Holder):
    def __init__(self, space, tokens, retention, external_end):
        super().__init__({})
        self.space = space
        self.tokens = list(tokens)
        self.prompt = len(tokens)
        self.retention = retention
        self.external_end = external_end
        self.computed = self.matched = self.reserved = 0
        self.duplicates = {}  # of each pool: numbers of blocks that stay private until the end
        self.state_ends = set()
        self.snapshot = 0
        self.inherited = {}  # of each pool: retention of the block that began as a partial match

    def asked(self, pool, number, size):
        """The retention that the request set for this block; ``None``: it set none."""
        first, given = number * size, self.retention
        if first >= self.prompt:
            if given is None:
                return None
            return given.decode_retention_priority, seconds(given.decode_duration_ms)
        for entry in given.token_range_retention_configs if given else ():
            end = self.prompt if entry.token_end is None else entry.token_end
            if entry.token_start <= first < end:
                return entry.priority, seconds(entry.duration_ms)
        return self.inherited[pool].get(number)


def seconds(milliseconds):
    return None if milliseconds is None else milliseconds / 1000


def check_tokens(tokens):
    if len(tokens) == 0 or not all(-(2**31) <= token < 2**31 for token in tokens):
        raise errors.ConfigurationError("tokens")


def check_position(num_tokens, seq):
    if not 0 <= num_tokens <= len(seq.tokens):
        raise errors.ConfigurationError("beyond the sequence")
