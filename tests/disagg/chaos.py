"""Requests over a fleet that is killed, frozen and restarted, as a router sends them."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from engines import ANSWER, PREFILL, hands_out
from fleet import Answer, FleetEngine, Gone, Usage

_T = TypeVar("_T")

CLIENTS = 64
DEADLINE_S = 20.0
"""Of an attempt, without what its engine is stopped: claim, load and computing, in a queue."""

_ROUTER_S = 2.5  # what it waits for a prefill that does not answer
_QUIET_S = 60.0  # a lease, and the deadlines of loads and saves, on a busy machine


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked, and what one engine alone answers."""

    tokens: list[int]
    answer: list[int]


class Chaos:
    """Rounds of requests and of what happens to the engines meanwhile; nothing is held between.

    Args:
        prefills, decodes: the fleet. The first of each is never killed: it is what has to stay
            the same over all rounds.
        prompts: to ask for.
        seed: all that chance depends on, but for when things happen.

    Attributes:
        counts: what was done, and what came of it.
        slowest_s: of the attempts that were answered, without what their engine was stopped.
        usage: of the first engines, after each round.
    """

    def __init__(
        self,
        prefills: Sequence[FleetEngine],
        decodes: Sequence[FleetEngine],
        prompts: Sequence[Prompt],
        seed: int,
    ) -> None:
        self._prefills, self._decodes = prefills, decodes
        self._engines = (*prefills, *decodes)
        self._prompts = prompts
        self._chance = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.slowest_s = 0.0
        self.usage: dict[str, list[Usage]] = {}
        self._number = 0
        self._over = asyncio.Event()
        self._attacks: set[asyncio.Task[None]] = set()

    async def round(self, seconds: float) -> None:
        """Requests under attack for so long; then all is whole again, and nothing is held."""
        self._over.clear()
        async with asyncio.TaskGroup() as group:
            attack = group.create_task(self._attack())
            clients = [group.create_task(self._client()) for _ in range(CLIENTS)]
            await asyncio.sleep(seconds)
            self._over.set()
            await attack
            # What is left over is answered by engines that are all there.
            await asyncio.gather(*clients)
        await self._recovered()
        await self._nothing_held()
        for engine in (self._prefills[0], self._decodes[0]):
            self.usage.setdefault(engine.name, []).append(Usage.of(engine.pid))
        self.counts["rounds"] += 1

    # ------------------------------------------------------------------ requests

    async def _client(self) -> None:
        while not self._over.is_set():
            chance = random.Random(self._chance.random())
            await self._request(chance, chance.choice(self._prompts))

    async def _request(self, chance: random.Random, prompt: Prompt) -> None:
        self._number += 1
        self.counts["requests"] += 1
        number = self._number
        # Half of them find nothing that the decode has kept of an earlier one.
        salt = f"tenant {number}" if chance.random() < 0.5 else None
        for attempt in range(100):
            # A request is repeated as long as its decode goes: no client sees that.
            prefill, decode = chance.choice(self._prefills), chance.choice(self._decodes)
            try:
                await self._attempt(chance, prompt, salt, f"{number}-{attempt}", prefill, decode)
            except Gone:
                self.counts["attempts whose decode died"] += 1
                await asyncio.sleep(0.05)
            else:
                return
        raise AssertionError(f"request {number}: every decode that it was sent to died")

    async def _attempt(
        self,
        chance: random.Random,
        prompt: Prompt,
        salt: str | None,
        name: str,
        prefill: FleetEngine,
        decode: FleetEngine,
    ) -> None:
        here, there = hands_out(prefill.address, name)
        carried: dict[str, Any] | None = there
        one = ANSWER.model_copy(update={"max_tokens": chance.choice([0, 0, 1])})
        if chance.random() < 0.5:
            number, computed = prefill.submit(prompt.tokens, one, here, salt)
            if chance.random() < 0.05:
                self._later(chance, prefill, number)
        else:
            number, computed = prefill.submit(prompt.tokens, PREFILL, {"do": "prefill"}, salt)
            carried = await self._routed(prefill, number, computed)
        number, answer = decode.submit(prompt.tokens, ANSWER, carried, salt)
        if chance.random() < 0.15:
            self._later(chance, decode, number)
        output = await self._in_time(answer, decode)
        self._check(prompt, output)

    async def _routed(
        self, prefill: FleetEngine, number: int, computed: Future[Answer]
    ) -> dict[str, Any] | None:
        """What a router hands on: nothing, of a prefill that died or says nothing."""
        try:
            async with asyncio.timeout(_ROUTER_S):
                return (await asyncio.wrap_future(computed)).carried
        except Gone:
            self.counts["prefills that died"] += 1
        except TimeoutError:
            self.counts["prefills that said nothing"] += 1
            prefill.abort(number)
        return None

    def _later(self, chance: random.Random, engine: FleetEngine, number: int) -> None:
        """Aborts a request at some moment."""
        after_s = chance.random() * 0.3
        asyncio.get_running_loop().call_later(after_s, engine.abort, number)
        self.counts["aborts"] += 1

    async def _in_time(self, answer: Future[_T], engine: FleetEngine) -> _T:
        """`answer`, within the deadline, of which the time does not count that it is frozen."""
        waiting = asyncio.wrap_future(answer)
        started, frozen_s = time.monotonic(), engine.frozen_s
        while True:
            took_s = time.monotonic() - started - (engine.frozen_s - frozen_s)
            if took_s > DEADLINE_S:
                engine.tell_stacks()
                raise AssertionError(f"{engine.name}: a request hangs")
            done, _ = await asyncio.wait([waiting], timeout=DEADLINE_S + 0.01 - took_s)
            if done:
                took_s = time.monotonic() - started - (engine.frozen_s - frozen_s)
                self.slowest_s = max(self.slowest_s, took_s)
                return waiting.result()

    def _check(self, prompt: Prompt, output: Answer) -> None:
        tokens = output.tokens
        whole = output.reason == "length"
        right = tokens == (prompt.answer if whole else prompt.answer[: len(tokens)])
        assert right, f"wrong tokens: {tokens}, not {prompt.answer}; {output}"
        self.counts["answers"] += whole
        self.counts["aborted"] += not whole
        self.counts["prompts fetched"] += output.fetched > 0

    # ------------------------------------------------------------------ what happens to engines

    async def _attack(self) -> None:
        chance = random.Random(self._chance.random())
        async with asyncio.TaskGroup() as group:
            free = set(self._engines)
            while not self._over.is_set():
                await asyncio.sleep(chance.uniform(0.1, 0.8))
                if not free or self._over.is_set():
                    continue
                victim = chance.choice(sorted(free, key=lambda one: one.name))
                free.discard(victim)
                task = group.create_task(self._hit(random.Random(chance.random()), victim))
                task.add_done_callback(lambda _, victim=victim: free.add(victim))

    async def _hit(self, chance: random.Random, victim: FleetEngine) -> None:
        stays = victim in (self._prefills[0], self._decodes[0])
        what = "freeze" if stays else chance.choice(["freeze", "kill", "kill frozen", "restart"])
        self.counts[f"{what}s"] += 1
        if "freez" in what or "frozen" in what:
            victim.freeze()
            # Shorter than a silence that ends a connection, longer, and longer than a lease.
            await asyncio.sleep(chance.choice([0.1, 0.5, 1.5, 3.5]))
        if what == "freeze":
            victim.wake()
            return
        await asyncio.to_thread(victim.end if what == "restart" else victim.kill)
        await asyncio.sleep(chance.choice([0.0, 0.0, 1.0]))
        await asyncio.to_thread(victim.start)

    # ------------------------------------------------------------------ between rounds

    async def _recovered(self) -> None:
        """Each decode fetches from each prefill again."""
        chance = random.Random(self._chance.random())
        for prefill in self._prefills:
            for decode in self._decodes:
                end = time.monotonic() + _QUIET_S
                while not await self._fetches(chance.choice(self._prompts), prefill, decode):
                    where = f"{decode.name} from {prefill.name}"
                    assert time.monotonic() < end, f"{where}: nothing is fetched any more"

    async def _fetches(self, prompt: Prompt, prefill: FleetEngine, decode: FleetEngine) -> bool:
        self._number += 1
        salt = f"tenant {self._number}"
        _, computed = prefill.submit(prompt.tokens, PREFILL, {"do": "prefill"}, salt)
        carried = (await self._in_time(computed, prefill)).carried
        _, answer = decode.submit(prompt.tokens, ANSWER, carried, salt)
        output = await self._in_time(answer, decode)
        assert output.reason == "length", output
        self._check(prompt, output)
        return output.fetched > 0

    async def _nothing_held(self) -> None:
        """No block, lease, claim or read is left, on any side."""
        for engine in self._engines:
            end = time.monotonic() + _QUIET_S
            while held := await self._in_time(engine.held(), engine):
                assert time.monotonic() < end, f"{engine.name} holds {held}"
                await asyncio.sleep(0.05)
