"""The loads of chunks from the store into vLLM's host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvconnect.connector.io.access import Access
from kvconnect.connector.io.load import Loads
from kvconnect.connector.io.orders import BlockLoad
from kvconnect.connector.io.runs import RunLoads
from kvconnect.integrations.vllm_tier.identity import ChunkNames


class ChunkLoads:
    """The loads of a tier. `submit` and `cancel` may be called on any thread and do not block.

    A load ends at its deadline, or sooner if the store is not used any more. After its end, the
    host memory is not written any more. The first chunk of a group that cannot be loaded ends its
    group's load.

    Args:
        access: to the store, of the host memory.
        names: returns the present names of chunks in the store.
        done: called on a thread of the store with a job's number and its chunks that are loaded.
        timeout_s: deadline of a load.
    """

    def __init__(
        self,
        access: Access,
        names: Callable[[], ChunkNames],
        done: Callable[[int, Sequence[bytes]], None],
        *,
        timeout_s: float,
    ) -> None:
        self._io = access.store.io
        self._names = names
        self._done = done
        self._loads = Loads(access, timeout_s=timeout_s)

    def submit(self, job: int, chunks: Sequence[bytes], rows: Sequence[int]) -> None:
        """Loads `chunks` into the `rows` of the host memory."""
        self._io.call_soon(lambda: self._begin(job, chunks, rows))

    def cancel(self) -> None:
        """Cancels all submitted loads. Every job still ends."""
        self._loads.cancel()

    def _begin(self, number: int, chunks: Sequence[bytes], rows: Sequence[int]) -> None:
        groups: dict[bytes, list[tuple[bytes, int]]] = {}
        for chunk, row in zip(chunks, rows, strict=True):
            groups.setdefault(chunk[-4:], []).append((chunk, row))
        names = self._names()
        runs = [
            [BlockLoad(names.block_key(chunk), row) for chunk, row in pairs]
            for pairs in groups.values()
        ]

        def ended(valid: Sequence[int]) -> None:
            loaded = zip(groups.values(), valid, strict=True)
            self._done(number, [chunk for pairs, count in loaded for chunk, _ in pairs[:count]])

        RunLoads(self._loads, runs, ended)
