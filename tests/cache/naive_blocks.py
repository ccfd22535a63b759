"""A naive model of the block manager: blocks, and the memory that one pool of them lives in.

Written from the specification, block by block and as slowly as it reads; shares no code with
kvconnect.
"""

from __future__ import annotations

from kvconnect import errors


class Node:
    """A place in the tree of a namespace: the tokens of one block after those of its parent.

    It stays as long as it, or a node below, has a block in any pool.
    """

    def __init__(self, parent=None, tokens=()):
        self.parent = parent
        self.tokens = tuple(tokens)
        self.children = []
        self.blocks = {}  # of each pool in which it is resident

    def child(self, tokens):
        return next((child for child in self.children if child.tokens == tuple(tokens)), None)

    def below(self):
        found = list(self.children)
        for node in found:
            found += node.children
        return found

    def path(self):
        """All tokens up to and with its own."""
        return (*self.parent.path(), *self.tokens) if self.parent else ()

    def prune(self):
        node = self
        while node.parent and not node.children and not node.blocks:
            node.parent.children.remove(node)
            node = node.parent


class Block:
    """What one pool holds of one place: private, or published at a node."""

    def __init__(self, primary):
        self.primary = primary  # slot number; None: in secondary only
        self.host = None  # slot number
        self.holders = []  # sequences and pins, each once
        self.node = None
        self.published = None  # when
        self.used = None  # when it was last let go, or copied from
        self.priority = 35
        self.duration = None
        self.since = None  # when it was let go by the last holder with this retention

    def retain(self, retention):
        if (self.priority, self.duration) != retention or self.since is not None:
            self.priority, self.duration = retention
            self.since = None

    def age(self):
        return (-1 if self.used is None else self.used, self.published)


class Holder:
    """A sequence or a pin: its blocks in each pool; None where it holds none."""

    def __init__(self, blocks):
        self.blocks = blocks

    def replace(self, pool, old, new):
        self.blocks[pool] = [new if block is old else block for block in self.blocks[pool]]


class Pin(Holder):
    pass


class Pool:
    """The primary and the secondary memory of one pool group.

    Orders go to `copier` as they happen, one block each.
    """

    def __init__(
        self, group, window, count, host_count, *, threshold, clock, copier, is_state=False
    ):
        self.is_state = is_state
        self.group, self.window, self.count = group, window, count
        self.threshold, self.clock, self.copier = threshold, clock, copier
        self.blank = list(range(count))
        self.host_blank = list(range(host_count))
        self.published = []
        self.ticks = 0
        self.offloaded = []  # since it was last emptied

    def tick(self):
        self.ticks += 1
        return self.ticks

    def free(self, claimed=()):
        return len(self.blank) + sum(
            block.primary is not None and not block.holders and block not in claimed
            for block in self.published
        )

    # -------------------------------------------------------------- retention

    def ran_out(self, block):
        limited = block.duration is not None and block.since is not None
        return limited and self.clock() >= block.since + block.duration

    def priority(self, block):
        return 35 if self.ran_out(block) else block.priority

    def worth(self, block):
        return self.priority(block), block.used

    # -------------------------------------------------------------- taking primary blocks

    def take(self, count, claimed=()):
        """Slots of `count` blocks, which must be free."""
        slots = []
        for _ in range(count):
            if not self.blank:
                self.reclaim(claimed)
            slots.append(self.blank.pop())
        return slots

    def descendants(self, block):
        return [node.blocks[self] for node in block.node.below() if self in node.blocks]

    def reclaim(self, claimed):
        candidates = [
            block
            for block in self.published
            if block.primary is not None and not block.holders and block not in claimed
        ]
        if self.window is None:
            candidates = [
                block
                for block in candidates
                if all(below.primary is None for below in self.descendants(block))
            ]
        victim = min(candidates, key=self.worth)
        if victim.host is None and not self.offload(victim, claimed):
            left = self.descendants(victim) if self.window is None else []
            for block in [victim, *left]:
                self.drop(block)
            return
        self.blank.append(victim.primary)
        victim.primary = None

    # -------------------------------------------------------------- secondary

    def offload(self, block, claimed):
        if self.priority(block) < self.threshold or not self.host_room(block, claimed):
            return False
        block.host = self.host_blank.pop()
        self.copier.offload(self.group, [block.primary], [block.host])
        self.offloaded.append(block)
        return True

    def host_room(self, newcomer, claimed):
        if self.host_blank:
            return True
        held = [block for block in self.published if block.host is not None]
        copies = [block for block in held if block.primary is not None]
        if copies:
            self.forget_host_copy(min(copies, key=self.worth))
            return True
        sole = [
            block
            for block in held
            if not block.holders
            and block not in claimed
            and (self.window is not None or not self.descendants(block))
            and self.priority(block) <= self.priority(newcomer)
        ]
        if sole:
            self.drop(min(sole, key=self.worth))
        return bool(sole)

    def forget_host_copy(self, block):
        if block.host is not None:
            self.host_blank.append(block.host)
            block.host = None

    # -------------------------------------------------------------- publishing

    def unpublish(self, block):
        """It cannot be found any more; the caller decides what becomes of its slots."""
        self.published.remove(block)
        del block.node.blocks[self]
        block.node.prune()
        block.node = None

    def drop(self, block):
        self.unpublish(block)
        self.forget_host_copy(block)
        if block.primary is not None:
            self.blank.append(block.primary)
            block.primary = None

    def publish(self, block, node, retention):
        block.node = node
        node.blocks[self] = block
        self.published.append(block)
        block.published = self.tick()
        block.priority, block.duration = retention or (35, None)
        block.since = None

    def become_primary(self, block, node, retention):
        """What is in secondary only gets private `block` as its primary copy."""
        there = node.blocks[self]
        for holder in there.holders:
            holder.replace(self, there, block)
        block.holders += there.holders
        for name in ("host", "published", "used", "priority", "duration", "since"):
            setattr(block, name, getattr(there, name))
        block.node = node
        node.blocks[self] = block
        self.published[self.published.index(there)] = block
        if retention:
            block.retain(retention)

    def let_go(self, holder, block):
        block.holders.remove(holder)
        if block.node is None:
            if not block.holders:
                self.blank.append(block.primary)
            return
        block.used = self.tick()
        if not block.holders and block.since is None:
            block.since = self.clock()


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
