"""What a follower of its events knows of the cache (specification: block manager, 10)."""

from __future__ import annotations

from math import inf

import numpy as np

from kvconnect.cache.pool.events import Created, Removed, Stored, Updated
from kvconnect.keys import chain_key


class EventReplay:
    """Applies events in order. `found` is (level, priority) by (window, key)."""

    def __init__(self, primary, host):
        windows = sorted(primary, key=lambda window: window or inf)
        self.created = [(window, (primary[window], host[window])) for window in windows]
        self.next_id = None
        self.found = {}

    def take(self, events):
        for event in events:
            assert self.next_id in (None, event.event_id), "ids count on"
            self.next_id = event.event_id + 1
            self.apply(event.window, event.data)
        assert not self.created, "pools are announced first, in order"

    def apply(self, window, data):
        match data:
            case Created():
                assert (window, data.num_blocks_per_level) == self.created.pop(0)
            case Stored():
                self.store(window, data)
            case Removed():
                for key in data.keys:
                    del self.found[window, key]
            case Updated():
                self.update(window, data)

    def store(self, window, data):
        parent = data.parent_key
        for block in data.blocks:
            assert (window, block.key) not in self.found, "a repeated publish emits nothing"
            if parent is not None:
                assert block.key == chain_key(parent, np.array(block.tokens, np.int32))
            self.found[window, block.key] = block.level, block.priority
            parent = block.key

    def update(self, window, data):
        level, priority = self.found[window, data.key]
        assert data.level or data.priority
        if data.level:
            assert data.level[0] == level != data.level[1]
            level = data.level[1]
        if data.priority:
            assert data.priority[0] != data.priority[1]
            priority = data.priority[1]
        self.found[window, data.key] = level, priority
