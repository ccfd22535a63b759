"""Reads a store for the page: lists it when asked, and keeps the last listing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kvconnect.errors import ConfigurationError, KvConnectError
from kvconnect.operations.listed_store import ListedStore, list_store, tokens_of
from kvconnect.operations.overview import store_overview
from kvconnect.operations.prefix_tree import TreeRow
from kvconnect.operations.run import AbortableRun
from kvconnect.operations.selection import model_prefix
from kvconnect.prometheus.overview import Overview
from kvconnect.server.errors import ShuttingDown

if TYPE_CHECKING:
    from kvconnect.engine.request.tokenizer import Tokenizer

T = TypeVar("T")

_LEAST_INTERVAL_S = 5.0
"""Between the end of a listing and the next one."""
_TIMES = 10.0
"""That time is also so many times what the last listing took."""

_OVERVIEW_S = 2.0
"""Several browsers that ask at once make one question to the store."""


class ModelTexts:
    """The texts of the blocks of one model.

    Args:
        tokenizer: of the model.
        directory: of the model.
        revision: stands for its weights; ``None``: their content does.
    """

    def __init__(self, tokenizer: Tokenizer, directory: Path, revision: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._of = (str(directory), revision)
        self._prefix: str | None = None

    @classmethod
    def of(cls, model: str, revision: str | None) -> Self:
        """Returns the texts of a model directory, or of a name in the Hugging Face cache.

        May read all of the model's files, once.

        Raises:
            ConfigurationError: there is no such model, or it has no tokenizer.
        """
        from kvconnect.engine.checkpoint.hub_cache import model_directory
        from kvconnect.engine.request.tokenizer import Tokenizer

        directory = model_directory(model)
        if (tokenizer := Tokenizer.of(directory)) is None:
            raise ConfigurationError(f"model: '{directory}' has no tokenizer")
        found = cls(tokenizer, directory, revision)
        found._prefix = model_prefix(*found._of)
        return found

    def text(self, model: bytes, tokens: Sequence[int]) -> str | None:
        """Returns the text of `tokens`; ``None``: there is none, or `model` is another one's tag.

        The first call may read the model's files.
        """
        if self._prefix is None:
            self._prefix = model_prefix(*self._of)
        if self._prefix is None or not model.hex().startswith(self._prefix):
            return None
        try:
            return self._tokenizer.whole_text(tokens)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            return None  # a damaged or hostile store has tokens that no tokenizer knows


class StoreReader:
    """Reads a store on threads of its own. Its methods are called on one event loop.

    Args:
        url: of the store.
        names: of tenants, by the digest of their salt.
        texts: of the model's blocks; ``None``: token ids are all that is known.

    Attributes:
        listed: the last listing; ``None``: there is none yet.
        number: of that listing, from 1 on.
        num_listed: blocks that the running listing has listed.
        error: why the last listing failed; ``None``: it did not.
    """

    def __init__(
        self, url: str, names: Mapping[bytes, str], texts: ModelTexts | None = None
    ) -> None:
        self.listed: ListedStore | None = None
        self.number = 0
        self.num_listed = 0
        self.error: str | None = None
        self._url, self._names, self._texts = url, names, texts
        # One lists, which may take minutes; the other answers meanwhile.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="kvconnect-page")
        self._runs: set[AbortableRun] = set()
        self._listing: asyncio.Task[None] | None = None
        self._next_at = 0.0
        self._overview: Overview | None = None
        self._asking: asyncio.Task[Overview] | None = None

    @property
    def is_listing(self) -> bool:
        """Returns whether the store is being listed."""
        return self._listing is not None

    @property
    def fresh_in_s(self) -> float:
        """Returns after how many seconds the store may be listed again."""
        return max(0.0, self._next_at - time.monotonic())

    def refresh(self) -> None:
        """Lists the store again, unless that runs, or has just been done; does not wait for it."""
        if self._listing is None and not self.fresh_in_s:
            self.num_listed = 0
            self._listing = asyncio.create_task(self._list())

    async def overview(self) -> Overview:
        """Returns the numbers of the store, at most 2 seconds old.

        Raises:
            BackendUnavailable: it cannot be reached.
        """
        if self._overview is None or time.time() - self._overview.at > _OVERVIEW_S:
            if self._asking is None:
                self._asking = asyncio.create_task(self._run(partial(store_overview, self._url)))
                self._asking.add_done_callback(self._told)
            self._overview = await asyncio.shield(self._asking)
        return self._overview

    async def texts(
        self, listed: ListedStore, rows: Sequence[TreeRow]
    ) -> list[tuple[list[int], str | None]]:
        """Returns the first tokens of each of `rows`, and their text where that is known.

        Raises:
            BackendUnavailable: the store fails.
        """
        found = await self._run(partial(tokens_of, self._url, listed.tree, rows))
        ids = [one.tolist() for one in found]
        if self._texts is None:
            return [(one, None) for one in ids]
        decode = self._texts.text
        models = [row.space.model for row in rows]
        loop = asyncio.get_running_loop()
        texts = await loop.run_in_executor(self._threads, lambda: [*map(decode, models, ids)])
        return list(zip(ids, texts, strict=True))

    def close(self) -> None:
        """Ends what runs, and waits for it; called when the event loop has ended."""
        for run in list(self._runs):
            run.abort()
        self._threads.shutdown(cancel_futures=True)

    def _told(self, asked: asyncio.Task[Overview]) -> None:
        self._asking = None
        if not asked.cancelled():
            asked.exception()  # raised where it is waited for, if it still is

    def _advance(self, blocks: int) -> None:
        self.num_listed += blocks

    async def _list(self) -> None:
        started_at = time.monotonic()
        try:
            self.listed = await self._run(
                partial(list_store, self._url, self._names, self._advance)
            )
            self.number += 1
            self.error = None
        except (KvConnectError, OSError, ShuttingDown) as error:
            self.error = str(error)
        finally:
            took_s = time.monotonic() - started_at
            self._next_at = time.monotonic() + max(_LEAST_INTERVAL_S, _TIMES * took_s)
            self._listing = None

    async def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        run = AbortableRun()
        self._runs.add(run)
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, _perform, run, work
            )
        finally:
            self._runs.discard(run)


def _perform(run: AbortableRun, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    try:
        return run(work())
    except asyncio.CancelledError as error:
        raise ShuttingDown from error
