"""Salts keep requests apart, however long they are, and nothing keeps their texts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType

import pytest
import torch

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from kvconnect.cache.block_manager import BlockManager
from kvconnect.engine.checkpoint.random_model import make_model
from kvconnect.errors import ConfigurationError
from kvconnect.integrations.core.arguments import make_arguments
from kvconnect.integrations.core.requests import RequestMaker
from kvconnect.integrations.core.settings import EngineSettings
from kvconnect.layout import KvCacheLayout

T = 16
PROMPT = list(range(1, 71))
FULL = 69 // T * T
ONE = SamplingParams(max_tokens=1)
LONG = "tenant " * 146  # 1,022 characters


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("salts") / "model", "llama")


@pytest.fixture
def open_llm(model: Path, tmp_path: Path) -> Iterator[Callable[[], LLM]]:
    """Opens engines on one store, one after the other."""
    opened: list[LLM] = []

    def make() -> LLM:
        for one in opened:
            one.close()
        connector = KvCacheConnectorConfig(
            url=f"disk://{tmp_path}/kv?capacity=64MiB",
            lookup_timeout_ms=60_000,
            overlap_loads=False,
        )
        cache = KvCacheConfig(tokens_per_block=T, max_tokens=1024, event_buffer_max_size=64)
        opened.append(LLM(model, kv_cache=cache, connector=connector, device="cpu"))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def reused(llm: LLM, salt: str | None) -> tuple[int, int]:
    [output] = llm.generate([PROMPT], ONE, cache_salt=salt)
    return output.reused_device_tokens, output.reused_store_tokens


@pytest.mark.planted("other-salt", "engine", "key")
def test_another_salt_finds_nothing_on_the_device_nor_in_the_store(open_llm):
    llm = open_llm()
    assert reused(llm, "a") == (0, 0)
    assert reused(llm, "b") == reused(llm, None) == (0, 0)
    assert reused(llm, "a")[0] == len(PROMPT) - 1
    llm = open_llm()
    assert reused(llm, "c") == (0, 0)
    assert reused(llm, "a")[1] >= FULL


@pytest.mark.planted("long-salt", "engine", "key")
def test_salts_that_differ_in_their_last_character_only_are_apart(open_llm):
    llm = open_llm()
    assert reused(llm, f"{LONG}ab") == reused(llm, f"{LONG}ac") == (0, 0)
    assert reused(llm, LONG) == reused(llm, f"{LONG}a") == (0, 0)
    assert reused(open_llm(), f"{LONG}ac")[1] >= FULL


@pytest.mark.planted("long-salt", "engine", "refused")
@pytest.mark.parametrize(
    ("salt", "complaint"),
    [
        ("", "cache_salt: '' must not be empty; give 1 to 1,024 characters, or no salt"),
        ("s" * 1025, r"cache_salt: 'ss.*\.\.\. has 1,025 characters; give 1 to 1,024, or no salt"),
        ("s" * 4_000_000, r"cache_salt: 'ss.*\.\.\. has 4,000,000 characters"),
    ],
)
def test_a_salt_has_1_to_1024_characters(open_llm, salt, complaint):
    llm = open_llm()
    for ask in (llm.generate, llm.submit):
        with pytest.raises(ConfigurationError, match=f"^{complaint}") as refused:
            ask(PROMPT, ONE, cache_salt=salt)
        assert len(str(refused.value)) < 200


def texts_in(*roots: object) -> set[str]:
    """Every string that is reachable from `roots`, modules and code aside."""
    skipped = (ModuleType, FunctionType, BuiltinFunctionType, type, torch.Tensor)
    seen: set[int] = set()
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            found.add(one)
        elif id(one) not in seen and not isinstance(one, skipped):
            seen.add(id(one))
            waiting += gc.get_referents(one)
    return found


def test_nothing_of_an_engine_keeps_the_text_of_a_salt_whose_requests_are_gone(open_llm):
    llm = open_llm()
    salts = [f"{LONG}{number}" for number in range(3)]
    for salt in salts:
        reused(llm, salt)
    assert llm.take_events()  # what is left of them are blocks that were published
    live = llm.submit(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True), cache_salt="alive")
    next(live.stream())
    assert "alive" in texts_in(llm._engine, llm._thread)  # the walk sees what requests hold
    live.abort()
    # A request whose tail is being saved is alive: these steps are the time for that.
    for _ in range(200):
        llm.generate([PROMPT], ONE)
        if (held := texts_in(llm._engine, llm._thread)).isdisjoint(salts):
            break
    assert held.isdisjoint(salts)


def test_a_tree_keeps_digests_of_salts_of_any_length():
    """Other engines' salts have no longest length; what they made stays until it is evicted."""
    layout = KvCacheLayout(2, 2, 8, 8, T, torch.float32)
    manager = BlockManager(KvCacheConfig(tokens_per_block=T, max_tokens=64 * T), [layout])
    salts = [f"{number}" * 100_000 for number in range(4)]
    for number, salt in enumerate(salts):
        manager.add_sequence(number, PROMPT, cache_salt=salt)
        manager.commit(number, len(PROMPT))
        manager.release(number)
    assert len(manager._tree.roots) == len(salts)
    assert texts_in(manager).isdisjoint(salts)
    found = [manager.match(PROMPT, cache_salt=salt) for salt in (*salts, "other")]
    assert found == [len(PROMPT) - 1] * len(salts) + [0]


def test_what_makes_requests_of_other_engines_keeps_no_salt(tmp_path):
    layout = KvCacheLayout(2, 2, 8, 8, T, torch.float32)
    settings = EngineSettings.of("vllm", {"url": "memory:"}, where="test")
    maker = RequestMaker(make_arguments(settings, tmp_path, b"m" * 32, [layout]), None)
    tokens = torch.tensor(PROMPT, dtype=torch.int32).numpy()
    salts = [f"{number}" * 100_000 for number in range(3)]
    keys = {tuple(maker.make(tokens, cache_salt=salt).block_keys()) for salt in salts}
    assert len(keys) == len(salts)
    assert texts_in(maker).isdisjoint(salts)
