"""The built-in pair on one to three ranks, while anything happens to requests and to stores."""

from __future__ import annotations

import random
import time

import pytest
from bench_engine import LAYOUT, T, reference
from overlap_engine import OverlapEngine, OverlapPair
from ranks import Pair
from stores import DictStore

from kvconnect import frame
from kvconnect.request import LlmRequest, RequestState

SLOT = frame.frame_nbytes(LAYOUT.block_nbytes)


class Weather:
    """Requests that come, go, are preempted and rewound, over stores that stall, fail and forget.

    Everything follows from `seed`, but for what the stores' threads are in time for.
    """

    def __init__(self, seed: int, pair: type[Pair]) -> None:
        self.random = random.Random(seed)
        enumerable = self.random.random() < 0.5
        size = self.random.choice([1, 2, 3])
        self.stores = [DictStore(enumerable=enumerable) for _ in range(size)]
        self.pair = pair(
            self.stores,
            save_on=self.random.choice(["full", "finish"]),
            staging_bytes=SLOT * self.random.choice([4, 8, 1000]),
            load_timeout_s=self.random.choice([5, 0.15]),
        )
        self.trunks = [[self.random.randrange(1, 50) for _ in range(40)] for _ in range(3)]
        self.asked: dict[int, list[int]] = {}
        self.ended_early: set[int] = set()
        self.events = [self.submit, self.abort, self.preempt, self.rewind, self.stall, self.fail]
        self.events += [self.forget, *[self.pair.step] * 7]

    def submit(self) -> None:
        prompt = self.random.choice(self.trunks)[: self.random.randrange(1, 30)]
        prompt = prompt + [self.random.randrange(1, 50) for _ in range(self.random.randrange(5))]
        if len(self.pair.leader.kv.blocks) + len(self.pair.leader.queue) < 5:
            self.asked[self.pair.submit(prompt, self.random.choice([1, 2, 6, 15]))] = prompt

    def abort(self) -> None:
        leader = self.pair.leader
        if live := [*leader.queue, *leader.running, *leader.loading.values()]:
            request_id = self.random.choice(live).request_id
            self.pair.abort(request_id)
            self.ended_early.add(request_id)

    def preempt(self) -> None:
        leader = self.pair.leader
        loading = leader.loading.values() if isinstance(leader, OverlapEngine) else ()
        if held := [*leader.running, *loading]:
            self.pair.preempt(self.random.choice(held).request_id)

    def rewind(self) -> None:
        """Some tokens back, from where it goes on with others, as far as its blocks reach."""
        leader = self.pair.leader
        running = leader.running
        if not (able := [one for one in running if one.state is RequestState.GENERATION]):
            return
        chosen: LlmRequest = self.random.choice(able)
        kept = self.random.randrange(max(1, chosen.num_tokens - 9), chosen.num_tokens)
        others = self.random.sample(range(50, 99), max(1, -kept % T))
        if (kept + len(others) - 1) // T > (kept - 1) // T:
            return
        chosen.rewind(kept)
        leader.kv.rewind(chosen, 0)
        leader.manager.on_rewind(chosen)
        chosen.tokens.extend(others)
        chosen.num_computed_tokens = kept
        chosen.state = RequestState.CONTEXT
        self.ended_early.add(chosen.request_id)

    def stall(self) -> None:
        store = self.random.choice(self.stores)
        self.random.choice([store.at_save.shut, store.at_load.shut, store.open_doors])()

    def fail(self) -> None:
        store = self.random.choice(self.stores)
        store.save_error = self.random.choice([None, OSError(28, "planted")])
        store.load_error = self.random.choice([None, OSError(5, "planted")])

    def forget(self) -> None:
        frames = self.random.choice(self.stores).frames
        for key in self.random.sample(list(frames), len(frames) // 3):
            del frames[key]

    def clear_up(self) -> None:
        for store in self.stores:
            store.open_doors()
            store.save_error = store.load_error = None
        self.pair.run()
        deadline = time.monotonic() + 60
        while self.pair.leader.manager.expects_news():
            assert time.monotonic() < deadline, "news is expected that never comes"
            self.pair.step()
        self.pair.step()
        self.pair.flush()


@pytest.mark.parametrize(
    "seed", [*range(3), *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 8)]]
)
@pytest.mark.parametrize("kind", [Pair, OverlapPair])
def test_no_token_is_wrong_and_nothing_is_left(seed: int, kind: type[Pair]) -> None:
    weather = Weather(seed, kind)
    with weather.pair as pair:
        for _ in range(120):
            weather.random.choice(weather.events)()
        weather.clear_up()
        for request_id, prompt in weather.asked.items():
            if request_id not in weather.ended_early:
                number = pair.leader.requests[request_id].num_generated_tokens
                assert pair.answer(request_id) == [reference(prompt, number)] * len(pair.stores)
        pair.nothing_is_left()
        for request in list(pair.leader.requests.values()):  # what is stored is what its keys say
            tokens = request.tokens.view.tolist()[:60]
            again = pair.submit(tokens, 2)
            pair.run()
            assert pair.answer(again) == [reference(tokens, 2)] * len(pair.stores)
