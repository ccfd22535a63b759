"""What every physical slot holds: a copier that carries its orders out on names of KV.

A name is (namespace, tokens up to and with this one): the KV of a token depends on all before it.
"""

from __future__ import annotations

from collections import Counter, defaultdict

JUNK = "junk"


class SlotContent:
    """Primary and host slots of all groups, a list of names each; orders happen as they come."""

    def __init__(self, tokens_per_block):
        self.size = tokens_per_block
        self.primary = defaultdict(lambda: [JUNK] * tokens_per_block)
        self.host = defaultdict(lambda: [JUNK] * tokens_per_block)
        self.orders = Counter()

    def onboard(self, group, host_ids, ids):
        self.count("onboard", group, host_ids, ids)
        for source, target in zip(host_ids, ids, strict=True):
            self.primary[group, target] = list(self.host[group, source])

    def offload(self, group, ids, host_ids):
        self.count("offload", group, ids, host_ids)
        for source, target in zip(ids, host_ids, strict=True):
            self.host[group, target] = list(self.primary[group, source])

    def move(self, group, sources, targets):
        self.count("move", group, sources, targets)
        assert not set(sources) & set(targets)
        for source, target in zip(sources, targets, strict=True):
            self.primary[group, target] = list(self.primary[group, source])

    def copy_tokens(self, group, source, target, num_tokens, *, from_host=False):
        self.count("copy_tokens", group, [source], [target])
        assert 0 < num_tokens < self.size
        assert from_host or source != target
        kept = (self.host if from_host else self.primary)[group, source][:num_tokens]
        # Nothing beyond the matched tokens is promised.
        self.primary[group, target] = kept + [JUNK] * (self.size - num_tokens)

    def count(self, name, group, sources, targets):
        assert len(set(targets)) == len(targets) == len(sources)
        assert all(slot >= 0 for slot in (*sources, *targets))
        self.orders[name, group] += len(targets)

    def write(self, group, ids, space, tokens, start, stop):
        """The KV of tokens ``start..stop`` is computed, or loaded, into the blocks held of them."""
        for position in range(start, stop):
            self.put(group, ids, position, (space, tuple(tokens[: position + 1])))

    def scribble(self, group, ids, start):
        """The owner of these blocks may write anything from position `start` on."""
        for position in range(start, len(ids) * self.size):
            self.put(group, ids, position, JUNK)

    def put(self, group, ids, position, name):
        slot = ids[position // self.size]
        if slot >= 0:
            self.primary[group, slot][position % self.size] = name

    def check(self, group, ids, space, tokens, stop):
        """The blocks held of the first `stop` tokens hold what was computed for them."""
        for position in range(stop):
            slot = ids[position // self.size]
            if slot >= 0:
                found = self.primary[group, slot][position % self.size]
                assert found == (space, tuple(tokens[: position + 1])), (group, slot, position)
