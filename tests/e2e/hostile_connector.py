"""A connector that does its worst within its contract, or outside of it, by a seeded dice.

What it stores and loads is right, so that every wrong token is the runtime's. Within the contract
loads bring garbage before they fail, go on writing until their id is returned, or never end; saves
read their blocks when they are returned, however late that is. Outside of it every method also
raises and answers nonsense.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvconnect.connector.data import Direction, LlmArgs, SchedulerOutput, TransferFailure
from kvconnect.connector.scheduler import KvCacheConnectorScheduler
from kvconnect.connector.worker import KvCacheConnectorWorker
from kvconnect.request import LlmRequest

NONSENSE: list[Any] = [None, -1, 0, True, 1.5, "7", (3,), (-5, False), (0, True), (10**9, True)]
NONSENSE += [(2, 0), ([], [], []), ([-1], []), ([], [10**9]), (["x"], []), [7], {}, object()]
NONSENSE += [(), []]


LOST_SHARE = 0.5
"""Of the pool: so many blocks, and no more, are of transfers that never end before all is kind."""


class Planted(RuntimeError):
    """What it raises."""


@dataclass
class Mind:
    """What all parts of the next connector share.

    Attributes:
        dice: decides.
        lawless: how often a call breaks the contract.
        stored: blocks by key; it outlives engines.
        kind: nothing fails or hangs any more, and everything outstanding is returned.
        asked: requests that were asked about and not told of their blocks.
        violations: calls that the runtime must not make.
    """

    dice: random.Random = field(default_factory=lambda: random.Random(0))
    lawless: float = 0.0
    stored: dict[bytes, Tensor] = field(default_factory=dict)
    kind: bool = False
    asked: set[int] = field(default_factory=set)
    violations: list[str] = field(default_factory=list)

    def answer(self, right: Callable[[], Any], *, may_lie: bool = True) -> Any:
        """The right answer, mostly."""
        if not self.kind and self.dice.random() < self.lawless:
            if not may_lie or self.dice.random() < 0.4:
                raise Planted("by the dice")
            return self.dice.choice(NONSENSE)
        return right()


mind = Mind()


@dataclass
class Load:
    """A load of one request: keys and blocks from the first on that it fills."""

    request_id: int
    start: int
    end: int
    is_async: bool
    blocks: list[tuple[bytes, int]]
    held: int  # blocks that the request has
    polls: int = 0  # that it takes; negative: it never ends
    valid: int | None = None  # tokens, if it fails


@dataclass
class Save:
    """A save of one request; its blocks are read when it is over."""

    request_id: int
    blocks: list[tuple[bytes, int]]
    held: int  # blocks that the request has
    polls: int = 0  # that it takes; negative: it never ends


@dataclass
class Orders:
    """A step's metadata."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


class HostileScheduler(KvCacheConnectorScheduler):
    def __init__(self, llm_args: LlmArgs) -> None:
        super().__init__(llm_args)
        self.size = llm_args.kv_cache_config.tokens_per_block
        self.offers: dict[int, tuple[int, int, bool]] = {}
        self.saves: list[Save] = []
        self.aborted: set[int] = set()
        mind.asked.clear()

    def get_num_new_matched_tokens(
        self, request: LlmRequest, num_computed_tokens: int
    ) -> tuple[int, bool]:
        if request.request_id in mind.asked:
            mind.violations.append(f"request {request.request_id} was asked about twice")
        answer = mind.answer(lambda: self._offer(request, num_computed_tokens))
        mind.asked.add(request.request_id)
        return answer  # type: ignore[no-any-return]

    def _offer(self, request: LlmRequest, position: int) -> tuple[int, bool]:
        keys = request.block_keys(position // self.size)
        found = next((n for n, key in enumerate(keys) if key not in mind.stored), len(keys))
        num_tokens = found * self.size - mind.dice.choice([0, 0, 0, 1, self.size])
        num_tokens = min(num_tokens, request.num_tokens - 1 - position)
        if num_tokens <= 0 or mind.dice.random() < 0.1:
            return 0, False
        is_async = mind.dice.random() < 0.7
        self.offers[request.request_id] = (position, position + num_tokens, is_async)
        return num_tokens, is_async

    def update_state_after_alloc(self, request: LlmRequest, block_ids: list[int]) -> None:
        if request.request_id not in mind.asked:
            mind.violations.append(f"request {request.request_id} was told without being asked")
        mind.asked.discard(request.request_id)
        if not request.num_connector_matched_tokens:
            self.offers.pop(request.request_id, None)
        mind.answer(lambda: None)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object:
        orders = Orders(saves=self._take_saves())
        for data in scheduler_output.loading_requests + scheduler_output.new_requests:
            offer = self.offers.pop(data.request_id, None)
            if offer is None:
                continue
            start, end, is_async = offer
            blocks = [
                (data.block_keys[number], data.new_block_ids[number])
                for number in range(start // self.size, -(-end // self.size))
            ]
            held = len(data.new_block_ids)
            orders.loads.append(Load(data.request_id, start, end, is_async, blocks, held))
        # Never nonsense: nobody but the connector can know that a load within a step was lost.
        return mind.answer(lambda: orders, may_lie=False)

    def build_idle_meta(self) -> object | None:
        return Orders(saves=self._take_saves())

    def _take_saves(self) -> list[Save]:
        saves, self.saves = self.saves, []
        return saves

    def request_finished(self, request: LlmRequest, cache_block_ids: list[int]) -> bool:
        self.offers.pop(request.request_id, None)
        valid = request.num_computed_tokens // self.size
        save = Save(
            request.request_id,
            list(zip(request.block_keys(0, valid), cache_block_ids, strict=False)),
            len(cache_block_ids),
        )

        def keep() -> bool:
            if mind.dice.random() < 0.2:
                return False
            self.saves.append(save)
            return True

        if request.request_id in self.aborted:
            return keep()
        return mind.answer(keep)  # type: ignore[no-any-return]

    def request_reset(self, request: LlmRequest) -> None:
        mind.asked.discard(request.request_id)
        self.offers.pop(request.request_id, None)

    def request_aborted(self, request: LlmRequest) -> None:
        mind.asked.discard(request.request_id)
        self.aborted.add(request.request_id)

    def load_failed(self, request: LlmRequest, num_valid_tokens: int) -> None:
        mind.answer(lambda: None)

    def update_from_workers(self, metas: Sequence[object]) -> None:
        mind.answer(lambda: None)


class HostileWorker(KvCacheConnectorWorker):
    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None:
        self.pool = kv_cache_tensor
        self.size = self._llm_args.kv_cache_config.tokens_per_block
        self.in_step: list[Load] = []
        self.loads: list[Load] = []
        self.writing: list[Load] = []  # failed or cancelled, not returned yet
        self.saves: list[Save] = []
        self.failed: list[TransferFailure] = []

    def bind_connector_meta(self, metadata: object) -> None:
        super().bind_connector_meta(metadata)
        if not isinstance(metadata, Orders):
            return
        for save in metadata.saves:
            # One that takes long is there when others use the pool, and then times out.
            self._last(save, [0, 0, 1, 5, 100, -1])
            self.saves.append(save)
        for load in metadata.loads:
            self._last(load, [0, 0, 1, 3, 8, -1])
            if not mind.kind and mind.dice.random() < 0.4:
                load.valid = mind.dice.randrange(load.start, load.end)
            (self.loads if load.is_async else self.in_step).append(load)

    def start_load_kv(self, stream: object) -> None:
        self._scribble()
        mind.answer(lambda: None)

    def wait_for_layer_load(self, layer_idx: int, stream: object) -> None:
        if layer_idx == 0:
            for load in self.in_step:
                self._fill(load)
        self._scribble()
        mind.answer(lambda: None)

    def save_kv_layer(self, layer_idx: int, stream: object) -> None:
        self._scribble()
        mind.answer(lambda: None)

    def wait_for_save(self, stream: object) -> None:
        for load in self.in_step:
            if load.valid is not None:
                self._fail(load)
        self.in_step = []
        mind.answer(lambda: None)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        self._scribble()
        return mind.answer(self._ended)  # type: ignore[no-any-return]

    def get_failed(self) -> list[TransferFailure]:
        failed, self.failed = self.failed, []
        if not mind.kind and mind.dice.random() < mind.lawless:
            return [self._wrong_failure()]
        return mind.answer(lambda: failed)  # type: ignore[no-any-return]

    def cancel(self, request_id: int) -> None:
        for load in [one for one in self.loads if one.request_id == request_id]:
            self.loads.remove(load)
            self._last(load, [0, 2, 9, -1])
            self.writing.append(load)

    # ------------------------------------------------------------------ what it does

    def _ended(self) -> tuple[list[int], list[int]]:
        saved, loaded = [], []
        for save in self._over(self.saves):
            for key, block in save.blocks:
                mind.stored.setdefault(key, self.pool[block].clone())
            saved.append(save.request_id)
        for load in self._over(self.loads):
            if load.valid is not None:
                self._fail(load)
            else:
                self._fill(load)
                loaded.append(load.request_id)
        loaded += [load.request_id for load in self._over(self.writing)]
        return saved, loaded

    def _last(self, transfer: Load | Save, polls: list[int]) -> None:
        """Let it last for one of `polls`, as long as not too many last for ever."""
        transfer.polls = mind.dice.choice(polls)
        all_of_them = {id(one): one for one in (*self.loads, *self.writing, *self.saves, transfer)}
        lost = sum(one.held for one in all_of_them.values() if one.polls < 0)
        if lost > LOST_SHARE * len(self.pool):
            transfer.polls = 1

    def _over(self, transfers: list[Any]) -> list[Any]:
        """Takes those that end with this poll."""
        over = [one for one in transfers if one.polls == 0 or mind.kind]
        transfers[:] = [one for one in transfers if one not in over]
        for one in transfers:
            one.polls -= one.polls > 0
        return over

    def _fill(self, load: Load) -> None:
        """Right up to where it is valid, garbage from there on."""
        valid = load.end if load.valid is None else load.valid
        for number, (key, block) in enumerate(load.blocks, load.start // self.size):
            tokens = min(self.size, valid - number * self.size)
            self.pool[block] = mind.stored[key] if tokens > 0 else torch.nan
            if 0 < tokens < self.size:
                pages = self.pool[block].unflatten(-1, (self.size, -1))
                pages[:, :, tokens:] = 13.0

    def _fail(self, load: Load) -> None:
        self._fill(load)
        writes_ended = mind.dice.random() < 0.5
        if not writes_ended:
            self._last(load, [1, 4, 20, -1])
            self.writing.append(load)
        self.failed.append(
            TransferFailure(
                load.request_id, Direction.LOAD, load.valid or 0, "planted", writes_ended
            )
        )

    def _scribble(self) -> None:
        """Garbage into every block that a load may still write to, beyond what it called valid."""
        for load in [*self.loads, *self.writing]:
            first = load.start // self.size
            kept = 0 if load in self.loads or load.valid is None else load.valid // self.size
            for number, (_, block) in enumerate(load.blocks, first):
                if number >= kept:
                    self.pool[block] = torch.nan

    def _wrong_failure(self) -> TransferFailure:
        dice = mind.dice
        known = [load.request_id for load in [*self.loads, *self.writing]] or [0]
        return TransferFailure(
            dice.choice([*known, -1, 10**6, "3"]),
            dice.choice([Direction.LOAD, Direction.SAVE, "load"]),  # type: ignore[arg-type]
            dice.choice([10**9, -1, 1.5, None]),  # type: ignore[arg-type]
            dice.choice(["planted", None]),  # type: ignore[arg-type]
            dice.choice([True, False, None]),  # type: ignore[arg-type]
        )
