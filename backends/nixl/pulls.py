"""The pulls from peers. Each ends, and afterwards no transfer writes to its targets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvconnect.backends.lanes import Lane
from kvconnect.errors import KvConnectError
from kvconnect.trace import count, warn_once
from kvconnect.transfer.pull import Pull
from kvconnect.transfer.reads import Reads
from kvconnect.transfer.transport import PeerHandle, Transport

# The bytes per second for the deadline of a pull: its timeout plus its bytes at this rate.
_LEAST_BYTES_PER_S = 16e6
# Seconds to wait for a failed pull that may still write, before all pulls of the transport are
# ended.
_QUIET_S = 2.0


class Signal(asyncio.Event):
    """An event of the running loop that any thread sets with `wake`."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting = asyncio.get_running_loop()

    def wake(self, _: object = None) -> None:
        """Sets the event, unless the loop is closed; does not block."""
        with suppress(RuntimeError):
            self._waiting.call_soon_threadsafe(self.set)


class Pulls:
    """The pulls of one transport. Belongs to the event loop.

    Args:
        transport: the transport that reads.
        rebuild: ends every pull; blocks.
        lane: the lane that `rebuild` is called on.
        timeout_s: seconds of a pull, plus the time of all bytes under way.
    """

    def __init__(
        self,
        transport: Transport,
        rebuild: Callable[[], None],
        lane: Lane,
        *,
        timeout_s: float,
    ) -> None:
        self._transport = transport
        self._rebuild = rebuild
        self._lane = lane
        self._timeout_s = timeout_s
        self._flying_nbytes = 0
        self._rebuilding: asyncio.Task[None] | None = None

    async def run(self, handle: PeerHandle, several: Sequence[Reads]) -> bool:
        """Reads all of `several`; returns whether all bytes arrived.

        When this returns, no transfer writes to the targets any more, even if it fails or is
        cancelled.
        """
        pulls: list[Pull] = []
        fine = True
        nbytes = sum(reads.total_nbytes for reads in several)
        self._flying_nbytes += nbytes
        try:
            deadline_s = self._timeout_s + self._flying_nbytes / _LEAST_BYTES_PER_S
            for reads in several:
                pull = self._transport.pull(handle, reads, deadline_s=deadline_s)
                pulls.append(pull)
        except KvConnectError as error:
            warn_once(f"nixl.pull {type(error)}", f"nixl store: a read did not begin: {error}")
            fine = False
        cancelled: asyncio.CancelledError | None = None
        for pull in pulls:
            if not fine:
                pull.abandon()
            while not pull.terminal.is_set():
                try:
                    await self._ended(pull)
                except asyncio.CancelledError as error:
                    cancelled = error
                    pull.abandon()
            fine = fine and pull.done.exception() is None
        self._flying_nbytes -= nbytes
        if cancelled is not None:
            raise cancelled
        return fine

    async def _ended(self, pull: Pull) -> None:
        """Waits until `pull` is terminal."""
        done, terminal = Signal(), Signal()
        pull.done.add_done_callback(done.wake)
        pull.terminal.add_callback(terminal.wake)
        await done.wait()
        while not pull.terminal.is_set():  # it failed and may still write
            try:
                async with asyncio.timeout(_QUIET_S):
                    await terminal.wait()
            except TimeoutError:
                await self._end_all()

    async def _end_all(self) -> None:
        """Rebuilds the transport; concurrent callers wait for the same rebuild."""
        if self._rebuilding is None or self._rebuilding.done():
            count("store.nixl.rebuilds")
            self._rebuilding = asyncio.create_task(self._lane.run(self._rebuild))
        await asyncio.wait([self._rebuilding])
        error = self._rebuilding.exception()
        if error is not None:
            warn_once(f"nixl.rebuild {type(error)}", f"nixl store: rebuild failed: {error}")
            await asyncio.sleep(_QUIET_S)
