"""Engines of different numbers of ranks fetch prompts from each other: pools without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from free_ports import free_ports
from tp_ranks import LATENT, UNEQUAL, Ranks, T, layout
from waiting import until

from kvconnect.config import KvCacheConnectorConfig
from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout
from kvconnect.request import LlmRequest

PROMPT = list(range(1, 5 * T + 4))
NUM_BLOCKS = 12


class Engine(Ranks):
    """Ranks that hand prompts to other engines, or fetch them."""

    def __init__(
        self, role: str, wholes: Sequence[KvCacheLayout], tp_size: int, **transfer: Any
    ) -> None:
        listen = f"127.0.0.1:{free_ports(tp_size)}"
        transfer = {"role": role, "listen": listen, "lease_s": 30.0} | transfer
        config = KvCacheConnectorConfig(transfer=transfer, load_timeout_s=60, save_timeout_s=60)
        super().__init__(config, wholes, tp_size)

    def prefill(self, prompt: Sequence[int], transfer_id: str) -> tuple[LlmRequest, dict[str, Any]]:
        """Compute `prompt` and hand it out."""
        ids = [3 + n for n in range(-(-len(prompt) // self.size))]
        params = {"do": "prefill", "transfer_id": transfer_id}
        request, num_tokens = self.begin(prompt, params, ids)
        assert num_tokens == 0
        self.compute(request, ids)
        request.is_finished = request.is_finished_normal = True
        assert self.scheduler.request_finished(request, ids)
        self._bind(self.scheduler.build_idle_meta())
        found = self.scheduler.get_kv_transfer_params(request)
        assert found is not None
        return request, found

    def fetch(self, prompt: Sequence[int], params: dict[str, Any]) -> list[str]:
        """Fetch `prompt` and compare all pools; why not, on each rank that has failed."""
        ids = [9 - n for n in range(-(-len(prompt) // self.size))]
        _, num_tokens = self.begin(prompt, params, ids)
        assert num_tokens == len(prompt) - 1
        loaded: set[int] = set()
        failed: dict[int, str] = {}

        def over() -> bool:
            for rank, worker in enumerate(self.workers):
                if worker.get_finished([], [])[1]:
                    loaded.add(rank)
                for failure in worker.get_failed():
                    failed[rank] = failure.reason
            return loaded | failed.keys() == set(range(len(self.workers)))

        until(over)
        for rank in loaded - failed.keys():
            self.check(prompt, ids, num_tokens, rank)
        return [failed[rank] for rank in sorted(failed)]

    def lets_go(self, request: LlmRequest) -> None:
        """Every rank gives the blocks of `request` back."""
        pending = set(self.workers)

        def over() -> bool:
            for worker in list(pending):
                if request.request_id in worker.get_finished([], [])[0]:
                    pending.discard(worker)
            return not pending

        until(over)

    def is_unread(self) -> bool:
        """Whether no lease is held: one that ends holds its memory, and a thread, until then."""
        nodes = [worker._node for worker in self.workers]
        return all(node is None or node.offers.server.table.last_end() is None for node in nodes)


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(*args: Any, **transfer: Any) -> Engine:
        made.append(Engine(*args, **transfer))
        return made[-1]

    yield make
    for one in made:
        one.close()


MODELS = {
    "many heads": (layout(4),),
    "fewer heads than ranks": (layout(2),),
    "latent": (LATENT,),
    "keys wider than values": (UNEQUAL,),
    "a window, and fewer heads in it": (layout(4), layout(2, window=14)),
}


def resized(wholes: Sequence[KvCacheLayout], size: int) -> tuple[KvCacheLayout, ...]:
    return tuple(replace(one, tokens_per_block=size) for one in wholes)


@pytest.mark.planted("rank-share", "transfer", "equal")
@pytest.mark.planted("other-rank-count", "transfer", "equal")
@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize("wholes", MODELS.values(), ids=MODELS)
def test_every_rank_gets_its_heads(
    engine: Callable[..., Engine],
    wholes: tuple[KvCacheLayout, ...],
    theirs: int,
    ours: int,
) -> None:
    sizes = [T, 2 * T]
    prefill = engine("prefill", resized(wholes, sizes[theirs > ours]), theirs)
    decode = engine("decode", resized(wholes, sizes[theirs < ours]), ours)
    request, params = prefill.prefill(PROMPT, "one")
    assert decode.fetch(PROMPT, params) == []
    prefill.lets_go(request)  # long before leases end: each is released by all of its readers


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1)])
def test_the_same_over_nixl(engine: Callable[..., Engine], theirs: int, ours: int) -> None:
    wholes = (layout(4), layout(2, window=14))
    prefill = engine("prefill", wholes, theirs, transport="nixl")
    decode = engine("decode", resized(wholes, 2 * T), ours, transport="nixl")
    request, params = prefill.prefill(PROMPT, "one")
    assert decode.fetch(PROMPT, params) == []
    prefill.lets_go(request)


def test_a_rank_that_is_gone_fails_the_load_of_those_that_need_it(
    engine: Callable[..., Engine],
) -> None:
    prefill = engine("prefill", (layout(4),), 2)
    decode = engine("decode", (layout(4),), 1)
    _, params = prefill.prefill(PROMPT, "one")
    prefill.workers[1].shutdown()
    [reason] = decode.fetch(PROMPT, params)
    assert "cannot be reached" in reason
    node = decode.workers[0]._node
    assert node.fetcher is not None
    until(lambda: not (node.fetcher._fetches or node.fetcher.claims))
    until(prefill.is_unread)


def test_another_number_of_ranks_than_it_has_is_refused(engine: Callable[..., Engine]) -> None:
    prefill = engine("prefill", (layout(4),), 2)
    decode = engine("decode", (layout(4),), 1)
    _, params = prefill.prefill(PROMPT, "one")
    [reason] = decode.fetch(PROMPT, params | {"tp_size": 1})
    assert "it is rank 0 of 2, not 0 of 1" in reason
    until(prefill.is_unread)
    with pytest.raises(ConfigurationError, match="tp_size"):
        decode.fetch(PROMPT, params | {"tp_size": 3})
    with pytest.raises(ConfigurationError, match="1 to 1024"):
        decode.fetch(PROMPT, params | {"tp_size": 4096})


def test_several_ranks_need_a_port_to_count_from(engine: Callable[..., Engine]) -> None:
    with pytest.raises(ConfigurationError, match="give the first one"):
        engine("prefill", (layout(4),), 2, listen="127.0.0.1:0")
    engine("decode", (layout(4),), 2, listen="127.0.0.1:0")
