"""Measures the memory that the block manager uses for each cached block."""

from __future__ import annotations

import ctypes
import gc
import resource
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvconnect.cache.block_manager import BlockManager
from kvconnect_bench.blocks.own_cache import make_chain, make_manager
from kvconnect_bench.blocks.traffic import BLOCK, TokenIds

_CONTINUATIONS = 4
_TOKEN_NBYTES = 4
_KEY_NBYTES = 32


def bookkeeping(groups: int, shared: int, unique: int, *, keys: bool, traced: bool) -> float:
    """Returns the bytes per cached block, beyond 4 per token and, with `keys`, 32 per block.

    There are `groups` long prompts of `shared` tokens. Each is continued in four ways, by `unique`
    tokens. Without `traced` the process must not have done any work before.

    Args:
        groups: shared prompts.
        shared: tokens of each.
        unique: tokens of each continuation.
        keys: also looks up every block by its key.
        traced: counts what Python and NumPy allocated; else the process's resident memory.
    """
    blocks = groups * (shared + _CONTINUATIONS * unique) // BLOCK
    for _ in _prompts(2, shared, unique):  # memory for making prompts is allocated before
        pass
    if traced:
        tracemalloc.start()
    before = _allocated(traced=traced)
    manager = make_manager(blocks)
    for number, prompt in enumerate(_prompts(groups, shared, unique)):
        manager.add_sequence(number, prompt, keys=make_chain(prompt) if keys else None)
        manager.commit(number, len(prompt))
        manager.release(number)
    if manager.match(next(_prompts(groups, shared, unique))) < shared:
        raise RuntimeError("the prompts are not cached")
    if keys:
        _ask_for_keys(manager, groups, shared, unique)
    taken = _allocated(traced=traced) - before
    tracemalloc.stop()
    manager.check_invariants()
    return taken / blocks - _TOKEN_NBYTES * BLOCK - _KEY_NBYTES * keys


def _ask_for_keys(manager: BlockManager, groups: int, shared: int, unique: int) -> None:
    for prompt in _prompts(groups, shared, unique):
        keys = make_chain(prompt).keys()
        pin = manager.pin_keys(keys)
        if len(pin) < len(keys):
            raise RuntimeError(f"{len(pin)} of {len(keys)} blocks were found by their keys")
        manager.unpin(pin)


def _prompts(groups: int, shared: int, unique: int) -> Iterator[TokenIds]:
    for group in range(groups):
        rng = np.random.default_rng(group)
        prefix = rng.integers(0, 100_000, shared, dtype=np.int32)
        for _ in range(_CONTINUATIONS):
            own = rng.integers(0, 100_000, unique, dtype=np.int32)
            yield np.concatenate((prefix, own))


def _allocated(*, traced: bool) -> int:
    gc.collect()
    if traced:
        return tracemalloc.get_traced_memory()[0]
    # What was freed goes back to the system, so that resident memory is what is in use.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
