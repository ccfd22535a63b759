"""A run of blocks that goes piece by piece stays a few segments, not one per block."""

import numpy as np
import torch
from small_prompts import chain_of

from kvconnect import KvCacheConfig
from kvconnect.cache.block_manager import BlockManager
from kvconnect.cache.tree.radix_tree import RadixTree
from kvconnect.cache.tree.segment import Residence
from kvconnect.keys import Namespace
from kvconnect.layout import KvCacheLayout

T = 2
PRIMARY, HOST = 256, 1024


def run(num_blocks, first):
    return np.arange(first, first + num_blocks * T, dtype=np.int32)


def add(manager, number, tokens):
    manager.add_sequence(number, tokens, keys=chain_of(tokens, T))
    manager.commit(number, len(tokens))
    manager.release(number)


def test_what_is_offloaded_block_by_block_is_joined_again():
    layouts = [KvCacheLayout(1, 1, 1, 1, T, torch.float32, window) for window in (None, 8)]
    for count in (1, 2):  # one pool; then a pool of windows, which keeps the blocks longer
        manager = BlockManager(
            KvCacheConfig(tokens_per_block=T),
            layouts[:count],
            num_blocks={None: PRIMARY, 8: PRIMARY} if count == 2 else PRIMARY,
            num_host_blocks={None: HOST, 8: HOST} if count == 2 else HOST,
        )
        long = run(PRIMARY - 1, 0)
        add(manager, 0, long)
        for number in range(1, PRIMARY // 2):
            add(manager, number, run(2, 10_000 + 100 * number))
            manager.check_invariants()
        assert manager.match(long) == (PRIMARY - 1) * T - 1
        assert num_segments(manager, long) < PRIMARY // 16


def test_what_a_pool_gave_up_is_joined_where_its_first_block_stands_by_recency():
    """Its parts may have been let go at different moments; its place is that of the first."""
    tree = RadixTree(T, 1)
    root = tree.root(Namespace())
    long = bytearray(run(2, 0).tobytes())
    lower = tree.insert(root, long, 2)
    upper = tree.split(lower, 1)
    upper.pools = [Residence()]
    other = tree.insert(root, bytearray(run(1, 50).tobytes()), 1)
    assert len(list(root.children.latest(b"", 9))) == 2  # from now on there is an order
    for moment, segment in enumerate((lower, other, upper), 1):
        segment.pools[0].stamp = moment
        tree.let_go(segment)
    tree.join(upper)
    latest = list(root.children.latest(b"", 9))
    assert latest == [lower, other]
    assert [segment.pools[0].stamp for segment in latest] == [3, 2]


def num_segments(manager, tokens):
    """How many segments the path of `tokens` has."""
    count = 0
    (root,) = manager._tree.roots.values()
    segment, at = root, 0
    while at < len(tokens) // T - 1:
        segment = segment.children.get(bytes(tokens[at * T : (at + 1) * T].tobytes()))
        count, at = count + 1, segment.end
    return count
