"""A soak of an engine of several ranks whose store's network and processes fail at random."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from kvconnect.errors import RankLost
from kvconnect.testing.check import demand
from kvconnect.testing.checks.end_to_end import model
from kvconnect.testing.faults.tcp_proxy import TcpProxy
from kvconnect.testing.subject import Address, Subject
from kvconnect_bench.soaks.soak import Soak, SoakReport, random_fault

if TYPE_CHECKING:
    from kvconnect.engine.llm import LLM
    from kvconnect.request import SamplingParams

_ROUNDS_PER_OPENING = 6
_PROMPTS = 24
_MAX_TOKENS = 6
_STORE_S = 5.0
"""The most seconds that a load or a save may take."""
_ANSWER_S = 60.0
"""The most seconds of a round: all loads time out in turn, and the tokens are computed."""
_LOST_S = 5.0
_RECOVERY_S = 60.0


def soak_ranks(
    subject: Subject,
    *,
    seconds: float = 1800.0,
    seed: int = 0,
    told: Callable[[float], None] | None = None,
) -> SoakReport:
    """Generates with an engine of ``subject.ranks`` ranks while store and ranks fail. Blocks.

    In each round the network of the store (with ``subject.address``), or a rank, or nothing fails:
    ranks are stopped for a second, or killed, after which the engine is restarted.

    Args:
        subject: the store; `store_url` is written, with an address `store_url_via`, too.
        seconds: how long; the last round is finished.
        seed: of faults and prompts.
        told: called after each opening of the engine with the seconds since the last time.

    Raises:
        Violation: tokens differ from those without a store, an answer or an error took too long,
            the store was not used again, a process is left, or memory or file descriptors leak. The
            message names the round's fault and the seed.
        Unsupported: other processes cannot open the store.
    """
    return _RankSoak(subject, seed).run(seconds, told)


class _RankSoak(Soak):
    def __init__(self, subject: Subject, seed: int) -> None:
        super().__init__(subject, seed)
        self._prompts = self._made_prompts()
        self._expected = self._answers_of_one_rank()

    # ------------------------------------------------------------------ one engine

    def opening(self, end: float) -> int:
        rounds = 0
        with ExitStack() as tools:
            proxy = None
            url = self.subject.store_url()
            if (address := self.subject.address) is not None:
                proxy = tools.enter_context(TcpProxy(address.host, address.port))
                url = self.subject.store_url_via(Address(proxy.host, proxy.port))
            self.fault = "none"
            llm = tools.enter_context(_engine(url, self.subject.ranks))
            pids = llm.process_ids[1:]
            self.counts["engines"] += 1
            alive = True
            while alive and rounds < _ROUNDS_PER_OPENING and time.monotonic() < end:
                rounds += 1
                alive = self._round(llm, proxy)
            if alive:
                self.fault = "none"
                self._recovers(llm)
        until = time.monotonic() + _LOST_S
        while left := [pid for pid in pids if _runs(pid)]:
            demand(time.monotonic() < until, f"processes {left} outlive their engine")
            time.sleep(0.01)
        return rounds

    def _round(self, llm: LLM, proxy: TcpProxy | None) -> bool:
        """Checks answers during a fault and after it; returns whether the engine still runs."""
        kinds = ["nothing", "stopped", "killed", *["nothing" if proxy is None else "network"] * 3]
        kind = self.random.choice(kinds)
        self.fault = f"a rank is {kind}" if kind in {"stopped", "killed"} else kind
        if kind == "network" and proxy is not None:
            fault = random_fault(self.random)
            self.fault = repr(fault)
            proxy.set(fault)
            self._answers(llm)
            proxy.heal()
        elif kind == "killed":
            self._kill(llm)
            return False
        elif kind == "stopped":
            pid, seconds = self.random.choice(llm.process_ids[1:]), self.random.uniform(0.1, 1.5)
            with _stopped(pid, seconds):
                self._answers(llm)
        self._answers(llm)
        return True

    def _kill(self, llm: LLM) -> None:
        handles = [llm.submit(one) for one in self._prompts[:3]]
        pid = self.random.choice(llm.process_ids[1:])
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        for handle in handles:
            with suppress(RankLost):
                handle.result(_ANSWER_S)
        took = time.monotonic() - killed
        demand(took < _LOST_S, f"requests ended {took:.1f} s after a rank was killed")
        self.counts["ranks killed"] += 1

    # ------------------------------------------------------------------ answers

    def _answers(self, llm: LLM) -> int:
        """Checks some answers; returns how many of their tokens came from the store."""
        chosen = self.random.sample(range(_PROMPTS), 6)
        began = time.monotonic()
        handles = [llm.submit(self._prompts[one], _greedy()) for one in chosen]
        reused = 0
        for one, handle in zip(chosen, handles, strict=True):
            output = handle.result(_ANSWER_S)
            right = list(output.output_token_ids) == self._expected[one]
            demand(right, f"prompt {one} has other tokens than without a store")
            reused += output.reused_store_tokens
            self.counts["answers"] += 1
        took = time.monotonic() - began
        demand(took < _ANSWER_S, f"six answers took {took:.0f} s")
        self.counts["tokens from the store"] += reused
        return reused

    def _recovers(self, llm: LLM) -> None:
        until = time.monotonic() + _RECOVERY_S
        while not self._answers(llm):
            demand(time.monotonic() < until, "nothing is loaded any more, though all is well")
        self.counts["recoveries"] += 1

    def _made_prompts(self) -> list[list[int]]:
        """Makes prompts of which some share prefixes; together they exceed the cache."""
        prompts: list[list[int]] = []
        for number in range(_PROMPTS):
            shared = prompts[self.random.randrange(number)] if number > 4 else []
            kept = shared[: self.random.randrange(len(shared) + 1)]
            more = self.random.randrange(20, 60)
            prompts.append([*kept, *(self.random.randrange(1, 250) for _ in range(more))][:150])
        return prompts

    def _answers_of_one_rank(self) -> list[list[int]]:
        with _engine(None, 1) as llm:
            outputs = llm.generate([*self._prompts], _greedy())
        return [list(output.output_token_ids) for output in outputs]


@contextmanager
def _engine(url: str | None, ranks: int) -> Iterator[LLM]:
    from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig

    connector = None
    if url is not None:
        connector = KvCacheConnectorConfig(
            url=url,
            lookup_timeout_ms=1000,
            load_timeout_s=_STORE_S,
            save_timeout_s=_STORE_S,
            overlap_loads=False,
        )
    with LLM(
        model(),
        kv_cache=KvCacheConfig(tokens_per_block=16, max_tokens=480),
        connector=connector,
        dtype="float64",
        device="cpu",
        max_num_tokens=96,
        tensor_parallel_size=ranks,
    ) as llm:
        yield llm


def _greedy() -> SamplingParams:
    from kvconnect import SamplingParams

    return SamplingParams(max_tokens=_MAX_TOKENS, ignore_eos=True)


@contextmanager
def _stopped(pid: int, seconds: float) -> Iterator[None]:
    """Stops the process for so long; the block ends after that, even if it raises."""
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(seconds, os.kill, (pid, signal.SIGCONT))
    timer.start()
    try:
        yield
    finally:
        timer.join()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
