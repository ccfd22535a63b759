"""Engines in processes of their own that many requests are sent to at once, and that are killed."""

from __future__ import annotations

import faulthandler
import itertools
import multiprocessing
import os
import queue
import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engines import address_of, held_by, open_engine
from networks import end_with_parent

from kvconnect import LLM, SamplingParams
from kvconnect.errors import EngineClosed

_CONTEXT = multiprocessing.get_context("forkserver")


class Gone(Exception):
    """The process ended before it answered."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request.

    Attributes:
        tokens: generated.
        reason: why it ended, as the engine says.
        fetched: tokens of the prompt that came from another engine.
        carried: what a router hands on.
    """

    tokens: list[int]
    reason: str | None
    fetched: int
    carried: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process takes of its machine."""

    threads: int
    descriptors: int
    nbytes: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """That of a process now."""
        process = Path(f"/proc/{pid}")
        pages = int((process / "statm").read_text().split()[1])
        return cls(
            threads=len(list((process / "task").iterdir())),
            descriptors=len(list((process / "fd").iterdir())),
            nbytes=pages * os.sysconf("SC_PAGE_SIZE"),
        )


class FleetEngine:
    """An engine of a fleet: one process after the other, at the same address. Thread-safe.

    Args:
        name: of its role and number.
        model, role, more: as `open_engine`.

    Attributes:
        died: how often a process of it ended that was not told to.
        frozen_s: seconds that it was stopped, in all.
    """

    def __init__(self, name: str, model: Path, role: str, more: dict[str, Any]) -> None:
        self.name = name
        self.role = role
        self.address = ""
        self.died = 0
        self.incarnation = 0
        self._frozen_s = 0.0
        self._frozen_at: float | None = None
        self._model = model
        self._more = more
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._asked: dict[int, Future[Any]] = {}
        self._told_to_end = False
        self._open = False
        self._to_send: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()

    # ------------------------------------------------------------------ its processes

    def start(self) -> None:
        """A process; blocks until it is open."""
        more = dict(self._more)
        if self.address:
            more["transfer"] = more["transfer"] | {"listen": self.address}
        self._pipe, there = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(there, self._model, self.role, more))
        self._process.start()
        there.close()
        assert self._pipe.poll(60), f"{self.name} does not start"
        self.address = self._pipe.recv()
        self.incarnation += 1
        self._told_to_end = False
        self._to_send = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._writer = threading.Thread(target=self._write, daemon=True)
        with self._lock:
            self._open = True
        self._reader.start()
        self._writer.start()

    def kill(self) -> None:
        """SIGKILL."""
        self._told_to_end = True
        self._process.kill()
        self._gone()

    def end(self) -> None:
        """Ends it well; what it has not answered is gone."""
        self._told_to_end = True
        self._to_send.put(("end", ()))
        self._gone()
        assert self._process.exitcode == 0, f"{self.name}: {self._process.exitcode}"

    def _gone(self) -> None:
        self._process.join(60)
        assert self._process.exitcode is not None, f"{self.name} does not end"
        self._to_send.put(None)
        for thread in (self._reader, self._writer):
            thread.join(60)
        if self._frozen_at is not None:
            self._thaw()

    def freeze(self) -> None:
        """SIGSTOP."""
        self._frozen_at = time.monotonic()
        os.kill(self.pid, signal.SIGSTOP)

    def wake(self) -> None:
        """SIGCONT, if it is stopped."""
        if self._frozen_at is not None:
            os.kill(self.pid, signal.SIGCONT)
            self._thaw()

    def _thaw(self) -> None:
        assert self._frozen_at is not None
        self._frozen_s += time.monotonic() - self._frozen_at
        self._frozen_at = None

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def frozen_s(self) -> float:
        since = self._frozen_at
        return self._frozen_s + (0.0 if since is None else time.monotonic() - since)

    # ------------------------------------------------------------------ what it is asked

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        carried: dict[str, Any] | None,
        salt: str | None,
    ) -> tuple[int, Future[Answer]]:
        """A request; its number is for `abort`."""
        return self._ask("submit", prompt, params, carried, salt)

    def abort(self, number: int) -> None:
        """Ends a request early."""
        self._to_send.put(("abort", (number,)))

    def held(self) -> Future[dict[str, int]]:
        """What it keeps for requests, peers and reads; see `held_by`."""
        return self._ask("held")[1]

    def tell_stacks(self) -> None:
        """Has it write what its threads do to the standard error."""
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.5)  # for a report that nothing depends on

    def _ask(self, name: str, *args: Any) -> tuple[int, Future[Any]]:
        number, future = next(self._numbers), Future[Any]()
        future.set_running_or_notify_cancel()  # a caller that waits no longer cancels nothing
        with self._lock:
            if self._open:
                self._asked[number] = future
                self._to_send.put((name, (number, *args)))
                return number, future
        future.set_exception(Gone(self.name))
        return number, future

    def _write(self) -> None:
        """On a thread of its own: a stopped process takes nothing."""
        while (message := self._to_send.get()) is not None:
            try:
                self._pipe.send(message)
            except OSError:
                return  # the reader sees that, too

    def _read(self) -> None:
        try:
            while True:
                number, value = self._pipe.recv()
                with self._lock:
                    future = self._asked.pop(number)
                if isinstance(value, Exception):
                    future.set_exception(value)
                else:
                    future.set_result(value)
        except (EOFError, OSError):
            self.died += not self._told_to_end
            self._fail()

    def _fail(self) -> None:
        with self._lock:
            self._open = False
            asked, self._asked = self._asked, {}
        for future in asked.values():
            future.set_exception(Gone(self.name))


# ---------------------------------------------------------------------- in the process


def _serve(pipe: Connection, model: Path, role: str, more: dict[str, Any]) -> None:
    end_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with open_engine(model, role, **more) as llm:
        pipe.send("" if role == "decode" else address_of(llm))
        served = _Served(llm, pipe)
        while True:
            name, args = pipe.recv()
            if name == "end":
                break
            getattr(served, name)(*args)


class _Served:
    def __init__(self, llm: LLM, pipe: Connection) -> None:
        self._llm = llm
        self._pipe = pipe
        self._sending = threading.Lock()
        self._handles: dict[int, Any] = {}

    def submit(
        self,
        number: int,
        prompt: list[int],
        params: SamplingParams,
        carried: dict[str, Any] | None,
        salt: str | None,
    ) -> None:
        handle = self._llm.submit(prompt, params, cache_salt=salt, kv_transfer_params=carried)
        self._handles[number] = handle
        threading.Thread(target=self._answer, args=(number, handle), daemon=True).start()

    def _answer(self, number: int, handle: Any) -> None:
        try:
            output = handle.result()
            tokens, fetched = list(output.output_token_ids), output.reused_store_tokens
            reason = output.finish_reason
            self._send(number, Answer(tokens, reason, fetched, output.kv_transfer_params))
        except EngineClosed:
            self._send(number, Gone("closed"))
        except Exception as error:  # noqa: BLE001  told to the test
            self._send(number, error)
        finally:
            del self._handles[number]

    def abort(self, number: int) -> None:
        if handle := self._handles.get(number):
            handle.abort()

    def held(self, number: int) -> None:
        self._send(number, held_by(self._llm))

    def _send(self, number: int, value: object) -> None:
        with self._sending:
            self._pipe.send((number, value))
