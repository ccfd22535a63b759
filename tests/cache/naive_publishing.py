"""A naive model of publishing (specification: block manager, 5)."""

from __future__ import annotations

from naive_blocks import Node, Pin


class NaivePublishing:
    """Part of `NaiveManager`."""

    def publish_running(self, seq, pool, stop):
        for number in range(stop):
            block = seq.blocks[pool][number]
            if block is None or block.node or number in seq.duplicates[pool]:
                if number in seq.duplicates[pool] and pool.window is None:
                    return
                continue
            if not self.publish(seq, pool, number):
                seq.duplicates[pool].add(number)
                if pool.window is None:
                    return

    def node(self, seq, number):
        """The node of block `number`, whose tokens are all there; made if need be."""
        node = self.root(seq.space)
        for step in range(number + 1):
            tokens = seq.tokens[step * self.size : (step + 1) * self.size]
            node = self.child(node, tokens)
        return node

    def child(self, node, tokens):
        below = node.child(tokens)
        if below is None:
            below = Node(node, tokens)
            node.children.append(below)
        return below

    def publish(self, seq, pool, number, node=None):
        """Whether the path was free in primary, so that our block took it."""
        node = node or self.node(seq, number)
        there, block = node.blocks.get(pool), seq.blocks[pool][number]
        asked = seq.asked(pool, number, self.size)
        if there is None:
            pool.publish(block, node, asked)
        elif there.primary is None:
            pool.become_primary(block, node, asked)
        else:
            return False
        return True

    def publishes(self, seq, pool, count):
        """Publish every valid full block; whether a tail may follow."""
        valid = seq.blocks[pool][: -(-count // self.size)]
        private = [block for block in valid if block and block.node is None]
        pinned = any(isinstance(holder, Pin) for block in private for holder in block.holders)
        ordered = pool.window is None
        for number in range(count // self.size):
            block = seq.blocks[pool][number]
            if block is None or block.node:
                continue
            if ordered and pinned and seq.duplicates[pool]:
                return False
            if not self.publish(seq, pool, number) and ordered and pinned:
                return False
        return True

    def publish_tail(self, seq, pools, count):
        number = count // self.size
        tokens = tuple(seq.tokens[number * self.size : count])
        pools = [pool for pool in pools if seq.blocks[pool][number]]
        parent = self.node(seq, number - 1)
        there = any(
            child.tokens[: len(tokens)] == tokens and all(pool in child.blocks for pool in pools)
            for child in parent.children
        )
        if pools and not there:
            node = self.child(parent, tokens)
            for pool in pools:
                self.publish(seq, pool, number, node)
        parent.prune()
