"""The hooks of the built-in pair: what a subclass decides, and what its failure costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import ClassVar

import pytest
from bench_engine import BenchEngine, PlainKv, T, llm_args, reference
from stores import DictStore

from kvconnect import CacheOptions, KvCacheConnectorConfig, LlmRequest
from kvconnect.connector.offload import OffloadScheduler, OffloadWorker
from kvconnect.connector.pair.hooks import StoreHooks
from kvconnect.connector.runtime.loading import connector_classes
from kvconnect.errors import ConfigurationError, ConnectorContractError
from kvconnect.trace import metrics

PROMPT = list(range(1, 10 * T + 3))  # ten blocks and two tokens
ANSWER = reference(PROMPT, 1)


class Hooked(OffloadScheduler):
    """Answers as the test says, and notes what it was asked."""

    asked: ClassVar[list[tuple[object, ...]]]
    answers: ClassVar[dict[str, object]]

    def _answer(self, name: str, default: object, *about: object) -> object:
        self.asked.append((name, *about))
        given = self.answers.get(name, default)
        if callable(given):
            given = given(*about)
        if isinstance(given, Exception):
            raise given
        return given

    def may_load(self, request):
        return self._answer("may_load", True)

    def may_save(self, request, block):
        start = block.number * T
        own = request.tokens.view[start : start + len(block.tokens)]
        assert block.tokens.tolist() == own.tolist()
        return self._answer("may_save", True, block.number, block.priority)

    def on_hit(self, request, tokens):
        return self._answer("on_hit", None, tokens)

    def priority(self, request, block):
        return self._answer("priority", block.priority, block.number)


class Watching(OffloadWorker):
    """The built-in worker by another name."""


class Another:
    """Extends nothing."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    Hooked.asked, Hooked.answers = [], {}
    return


def hooked(store: DictStore, **settings: object):
    classes = {"connector_module": __name__, "connector_scheduler_class": "Hooked"}
    return llm_args(store, **classes, **settings)


def run(store: DictStore, kv: PlainKv | None = None, **settings) -> tuple[int, LlmRequest]:
    """One engine's life: how many prompt tokens came from the store; the answer is right."""
    with BenchEngine(hooked(store, **settings), kv=kv) as bench:
        assert bench.answer(PROMPT) == ANSWER
        (request,) = bench.requests.values()
        return bench.store_tokens[request.request_id], request


def asked(name: str) -> list[tuple[object, ...]]:
    return [about for hook, *about in map(list, Hooked.asked) if hook == name]


def failures() -> float:
    return metrics.snapshot().get("connector.hook.failed", 0)


def saved_tokens(store: DictStore) -> int:
    return sum(len(block.tokens) for block in store.blocks)


# ---------------------------------------------------------------------- the classes


def test_one_class_or_both_may_be_the_users(store: DictStore):
    one = connector_classes(hooked(store))
    assert one == (Hooked, OffloadWorker)
    both = connector_classes(hooked(store, connector_worker_class="Watching"))
    assert both == (Hooked, Watching)


@pytest.mark.parametrize("field", ["connector_scheduler_class", "connector_worker_class"])
def test_classes_beside_a_store_extend_the_built_in_ones(store: DictStore, field: str):
    base = "OffloadScheduler" if "scheduler" in field else "OffloadWorker"
    with pytest.raises(ConnectorContractError, match=f"{field}='Another'.*{base}, which drives"):
        connector_classes(llm_args(store, **{"connector_module": __name__, field: "Another"}))
    with pytest.raises(ConfigurationError, match=f"{field}='Hookd': searched module"):
        connector_classes(llm_args(store, **{"connector_module": __name__, field: "Hookd"}))


def test_a_class_without_a_store_is_still_any_connector():
    alone = KvCacheConnectorConfig(
        connector_module=__name__,
        connector_scheduler_class="Hooked",
        connector_worker_class="Watching",
    )
    assert not alone.uses_pair
    assert KvCacheConnectorConfig(
        url="memory:", connector_module="m", connector_worker_class="W"
    ).uses_pair


# ---------------------------------------------------------------------- what they decide


def test_hooks_are_called_once_each_and_in_order(store: DictStore):
    run(store)
    blocks = [*range(11)]
    assert asked("may_load") == [[]]
    assert asked("priority") == [[number] for number in blocks]
    assert asked("may_save") == [[number, 35] for number in blocks]
    assert asked("on_hit") == []
    Hooked.asked.clear()
    assert run(store)[0] == len(PROMPT) - 1
    assert asked("on_hit") == [[len(PROMPT) - 1]]
    assert asked("may_save") == []


def test_a_request_that_may_not_load_is_neither_looked_up_nor_loaded(store: DictStore):
    run(store)
    store.lookups.clear()
    Hooked.answers = {"may_load": False}
    loaded, request = run(store)
    assert (loaded, store.lookups, store.loads) == (0, [], [])
    assert request.account.has_lost("not_loaded")


def test_the_first_refused_block_ends_the_saves(store: DictStore):
    Hooked.answers = {"may_save": lambda number, _: number != 3}
    _, request = run(store)
    assert saved_tokens(store) == 3 * T
    assert asked("may_save") == [[number, 35] for number in range(4)]
    assert request.account.unsaved == (3 * T, "refused by a hook")
    Hooked.answers = {}
    assert run(store)[0] == 3 * T


def test_a_refused_tail_is_not_saved(store: DictStore):
    Hooked.answers = {"may_save": lambda number, _: number != 10}
    _, request = run(store)
    assert saved_tokens(store) == 10 * T
    assert request.account.unsaved == (10 * T, "refused by a hook")


@pytest.mark.parametrize("save_on", ["full", "finish"])
def test_the_priority_goes_to_the_store_and_is_compared(store: DictStore, save_on: str):
    Hooked.answers = {"priority": lambda number: 90 - number}
    _, request = run(store, min_priority=85, save_on=save_on)
    assert [block.priority for block in store.blocks] == [90, 89, 88, 87, 86, 85]
    assert request.account.unsaved == (6 * T, "below min_priority")
    assert asked("may_save") == [[number, 90 - number] for number in range(6)]


def test_a_block_below_the_retention_priority_may_be_raised(store: DictStore):
    Hooked.answers = {"priority": 80}
    run(store, min_priority=50)
    assert {block.priority for block in store.blocks} == {80}
    assert saved_tokens(store) == len(PROMPT)


def test_a_preempted_request_is_asked_anew(store: DictStore):
    with BenchEngine(hooked(store)) as bench:
        request = bench.submit(PROMPT, 3)
        bench.step()
        bench.preempt(request)
        bench.run()
    assert asked("may_load") == [[], []]


def test_an_engine_without_hooks_asks_none(store: DictStore):
    Hooked.answers = {"may_save": False}
    with BenchEngine(llm_args(store)) as bench:
        assert bench.answer(PROMPT) == ANSWER
    assert saved_tokens(store) == len(PROMPT)
    assert Hooked.asked == []


@pytest.mark.parametrize("save_on", ["full", "finish"])
def test_what_a_hook_refused_stays_refused_at_the_end(store: DictStore, save_on: str):
    """Although blocks before it are saved then."""
    Hooked.answers = {"may_save": lambda number, _: number != 3}
    _, request = run(store, save_on=save_on)
    assert request.account.unsaved == (3 * T, "refused by a hook")
    assert asked("may_save") == [[number, 35] for number in range(4)]


@pytest.mark.parametrize("save_on", ["full", "finish"])
def test_the_ttl_of_a_request_goes_to_the_store(store: DictStore, save_on: str):
    with BenchEngine(llm_args(store, save_on=save_on)) as bench:
        request = bench.submit(PROMPT)
        request.cache = CacheOptions(ttl="1h")
        bench.run()
    assert all(3540 < block.expires_at - time.time() <= 3600 for block in store.blocks)
    assert saved_tokens(store) == len(PROMPT)


# ---------------------------------------------------------------------- what they break

WRONG = [RuntimeError("planted"), None, 1, "yes", object()]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_failure_of_may_load_costs_a_hit(store: DictStore, wrong: object, caplog):
    run(store)
    before = failures()
    Hooked.answers = {"may_load": wrong}
    metrics._warned.discard("connector.hook.may_load")
    assert run(store)[0] == 0
    assert failures() == before + 1
    assert "hook may_load failed" in caplog.text


@pytest.mark.parametrize(
    ("hook", "wrong"),
    [("may_save", one) for one in WRONG]
    + [("priority", one) for one in (RuntimeError("planted"), None, True, 101, -1, 3.5)],
)
def test_a_failure_of_a_hook_for_saves_costs_saves(store: DictStore, hook: str, wrong: object):
    before = failures()
    Hooked.answers = {hook: lambda number, *_: wrong if number == 2 else True if _ else 50}
    _, request = run(store)
    assert saved_tokens(store) == 2 * T
    assert request.account.unsaved == (2 * T, "hook failed")
    assert failures() == before + 1


def test_a_failure_of_on_hit_costs_nothing(store: DictStore):
    run(store)
    before = failures()
    Hooked.answers = {"on_hit": RuntimeError("planted")}
    assert run(store)[0] == len(PROMPT) - 1
    assert failures() == before + 1


def test_an_interrupt_in_a_hook_is_not_swallowed(store: DictStore):
    def interrupts() -> None:
        raise KeyboardInterrupt

    Hooked.answers = {"may_load": interrupts}
    with BenchEngine(hooked(store)) as bench, pytest.raises(KeyboardInterrupt):
        bench.submit(PROMPT)


def test_the_defaults_are_what_the_pair_does_without_them():
    plain = StoreHooks()
    request, block = None, type("Block", (), {"priority": 7})
    assert plain.may_load(request)
    assert plain.may_save(request, block)
    assert plain.on_hit(request, 5) is None
    assert plain.priority(request, block) == 7
