"""Random orders for copiers, each a method's name with its arguments."""

from __future__ import annotations

from array import array


def some_order(random, group, num_blocks, num_host_blocks, num_tokens):
    """Up to three blocks of a group; blocks that are written to are no sources."""
    ids = random.sample(range(num_blocks), num_blocks)
    hosts = random.sample(range(num_host_blocks), num_host_blocks)
    count = random.randint(0, min(3, num_blocks // 2, num_host_blocks))
    some, others, tiers = (
        array("i", part) for part in (ids[:count], ids[count : 2 * count], hosts[:count])
    )
    tokens = random.randint(0, num_tokens)
    return random.choice(
        [
            ("onboard", (group, tiers, some), {}),
            ("offload", (group, some, tiers), {}),
            ("move", (group, some, others), {}),
            ("copy_tokens", (group, ids[0], ids[1], tokens), {}),
            ("copy_tokens", (group, hosts[0], ids[1], tokens), {"from_host": True}),
        ]
    )


def give(order, *copiers):
    name, args, named = order
    for copier in copiers:
        getattr(copier, name)(*args, **named)
