"""Models with sliding windows: what the windows need comes back from a store, and no more."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from harness import PARAMS, PROMPT, T, answer, open_llm
from observed import slow
from torch import Tensor

from kvconnect import LLM, SamplingParams
from kvconnect.backend import StoredBlock
from kvconnect.backends.disk.store import DiskBackend
from kvconnect.backends.memory.store import MemoryBackend
from kvconnect.engine.checkpoint.random_model import make_model
from kvconnect.keys import BlockKey

WINDOW = 40  # of the model's sliding layers: two blocks and a half


class CountingDisk(DiskBackend):
    """Counts the frames that it saves and loads, and the keys it is asked for.

    Attributes:
        saved: by group, the parents of the keys that were saved, in any order.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, capacity=64 << 20)
        self.counts = Counter[str]()
        self.saved: dict[int, dict[BlockKey, BlockKey | None]] = {}

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        self.counts["asked"] += len(keys)
        return await super().lookup(keys)

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        self.counts["loaded"] += len(keys)
        return await super().load(keys, into)

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        for block in blocks:
            self.saved.setdefault(block.group, {})[block.key] = block.parent
        return await super().save(blocks)


def _model(tmp_path_factory: pytest.TempPathFactory, arch: str) -> Path:
    directory = tmp_path_factory.mktemp(arch) / "model"
    return make_model(
        directory, arch, seed=3, num_layers=4, sliding_window=WINDOW, max_position_embeddings=1024
    )


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers with and without a window, in turns."""
    return _model(tmp_path_factory, "gemma3")


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every layer has a window."""
    return _model(tmp_path_factory, "mistral")


@pytest.fixture(scope="module")
def plain(gemma: Path) -> Iterator[LLM]:
    """Gemma without a store."""
    with open_llm(gemma) as llm:
        yield llm


@pytest.fixture(scope="module")
def filled(gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> CountingDisk:
    """A store with `PROMPT`, which was computed in chunks. Its directory is not to be changed."""
    store = CountingDisk(tmp_path_factory.mktemp("filled") / "store")
    answer(gemma, store, max_num_tokens=30)
    return store


@pytest.fixture
def copied(filled: CountingDisk, tmp_path: Path) -> Path:
    """A copy of the filled store."""
    directory = tmp_path / "copy"
    shutil.copytree(filled.path, directory)
    return directory


def blocks(first_token: int, end: int) -> int:
    """How many blocks overlap these tokens."""
    return -(-end // T) - first_token // T


def test_every_block_is_saved_though_the_window_passes_over_it(filled: CountingDisk) -> None:
    num_valid = len(PROMPT) + PARAMS.max_tokens - 1
    wanted = blocks(0, num_valid)  # full ones and the tail
    assert {group: len(keys) for group, keys in filled.saved.items()} == {0: wanted, 1: wanted}


def test_after_a_restart_only_the_last_prompt_token_is_computed(
    gemma: Path, plain: LLM, copied: Path
) -> None:
    store = CountingDisk(copied)
    again = answer(gemma, store)
    assert again.output_token_ids == plain.generate([PROMPT], PARAMS)[0].output_token_ids
    assert (again.reused_store_tokens, again.computed_tokens) == (len(PROMPT) - 1, 1)
    end = len(PROMPT) - 1
    assert store.counts["loaded"] == blocks(0, end) + blocks(end - WINDOW + 1, end)
    assert store.counts["asked"] == len(PROMPT) // T + blocks(end - WINDOW + 1, end)


@pytest.mark.parametrize("length", [T, WINDOW, 5 * T + 1])
def test_a_prompt_that_leaves_the_stored_path_anywhere_keeps_what_is_common(
    gemma: Path, plain: LLM, copied: Path, length: int
) -> None:
    branch = [*PROMPT[:length], *([251] * 9)]
    warm = answer(gemma, CountingDisk(copied), branch)
    assert warm.output_token_ids == plain.generate([branch], PARAMS)[0].output_token_ids
    assert warm.reused_store_tokens == length


def test_a_model_of_windows_alone_loads_no_more_either(mistral: Path, tmp_path: Path) -> None:
    cold, warm = CountingDisk(tmp_path / "store"), CountingDisk(tmp_path / "store")
    first = answer(mistral, cold, max_num_tokens=30)
    again = answer(mistral, warm)
    assert again.output_token_ids == first.output_token_ids == answer(mistral).output_token_ids
    assert (again.reused_store_tokens, again.computed_tokens) == (len(PROMPT) - 1, 1)
    end = len(PROMPT) - 1
    assert warm.counts["loaded"] == blocks(end - WINDOW + 1, end)


@pytest.mark.parametrize("lost", [0, 11])
def test_without_one_of_the_windows_blocks_less_is_reused_and_no_token_wrong(
    gemma: Path, plain: LLM, filled: CountingDisk, copied: Path, lost: int
) -> None:
    parents = filled.saved[0] | filled.saved[1]

    def depth(key: BlockKey | None) -> int:
        return 1 + depth(parents[key]) if key in parents else -1

    (key,) = (one for one in filled.saved[1] if depth(one) == lost)

    class Lossy(CountingDisk):
        async def lookup(self, keys: Sequence[BlockKey]) -> int:
            keys = keys[: keys.index(key)] if key in keys else keys
            return await super().lookup(keys)

    again = answer(gemma, Lossy(copied))
    assert again.output_token_ids == plain.generate([PROMPT], PARAMS)[0].output_token_ids
    needed = range((len(PROMPT) - WINDOW) // T, len(PROMPT) // T + 1)
    assert again.reused_store_tokens == (lost * T if lost in needed else len(PROMPT) - 1)


@pytest.mark.parametrize(
    ("arch", "in_memory"), [("gemma", True), ("mistral", False), *slow(("gemma", False))]
)
def test_many_requests_in_little_memory_are_all_right(
    request: pytest.FixtureRequest, tmp_path: Path, arch: str, *, in_memory: bool
) -> None:
    """Prefixes in common, chunks, a device that forgets, and a memory store that forgets, too."""
    model = request.getfixturevalue(arch)
    random = np.random.default_rng(5)
    prompts = [
        [*PROMPT[: int(random.integers(1, 200))], *map(int, random.integers(1, 250, 7))]
        for _ in range(8)
    ]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with open_llm(model, max_tokens=8192) as llm:
        expected = [output.output_token_ids for output in llm.generate(prompts, params)]
    reused = 0
    for _ in range(2):
        store = MemoryBackend(4 << 20) if in_memory else CountingDisk(tmp_path)
        with open_llm(model, store, max_tokens=320, max_num_tokens=48) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, params)
                assert [output.output_token_ids for output in outputs] == expected
                reused += sum(output.reused_store_tokens for output in outputs)
    assert reused > 0
