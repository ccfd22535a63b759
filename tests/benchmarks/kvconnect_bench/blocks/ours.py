"""The process of kvconnect as one of the parties."""

from __future__ import annotations

from kvconnect import __version__
from kvconnect_bench.blocks.growth import by_cached_blocks, by_tokens
from kvconnect_bench.blocks.memory import bookkeeping
from kvconnect_bench.blocks.own_cache import OwnCache, hash_seconds_per_block
from kvconnect_bench.blocks.worker import serve, take_stdout, workloads


def main() -> None:
    """Serves kvconnect's workloads until standard input ends."""
    answers = take_stdout()
    served = workloads(OwnCache) | {
        "keys": hash_seconds_per_block,
        "by_cached_blocks": by_cached_blocks,
        "by_tokens": by_tokens,
        "bookkeeping": bookkeeping,
    }
    serve(answers, {"version": __version__}, served)


if __name__ == "__main__":
    main()
