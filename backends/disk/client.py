"""The client of a disk store's calls: opens the directory, and opens it again where needed."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TypeVar

from kvconnect.backends.disk.directory import DiskDirectory
from kvconnect.backends.disk.errors import IndexConnectionLost, IndexDamaged, IndexReadOnly
from kvconnect.backends.disk.format import INDEX_NAME
from kvconnect.backends.disk.path import identity, replace_index, warn_damaged
from kvconnect.backends.disk.settings import DiskSettings
from kvconnect.backends.lanes import Lanes
from kvconnect.errors import BackendUnavailable, ConfigurationError

logger = logging.getLogger("kvconnect")

T = TypeVar("T")

# Seconds after which times of use are written, so that other processes drop the right blocks.
_FLUSH_S = 5.0
# Seconds between two attempts to write to a directory that could not be written to.
_RETRY_S = 5.0


def not_open(settings: DiskSettings) -> BackendUnavailable:
    """Returns the error of a call before the store is open or after it is closed."""
    return BackendUnavailable(f"disk store {settings.path}: is not open")


class DiskClient:
    """A disk store from its opening to its closing. Belongs to an event loop.

    Args:
        settings: the store's settings.
        at: called with the name of each point of a save that is reached; for tests.

    Attributes:
        lanes: the store's threads. A lookup does not wait for loads, nor a load, which a prompt
            waits for, for saves.
        directory: the directory that is open now, if any.

    Raises:
        BackendUnavailable: the threads cannot be started; none is left running.
    """

    def __init__(self, settings: DiskSettings, at: Callable[[str], None]) -> None:
        self.lanes = Lanes("kvconnect-disk", index=1, loads=5, saves=4)
        self.directory: DiskDirectory | None = None
        self._settings = settings
        self._at = at
        self._lock = threading.Lock()
        self._closed = self._was_open = False
        self._retry_at = 0.0
        self._flush_timer: asyncio.TimerHandle | None = None
        self._flushing: Future[None] | None = None

    async def run(self, lane: str, work: Callable[[DiskDirectory], T]) -> T:
        """Runs `work` with the directory on a thread of `lane` and returns the result.

        If the directory was replaced, or its index is damaged or lost, `work` runs once more, with
        the directory that is opened then.

        Raises:
            BackendUnavailable: the disk failed, or the second directory is damaged, too.
            ConfigurationError: at the first call only: this store may not open the directory.
        """
        try:
            return await self.lanes[lane].run(partial(self._work, work))
        finally:
            self._flush_later()

    async def close(self) -> None:
        """Waits for calls in flight, writes the times of use to the index, closes everything.

        If the caller is cancelled, everything is closed nevertheless once those calls have ended.
        """
        try:
            await self.lanes.idle()
        finally:
            if self._flush_timer is not None:
                self._flush_timer.cancel()
            closing = self.lanes["saves"].submit(self._close)
            closing.add_done_callback(lambda _: self.lanes.end())
        await asyncio.shield(asyncio.wrap_future(closing))
        await asyncio.to_thread(self.lanes.join)

    def retry_read_only(self) -> None:
        """Makes the next call open a read-only directory again, in case it is writable by now.

        Does so at most every five seconds.
        """
        directory = self.directory if self._settings.access == "store" else None
        if directory is not None and directory.read_only and time.monotonic() >= self._retry_at:
            self._retry_at = time.monotonic() + _RETRY_S
            directory.forget()

    def _flush_later(self) -> None:
        if self._flush_timer is None:
            loop = asyncio.get_running_loop()
            self._flush_timer = loop.call_later(_FLUSH_S, self._start_flush)

    def _start_flush(self) -> None:
        self._flush_timer = None
        if self._flushing is not None and not self._flushing.done():
            return  # a disk that hangs must not collect them
        with suppress(BackendUnavailable):  # a call is still running after a cancelled `close`
            self._flushing = self.lanes["saves"].submit(self._flush)

    # The methods below run on threads of the lanes.

    def _flush(self) -> None:
        directory = self.directory
        if directory is not None:
            with directory.in_use():
                directory.flush()

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            directory, self.directory = self.directory, None
        if directory is not None:
            directory.close()

    def _work(self, work: Callable[[DiskDirectory], T], *, again: bool = True) -> T:
        try:
            with self._opened() as directory:
                try:
                    return work(directory)
                except (IndexDamaged, IndexReadOnly, IndexConnectionLost) as error:
                    if not again:
                        raise
                    self._mend(directory, error)
        except BackendUnavailable:
            raise
        except ConfigurationError as error:
            # The settings worked once, so this is a state of the disk that may end.
            if not self._was_open:
                raise
            raise BackendUnavailable(str(error)) from error
        except (OSError, IndexDamaged) as error:
            raise BackendUnavailable(f"disk store {self._settings.path}: {error}") from error
        return self._work(work, again=False)

    @contextmanager
    def _opened(self) -> Iterator[DiskDirectory]:
        with ExitStack() as using:
            with self._lock:
                if self._closed:  # a call that outlived a `close` that was cancelled
                    raise not_open(self._settings)
                if self.directory is not None and not self.directory.current:
                    self.directory.end()
                    self.directory = None
                if self.directory is None:
                    self.directory = self._open()
                    self._was_open = True
                directory = self.directory
                using.enter_context(directory.in_use())
            yield directory

    def _open(self) -> DiskDirectory:
        seen = identity(self._settings.path)
        try:
            return DiskDirectory(self._settings, self.lanes, at=self._at)
        except (IndexDamaged, IndexReadOnly) as error:
            self._must_replace(error)
            replace_index(self._settings.path, seen, error)
        return DiskDirectory(self._settings, self.lanes, at=self._at)

    def _mend(self, directory: DiskDirectory, error: Exception) -> None:
        if isinstance(error, IndexConnectionLost):
            logger.warning("%s; it is opened again", error)
            directory.forget()
            return
        self._must_replace(error)
        if directory.read_only:
            warn_damaged(self._settings.path, error)
            directory.give_up_index()
        else:
            replace_index(self._settings.path, directory.identity, error)

    def _must_replace(self, error: Exception) -> None:
        """Raises unless the index is damaged and this store may replace it.

        An index that is only read-only is not replaced.
        """
        path = self._settings.path
        # SQLite also reports a file with a damaged header as read-only.
        if isinstance(error, IndexReadOnly) and not os.access(path / INDEX_NAME, os.W_OK):
            raise error
        if self._settings.access != "store":
            raise BackendUnavailable(
                f"disk store {path}: the index is damaged ({error}); an engine that opens it "
                f"starts it anew"
            ) from error
