"""A small engine with vLLM's calls of a connector, in vLLM's order: enough to drive both halves.

The "KV" of a token is a number made of the token and of the KV before it, as read from the pool. So
a wrong byte in a block that is used changes the answer, which is the KV of the last token.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from kvconnect.connector.data import LlmArgs
from kvconnect.integrations.core.load_choice import LoadChoice
from kvconnect.integrations.core.memory import planes_of
from kvconnect.integrations.vllm.messages import WorkerReport
from kvconnect.integrations.vllm.requests import Roles
from kvconnect.integrations.vllm.scheduler import SchedulerHalf
from kvconnect.integrations.vllm.steps import GroupOrder
from kvconnect.integrations.vllm.weights import WatchedWeights
from kvconnect.integrations.vllm.worker import WorkerHalf
from kvconnect.layout import KvCacheLayout

T = 4
LAYOUT = KvCacheLayout(2, 1, 2, 2, T, torch.float64)
BACKGROUND = Roles()
PROMPT = list(range(3, 3 + 5 * T + 2))


class Request:
    """What connectors read of vLLM's ``Request``."""

    def __init__(self, name: str, tokens: Sequence[int], **more: Any) -> None:
        self.request_id = name
        self.prompt_token_ids = list(tokens)
        self.all_token_ids = list(tokens)
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_preemptions = 0
        self.cache_salt = None
        self.lora_request = None
        self.mm_features: list[Any] = []
        self.prompt_embeds = None
        self.prompt_is_token_ids = None
        self.resumable = False
        self.skip_reading_prefix_cache = False
        self.kv_transfer_params: Any = None
        self.blocks: list[int] = []
        self.state = "waiting"
        self.external = 0
        self.answer: float | None = None
        self.params: Any = None
        self.cached = 0
        vars(self).update(more)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self.blocks,)


class Model(torch.nn.Module):
    """What the KV of a token is made with; more weights stand for those of other layers."""

    def __init__(self, factor: float = 31.0) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.full((4,), factor, dtype=torch.float64))
        self.register_buffer("table", torch.zeros(8, dtype=torch.float64), persistent=False)
        self.others = torch.nn.Linear(4, 4)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """Of a whole number before."""
        return state * self.factor[0] + self.table[0]

    def next(self, before: float, token: int) -> float:
        with torch.no_grad():
            state = self(torch.tensor(before, dtype=torch.float64))
        return (state.item() + token) % 1000003


class StandIn:
    """An engine of one step at a time, without a prefix cache of its own."""

    def __init__(
        self,
        args: LlmArgs,
        roles: Roles = BACKGROUND,
        *,
        num_blocks: int = 40,
        chunk: int = 100,
        choice: LoadChoice | None = None,
    ) -> None:
        self.choice = choice or LoadChoice(tokens_per_block=T, max_tokens=chunk, decides=False)
        self.scheduler = SchedulerHalf(args, "engine=test", roles, self.choice, GroupOrder())
        self.worker = WorkerHalf(args)
        self.model = Model()
        # Heads before tokens, keys and values in one row, as vLLM's on a GPU.
        self.caches = torch.zeros(LAYOUT.num_layers, num_blocks, 1, T, 4, dtype=torch.float64)
        layers = [
            (one[..., :2].transpose(1, 2), one[..., 2:].transpose(1, 2)) for one in self.caches
        ]
        planes = planes_of(layers, LAYOUT, num_blocks, name="test")
        self.worker.register([planes], WatchedWeights(lambda: self.model))
        self.free = list(range(1, num_blocks))  # 0 is vLLM's place holder
        self.requests: dict[str, Request] = {}
        self.resumed: set[str] = set()
        self.new: set[str] = set()
        self.preempted: set[str] = set()
        self.finished: set[str] = set()
        self.chunk = chunk
        self.steps = 0
        self._names = itertools.count()

    # ------------------------------------------------------------------ what a test does

    def submit(self, tokens: Sequence[int], **more: Any) -> Request:
        request = Request(f"request-{next(self._names)}", tokens, **more)
        self.requests[request.request_id] = request
        self.scheduler.on_new_request(request)
        return request

    def answer(self, tokens: Sequence[int], num_tokens: int = 1, **more: Any) -> Request:
        request = self.submit(tokens, **more)
        request.wanted = len(tokens) + num_tokens
        self.run()
        return request

    def run(self, until: Any = lambda: False) -> None:
        """Step until no request is left, or `until` is true."""
        deadline = time.monotonic() + 60
        while (self.requests or self.finished) and not until():
            assert time.monotonic() < deadline, vars(next(iter(self.requests.values())))
            self.step()

    def preempt(self, request: Request) -> None:
        assert request.state == "running"
        self._give_back(request)
        request.state, request.num_computed_tokens = "waiting", 0
        request.num_preemptions += 1
        self.preempted.add(request.request_id)

    def abort(self, request: Request) -> None:
        self._end(request, delayed=request.state == "loading")

    def reset(self) -> bool:
        """As vLLM's, with the connector's; what runs is computed anew."""
        for request in list(self.requests.values()):
            if request.state == "running":
                self.preempt(request)
        is_empty = len(self.free) == self.caches.shape[1] - 1
        return self.scheduler.reset_cache(device_is_empty=is_empty)

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()

    def flush(self) -> None:
        assert self.worker._worker._queue.flush(60)

    def check_empty(self) -> None:
        assert not self.requests
        assert sorted(self.free) == list(range(1, self.caches.shape[1]))
        assert not self.scheduler._tracked
        assert not self.scheduler._names
        assert not self.worker._names
        assert not self.worker._loads

    # ------------------------------------------------------------------ a step

    def step(self) -> None:
        self.steps += 1
        scheduled: dict[str, int] = {}
        for request in list(self.requests.values()):
            if request.state == "waiting":
                self._admit(request)
            if request.state == "running":
                left = request.num_tokens - request.num_computed_tokens
                scheduled[request.request_id] = min(left, self.chunk)
                self._allocate(request, request.num_computed_tokens + min(left, self.chunk))
        meta = self._meta(scheduled)
        self.worker.handle_preemptions(meta)
        self.worker.bind(meta)
        try:
            answers = {name: self._compute(self.requests[name], n) for name, n in scheduled.items()}
        finally:  # as in vLLM, whatever becomes of the forward pass
            self.worker.start_load()
            self.worker.wait_for_save()
        results = self.worker.take_results()
        invalid = self.worker.take_invalid_blocks()
        report = pickle.loads(pickle.dumps(self.worker.build_report()))
        self.worker.clear()
        self._update(scheduled, answers, results, invalid, report)

    def _admit(self, request: Request) -> None:
        if request.num_computed_tokens == 0:
            found, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
            if found is None:
                return
            assert found <= request.num_tokens
            assert bool(found) == is_async
            self._allocate(request, found)
            self.scheduler.update_state_after_alloc(request, request, found)
            request.external = found
            request.cached = request.num_computed_tokens = found
            if is_async:
                request.state = "loading"
                return
        else:
            self.scheduler.update_state_after_alloc(request, request, 0)
        request.state = "running"
        (self.resumed if request.num_preemptions else self.new).add(request.request_id)

    def _meta(self, scheduled: dict[str, int]) -> Any:
        known = [self.requests[name] for name in scheduled]
        cached = [one for one in known if one.request_id not in self.new]
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=one.request_id,
                    block_ids=(list(one.blocks),),
                    num_computed_tokens=one.num_computed_tokens,
                )
                for one in known
                if one.request_id in self.new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[one.request_id for one in cached],
                resumed_req_ids=set(self.resumed),
                new_block_ids=[self._told(one) for one in cached],
                num_computed_tokens=[one.num_computed_tokens for one in cached],
            ),
            num_scheduled_tokens=dict(scheduled),
            total_num_scheduled_tokens=sum(scheduled.values()),
            preempted_req_ids=set(self.preempted),
            finished_req_ids=set(self.finished),
        )
        for one in known:
            one.told = len(one.blocks)
        for names in (self.new, self.resumed, self.preempted, self.finished):
            names.clear()
        return pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output)))

    def _told(self, request: Request) -> tuple[list[int], ...] | None:
        if request.request_id in self.resumed:
            return (list(request.blocks),)
        new = request.blocks[request.told :]
        return (new,) if new else None

    def _compute(self, request: Request, number: int) -> float:
        """Write the KV of the next `number` tokens; the last one's is what is answered."""
        start = request.num_computed_tokens
        before = self._kv(request, start - 1) if start else 1.0
        for position in range(start, start + number):
            before = self.model.next(before, request.all_token_ids[position])
            block, slot = request.blocks[position // T], position % T
            for layer, cache in enumerate(self.caches):
                cache[block, 0, slot] = before + layer
        return before

    def _kv(self, request: Request, position: int) -> float:
        block, slot = request.blocks[position // T], position % T
        rows = [cache[block, 0, slot] - layer for layer, cache in enumerate(self.caches)]
        return float(torch.stack(rows).mean())

    def _update(
        self,
        scheduled: dict[str, int],
        answers: dict[str, float],
        results: Any,
        invalid: set[int],
        report: WorkerReport | None,
    ) -> None:
        affected = self._take_invalid(invalid)
        for name in results.failed:
            self.requests[name].num_computed_tokens = 0
        for name, number in scheduled.items():
            request = self.requests[name]
            if name in affected:
                continue
            request.num_computed_tokens += number
            if request.num_computed_tokens == request.num_tokens:
                request.all_token_ids.append(int(answers[name]) % 97)
                request.answer = answers[name]
                if request.num_tokens >= request.wanted:
                    self._end(request)
        output = SimpleNamespace(kv_connector_worker_meta=report, finished_recving=results.loaded)
        self.scheduler.update_connector_output(output)
        for name in results.loaded:
            request = self.requests[name]
            if request.state == "loading":
                request.state = "waiting"
                if request.num_computed_tokens == request.num_tokens:
                    request.num_computed_tokens -= 1  # the last one is computed again
                if request.num_computed_tokens == 0:
                    self._give_back(request)
            else:
                self._remove(request)
        for name in results.saved:
            self._remove(self.requests[name])

    def _take_invalid(self, invalid: set[int]) -> set[str]:
        affected = set()
        for request in self.requests.values():
            if request.state not in {"loading", "running"}:
                continue
            for index, block in enumerate(request.blocks):
                if block in invalid and index * T < request.num_computed_tokens:
                    request.num_computed_tokens = index * T
                    affected.add(request.request_id)
                    break
        return affected

    # ------------------------------------------------------------------ blocks

    def _allocate(self, request: Request, num_tokens: int) -> None:
        while len(request.blocks) * T < num_tokens:
            request.blocks.append(self.free.pop())

    def _give_back(self, request: Request) -> None:
        for block in request.blocks:
            self.caches[:, block] = float("nan")
        self.free += request.blocks
        request.blocks = []

    def _end(self, request: Request, *, delayed: bool = False) -> None:
        request.state = "finished"
        computed = -(-request.num_computed_tokens // T)
        kept, request.params = self.scheduler.request_finished(
            request, (request.blocks[:computed],)
        )
        self.finished.add(request.request_id)
        assert not (kept and delayed)
        if not kept and not delayed:
            self._remove(request)

    def _remove(self, request: Request) -> None:
        assert request.state == "finished"
        self._give_back(request)
        del self.requests[request.request_id]


Open = Callable[..., StandIn]
"""The fixture `open_engine`."""


def told(engine: StandIn, prompt: list[int] = PROMPT) -> float:
    """What an engine without a store would answer."""
    before = 1.0
    for token in prompt:
        before = engine.model.next(before, token)
    return before


def poll(engine: StandIn, request: Request, local: int = 0) -> tuple[int | None, bool]:
    """What the scheduler's half answers once its lookup has ended."""
    deadline = time.monotonic() + 60
    while True:
        answer = engine.scheduler.get_num_new_matched_tokens(request, local)
        if answer[0] is not None:
            return answer
        assert time.monotonic() < deadline
        time.sleep(0.001)
