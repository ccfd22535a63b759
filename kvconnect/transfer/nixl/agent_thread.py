"""The one thread that makes every NIXL call, and polls the pulls that are under way."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal, TypeVar

from kvconnect.errors import PeerUnreachable, PullFailed
from kvconnect.trace import count
from kvconnect.transfer.nixl.agent import Agent, AgentError
from kvconnect.transfer.nixl.nixl_pull import NixlPull, PullPart

logger = logging.getLogger("kvconnect")

_T = TypeVar("_T")
_SHORTEST_S, _LONGEST_S = 20e-6, 1e-3
_DROP_NOTIFICATIONS_S = 30.0


class AgentThread:
    """A thread that owns an `Agent`. While no pull runs it sleeps, else it polls with back-off.

    Methods may be called from any thread. Functions that are passed to `call` run on this thread.
    """

    def __init__(self, *, quiescent: bool) -> None:
        self._quiescent = quiescent
        # Not a SimpleQueue: before Python 3.13 its `get` waits without end if the timeout is over
        # before it has begun to wait, as one of microseconds may be.
        self._commands: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._parts: list[PullPart] = []
        self._agent: Agent | None = None
        self._ended = False
        self._lock = threading.Lock()
        self._known: dict[str, bytes] = {}
        self._broken: set[str] = set()
        self._unused: set[str] = set()
        self._leaving: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="kvconnect-nixl", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], _T], timeout_s: float | None = None) -> _T:
        """Runs `function` on the thread and returns its result or raises its error; blocks.

        Raises:
            TimeoutError: `function` has not ended within `timeout_s`; it still runs to its end.
        """
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - raised where it was called
                future.set_exception(error)

        self._put(run)
        return future.result(timeout_s)

    def create(self, make: Callable[[], Agent]) -> None:
        """Makes the agent by calling `make` on the thread; blocks.

        Raises:
            ConfigurationError: `make` raised it; there is no agent then.
        """

        def create() -> None:
            self._agent = make()

        self.call(create)

    @property
    def agent(self) -> Agent:
        """The agent, for functions passed to `call`.

        Raises:
            PullFailed: there is no agent.
        """
        if self._agent is None:
            raise PullFailed("closed", "the transport is closed or being built anew")
        return self._agent

    def submit(self, pull: NixlPull, peer: str, prepare: Callable[[Agent], None]) -> None:
        """Makes the thread call `prepare` and then read `pull` from the agent `peer`. Never blocks.

        If `prepare` fails, `pull` fails, and nothing of it is read.
        """
        part = PullPart(pull, peer, self.wake)
        pull.join(part)

        def begin() -> None:
            try:
                self._mend(peer)
                prepare(self.agent)
            except PullFailed as error:
                part.refuse(error)
                return
            except Exception as error:  # only this pull fails: no read of it was begun
                part.refuse(PullFailed("peer", f"{peer}: {error!r}"))
                raise
            self._parts.append(part)

        self._put(begin)

    def assist(self, pull: NixlPull, peer: str, metadata: bytes) -> None:
        """Reads a part of another agent's pull, if the agent `peer` can be reached. Never blocks.

        The part has only transfers that no agent has begun by then. An error before its first
        transfer does not affect the other agent.
        """

        def begin() -> None:
            if pull.stopped or pull.terminal.is_set():
                return
            try:
                self.reach(peer, metadata)
            except (AgentError, PeerUnreachable, PullFailed) as error:
                logger.debug("%s: its second agent does not read: %s", peer, error)
                return
            part = PullPart(pull, peer, self.wake)
            if pull.join(part):
                self._parts.append(part)

        self._put(begin)

    def wake(self) -> None:
        """Makes the thread check its parts of pulls now."""
        self._put(None)

    def disconnect(
        self, peer: str, error: PullFailed, *, then: Literal["forget", "keep", "use"]
    ) -> None:
        """Fails the pulls from the agent `peer`. Never blocks.

        Args:
            peer: the name of the agent.
            error: the error of the pulls.
            then: "forget" removes an agent that has ended, once the pulls are terminal. "keep"
                keeps the connection for the next `reach`: UCX closes none to a running agent. "use"
                leaves the connection in use.
        """

        def disconnect() -> None:
            if then == "forget":
                self._leaving.add(peer)
            elif then == "keep" and peer in self._known:
                self._unused.add(peer)
            for part in self._parts:
                if part.peer == peer:
                    part.pull.fail(error)

        self._put(disconnect)

    def destroy(self, error: PullFailed) -> None:
        """Ends the agent and its parts of pulls; unfinished pulls fail with `error`. Blocks."""

        def destroy() -> None:
            agent, self._agent = self._agent, None
            self._known.clear()
            self._broken.clear()
            self._unused.clear()
            self._leaving.clear()
            parts, self._parts = self._parts, []
            if agent is not None:
                for part in parts:
                    part.cut_off(agent, error)
                agent.destroy()
            for part in parts:
                part.end()

        self.call(destroy)

    def reach(self, peer: str, metadata: bytes) -> None:
        """Connects to the agent `peer`, again if a pull from it failed or its metadata changed.

        Unused other agents that have ended meanwhile are removed. For functions passed to `call`.

        Raises:
            PeerUnreachable: the agent cannot be connected again since reads from it are under way,
                or `metadata` are of another agent.
            AgentError: the agent does not answer.
        """
        agent, sound = self.agent, peer not in self._broken and peer not in self._leaving
        if sound and self._known.get(peer) == metadata and self._still_reached(agent, peer):
            return
        if peer in self._known:
            if self._under_way(peer):
                raise PeerUnreachable(f"{peer}: reads from it are under way")
            self._remove(agent, peer)
        for other in [one for one in self._unused if not self._under_way(one)]:
            if not agent.reaches(other):
                self._remove(agent, other)
        name = agent.add_peer(metadata)
        self._known[name] = metadata
        if name != peer:
            self._remove(agent, name)
            raise PeerUnreachable(f"{peer}: its metadata are of the agent {name}")

    def _still_reached(self, agent: Agent, peer: str) -> bool:
        """Returns whether an earlier connection to `peer` can still be used."""
        if peer in self._unused and not agent.reaches(peer):
            return False
        self._unused.discard(peer)
        return True

    def _mend(self, peer: str) -> None:
        """Connects again to a peer whose last pull failed, unless reads from it are under way.

        Raises:
            PullFailed: the peer does not answer.
        """
        metadata = self._known.get(peer)
        if metadata is None or peer not in self._broken or self._under_way(peer):
            return
        self._remove(self.agent, peer)
        try:
            self.reach(peer, metadata)
        except (AgentError, PeerUnreachable) as error:
            raise PullFailed("peer", f"{peer}: {error}") from error

    def _remove(self, agent: Agent, peer: str) -> None:
        agent.remove_peer(peer)
        self._known.pop(peer, None)
        self._broken.discard(peer)
        self._unused.discard(peer)
        self._leaving.discard(peer)

    def _under_way(self, peer: str) -> bool:
        return any(part.peer == peer for part in self._parts)

    def close(self) -> None:
        """Ends the thread; blocks until it has ended. To be called after `destroy`."""
        with self._lock:
            self._ended = True
            self._commands.put(None)
        self._thread.join()

    def _put(self, command: Callable[[], None] | None) -> None:
        with self._lock:
            if not self._ended:
                self._commands.put(command)
                return
        if command is not None:
            command()  # there is no agent any more, so it only reports that

    def _run(self) -> None:
        wait_s = _SHORTEST_S
        drop_at = time.monotonic() + _DROP_NOTIFICATIONS_S
        while not self._ended:
            try:
                polls = any(part.under_way for part in self._parts)
                if self._take(wait_s if polls else _DROP_NOTIFICATIONS_S):
                    wait_s = _SHORTEST_S
                if (now := time.monotonic()) >= drop_at and self._agent is not None:
                    drop_at = now + _DROP_NOTIFICATIONS_S
                    self._agent.drop_notifications()
                changed = self._advance()
                wait_s = _SHORTEST_S if changed else min(wait_s * 1.5, _LONGEST_S)
                self._forget_peers()
            except Exception:  # without this thread no pull would end, nor could it be closed
                count("transfer.nixl.error")
                logger.exception("NIXL's thread goes on after an error")
                wait_s = _LONGEST_S
        while not self._commands.empty():
            with suppress(Exception):
                self._take(0.0)

    def _take(self, timeout_s: float | None) -> bool:
        """Runs one command; waits for it up to `timeout_s`. Returns whether there was one."""
        try:
            command: Any = self._commands.get(timeout=timeout_s)
        except queue.Empty:
            return False
        if command is not None:
            command()
        return True

    def _forget_peers(self) -> None:
        if self._agent is not None:
            for peer in [peer for peer in self._leaving if not self._under_way(peer)]:
                self._remove(self._agent, peer)

    def _advance(self) -> bool:
        changed = False
        agent = self._agent
        if agent is None:
            return changed
        for part in self._parts:
            try:
                changed = part.advance(agent, quiescent=self._quiescent) or changed
            except Exception as error:  # it is not known which of its transfers are under way
                part.pull.fail(PullFailed("peer", f"{part.peer}: {error!r}"))
                raise
            if part.error is not None:
                self._broken.add(part.peer)
        if changed:
            self._parts = [part for part in self._parts if not part.ended]
        return changed
