"""What adapters of several engines share: settings, keys, adapters' digests, memory, access."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.backends.memory import from_url
from kvconnect.backends.url import StoreUrl
from kvconnect.config import KvCacheConfig, KvCacheConnectorConfig
from kvconnect.connector.data import Direction, LlmArgs
from kvconnect.connector.io import access as access_of_pools
from kvconnect.connector.io import blocking
from kvconnect.connector.io.blocking import StoreAccess
from kvconnect.connector.io.copiers import AttachedCopier, PoolCopier
from kvconnect.connector.io.orders import BlockSave
from kvconnect.connector.io.staging import StagingPool
from kvconnect.connector.io.strided import HostCopier, StridedCopier, StridedPlanes
from kvconnect.digest.files import ModelFiles
from kvconnect.errors import ConfigurationError, ModelChanged, UsageError
from kvconnect.frame import payload
from kvconnect.integrations.core import EngineSettings
from kvconnect.integrations.core.adapters import AdapterDigests, adapter_digest
from kvconnect.integrations.core.configuration import refuse_elsewhere
from kvconnect.integrations.core.memory import planes_of
from kvconnect.integrations.core.models import digest_of_model, directory_of, refuse_changed
from kvconnect.integrations.core.requests import (
    MixedKeyChain,
    PromptContent,
    RequestMaker,
    extra_key_of,
)
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.keys import BlockKey, KeyChain, Namespace, root_key
from kvconnect.layout import KvCacheLayout
from kvconnect.tokens import TokenBuffer, as_token_array

T = 4
LAYOUT = KvCacheLayout(2, 2, 8, 8, T, torch.float32)
ROOT = BlockKey(b"r" * 32)
WHERE = "kv_connector_extra_config"


def settings(**given: object) -> EngineSettings:
    return EngineSettings.of("test", {"url": "memory:", **given}, where=WHERE)


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, r"extra_config\.url: is missing.*disk:///"),
        ({"url": ""}, r"extra_config\.url: is missing"),
        ({"url": "memory:", "urls": 1}, r"extra_config: unknown field 'urls'.*'url'"),
        ({"url": "memory:", "namespaces": 1}, "'namespaces'.*'namespace'"),
        ({"url": "memory:", "namespace": "all"}, "namespace='all'"),
        ({"url": "memory:", "load_timeout_s": -1}, "load_timeout_s=-1"),
        ({"url": "memory:", "backend": 3}, "unknown field 'backend'"),
    ],
)
def test_wrong_settings_name_the_field(given, says):
    with pytest.raises(ConfigurationError, match=says):
        EngineSettings.of("test", given, where=WHERE)


def test_settings_of_the_engine_itself_are_passed_over():
    made = EngineSettings.of(
        "test", {"url": "memory:", "backend_name": "x"}, where=WHERE, passed_over=["backend_name"]
    )
    assert made.connector.url == "memory:"
    assert not made.connector.save_partial_tails
    assert made.without_saves().connector.min_priority == 1


def test_namespaces_are_the_engines_own_unless_shared():
    assert extra_key_of(settings()) == "engine=test"
    assert extra_key_of(settings(namespace="shared")) is None
    assert extra_key_of(settings(), {"b": "2", "a": "1"}) == "engine=test;a=1;b=2"


def arguments(backend: object = None, load_timeout_s: float = 5.0) -> LlmArgs:
    return LlmArgs(
        model="none",
        kv_cache_config=KvCacheConfig(tokens_per_block=T),
        kv_connector_config=KvCacheConnectorConfig(
            backend=backend, lookup_timeout_ms=60_000, load_timeout_s=load_timeout_s
        ),
        layouts=(LAYOUT,),
        model_digest=b"d" * 32,
    )


def test_keys_of_a_shared_namespace_are_those_of_our_own_engine():
    maker = RequestMaker(arguments(), extra_key_of(settings(namespace="shared")))
    tokens = as_token_array(range(10))
    own = KeyChain(root_key(b"d" * 32, [LAYOUT], Namespace()), T, TokenBuffer(tokens))
    assert maker.make(tokens).block_keys() == own.keys()


def test_everything_that_shapes_kv_separates_keys():
    maker = RequestMaker(arguments(), "engine=test")
    tokens = as_token_array(range(10))
    kinds = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"adapter": "a"},
        {"contents": [PromptContent(0, 1, b"a")]},
    ]
    first = [maker.make(tokens, **kind).block_keys()[0] for kind in kinds]
    assert len(set(first)) == len(first)
    maker.separate("reset=1")
    assert maker.make(tokens).block_keys()[0] not in first


# ------------------------------------------------------------------ contents in keys

contents = st.lists(
    st.builds(
        PromptContent, st.integers(0, 30), st.integers(1, 12), st.binary(min_size=1, max_size=3)
    ),
    max_size=4,
)


def chain(given: list[PromptContent], length: int = 40) -> MixedKeyChain:
    return MixedKeyChain(ROOT, T, TokenBuffer(as_token_array(range(length))), given)


@given(contents, contents)
def test_blocks_have_equal_keys_exactly_up_to_where_contents_differ(one, other):
    def touching(given: list[PromptContent], block: int) -> list[PromptContent]:
        low, high = block * T, (block + 1) * T
        return sorted(
            (each for each in given if each.start < high and each.start + each.length > low),
            key=repr,
        )

    equal = next((n for n in range(10) if touching(one, n) != touching(other, n)), 10)
    left, right = chain(one).keys(), chain(other).keys()
    assert left[:equal] == right[:equal]
    assert not set(left[equal:]) & set(right[equal:])


@given(contents, st.lists(st.integers(0, 10), max_size=5))
def test_keys_are_the_same_in_whatever_pieces_they_are_hashed(given, stops):
    lazily = chain(given)
    for stop in stops:
        lazily.keys(0, stop)
    assert lazily.keys() == chain(list(reversed(given))).keys()


@given(contents, st.integers(0, 10))
def test_a_snapshot_has_the_keys_of_its_contents(given, num_hashed):
    one = chain(given)
    one.keys(0, num_hashed)
    snapshot = one.snapshot()
    assert snapshot.keys() == chain(given).keys()
    one.adopt(snapshot)
    assert one.num_hashed == 10
    assert one.keys() == snapshot.keys()


def test_without_contents_keys_are_the_plain_ones():
    plain = KeyChain(ROOT, T, TokenBuffer(as_token_array(range(40))))
    assert chain([]).keys() == plain.keys()
    touched = chain([PromptContent(9, 2, b"x")])
    assert touched.keys()[:2] == plain.keys()[:2]
    assert touched.tail(38) != plain.tail(38)


# ------------------------------------------------------------------ adapters


def adapter(folder: Path, weights: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def test_an_adapters_digest_is_of_its_content(tmp_path):
    one, same = adapter(tmp_path / "a", b"1" * 100), adapter(tmp_path / "b", b"1" * 100)
    other = adapter(tmp_path / "c", b"2" * 100)
    assert adapter_digest(one) == adapter_digest(same) != adapter_digest(other)
    (same / "adapter_config.json").write_text('{"r": 9}')
    assert adapter_digest(one) != adapter_digest(same)
    with pytest.raises(ConfigurationError, match="no files"):
        adapter_digest(tmp_path)


def test_an_adapter_that_changed_has_no_digest_any_more(tmp_path):
    folder = adapter(tmp_path / "a", b"1" * 100)
    digests = AdapterDigests()
    found = digests.find(1, str(folder))
    assert found is not None
    assert found.result(60) == adapter_digest(folder)
    before = (folder / "adapter_model.safetensors").stat().st_ctime_ns
    while (folder / "adapter_model.safetensors").stat().st_ctime_ns == before:
        adapter(folder, b"2" * 100)
    assert digests.find(1, str(folder)) is None
    adapter(folder, b"1" * 100)
    assert digests.find(1, str(folder)) is None
    digests.close()


def test_an_adapter_by_the_name_of_another_has_no_digest(tmp_path):
    """An engine goes on with what it has loaded by that name."""
    first, other = adapter(tmp_path / "a", b"1" * 100), adapter(tmp_path / "b", b"2" * 100)
    linked = tmp_path / "link"
    linked.symlink_to(first)
    digests = AdapterDigests()
    assert digests.find(1, str(first)) is not None
    assert digests.find(1, f"{first}/") is not None
    assert digests.find(1, str(linked)) is not None
    assert digests.find(1, str(other)) is None
    assert digests.find(1, str(other)) is None
    assert digests.find(1, str(first)) is None  # the engine may have dropped it for the other
    assert digests.find(2, str(other)) is not None
    digests.close()


def test_a_name_that_was_refused_has_no_digest_in_any_directory(tmp_path):
    folder = adapter(tmp_path / "a", b"1" * 100)
    digests = AdapterDigests()
    assert digests.find(1, "of-a-hub") is None
    assert digests.find(1, str(folder)) is None
    assert digests.find(3, str(folder)) is not None
    digests.close()


def test_files_that_change_before_they_are_read_have_no_digest(tmp_path):
    """The engine loads an adapter when a request is scheduled: before or after the change."""
    folder = adapter(tmp_path / "a", b"1" * 100)
    digests = AdapterDigests()
    go = threading.Event()
    digests._thread.submit(go.wait, 60)
    found = digests.find(1, str(folder))
    adapter(folder, b"2" * 101)
    go.set()
    assert found is not None
    with pytest.raises(ModelChanged, match="changed while it was read"):
        found.result(60)
    digests.close()


def test_a_model_that_is_nowhere_is_refused(tmp_path):
    assert directory_of(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigurationError, match="'no/model' is neither"):
        directory_of("no/model", cache_dir=str(tmp_path))


def test_a_model_that_changed_since_an_engines_process_started_has_no_digest(tiny, tmp_path):
    """What that process loaded is not known: neither may stand for it in keys."""
    first, second, third = tmp_path / "first", tmp_path / "second", tmp_path / "third"
    for directory in (first, second):
        shutil.copytree(tiny, directory)
    (link := tmp_path / "current").symlink_to(first)
    (tmp_path / "next").symlink_to("second")
    wanted = digest_of_model(link)
    with multiprocessing.get_context("spawn").Pool(1) as engine:

        def digest(directory: Path, revision: str | None = None) -> bytes:
            asked = engine.apply_async(digest_of_model, (directory,), {"revision": revision})
            return asked.get(60)

        assert digest(link) == wanted
        (tmp_path / "next").replace(link)
        with pytest.raises(ModelChanged, match=f"'{link}' changed after this process"):
            digest(link)
        assert digest(second) == wanted
        weights = next(first.glob("*.safetensors"))
        weights.write_bytes(weights.read_bytes())
        with pytest.raises(ModelChanged, match=f"'{weights}' changed"):
            digest(first)
        second.rename(third)
        with pytest.raises(ModelChanged, match=f"'{third}' changed"):
            digest(third)
        named = {digest(third, revision) for revision in ("org/name@1", "org/name@2")}
        assert len(named) == 2  # the caller's promise
    assert digest_of_model(third) == wanted


def settle() -> int:
    """A moment that comes after all changes so far, and before all to come."""
    time.sleep(0.02)
    now = time.time_ns()
    time.sleep(0.02)
    return now


@pytest.fixture
def shipped(tiny, tmp_path) -> Path:
    """A model below another folder, with weights in a folder, behind links."""
    model = shutil.copytree(tiny, tmp_path / "models" / "mine")
    (model / "fp16").mkdir()
    (tmp_path / "blob").write_bytes(b"weights")
    (tmp_path / "to blob").symlink_to("blob")
    (model / "fp16" / "model.safetensors").symlink_to("../../../to blob")
    (model / "params.json").write_text("{}")
    (tmp_path / "current").symlink_to("models/mine")
    return tmp_path


def switch_link(root: Path) -> None:
    shutil.copy2(root / "blob", root / "old")
    (root / "new").symlink_to("old")
    (root / "new").replace(root / "to blob")


def rename_folder(root: Path) -> None:
    (root / "models").rename(root / "old models")
    (root / "old models").rename(root / "models")


CHANGES = {
    "models/mine/params.json": lambda root: (root / "models/mine/params.json").write_text("{ }"),
    "models/mine/fp16": lambda root: (root / "models/mine/fp16/x.bin").write_bytes(b""),
    "models/mine": lambda root: (root / "models/mine/x.log").write_bytes(b""),
    "to blob": switch_link,
    "blob": lambda root: (root / "blob").write_bytes(b"Weights"),
    "models": rename_folder,
}


@pytest.mark.parametrize("changed", CHANGES)
def test_a_change_on_the_way_to_any_file_that_counts_is_found(shipped, changed):
    directory = shipped / "current"
    since = settle()
    wanted = digest_of_model(directory, since_ns=since)
    (shipped / "models" / "another model").mkdir()
    (shipped / "log").write_text("of others")
    assert digest_of_model(directory, since_ns=since) == wanted
    CHANGES[changed](shipped)
    with pytest.raises(ModelChanged, match=rf"'{shipped / changed}' changed after"):
        digest_of_model(directory, since_ns=since)
    digest_of_model(directory, since_ns=settle())


def repository_of(model: Path, root: Path, *others: str) -> Path:
    """Lays out a repository of the hub's cache with `model`'s snapshot, and empty `others`."""
    snapshot, blobs = root / "snapshots" / "commit", root / "blobs"
    for folder in (snapshot, *(root / "snapshots" / one for one in others), root / "refs", blobs):
        folder.mkdir(parents=True)
    for number, file in enumerate(model.iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (root / "refs" / "main").write_text("another")
    return snapshot


def test_a_file_of_the_hubs_cache_that_is_no_link_to_it_counts(tiny, tmp_path):
    """The engine itself may have downloaded the others: their names are those of their content."""
    snapshot = repository_of(tiny, tmp_path)
    assert digest_of_model(snapshot, since_ns=0) == digest_of_model(tiny)
    (snapshot / "pytorch_model.bin").write_bytes(b"of the user's own")
    with pytest.raises(ModelChanged, match=r"pytorch_model.bin' changed after"):
        digest_of_model(snapshot, since_ns=0)


def test_links_in_a_circle_are_a_change(tiny, tmp_path, monkeypatch):
    model = shutil.copytree(tiny, tmp_path / "model")
    with ModelFiles(model) as files:
        (tmp_path / "circle").symlink_to("circle")
        monkeypatch.setattr(files, "directory", tmp_path / "circle")
        with pytest.raises(ModelChanged, match="changed while it was read"):
            refuse_changed(files, time.time_ns())


@pytest.mark.parametrize("changed", ["refs/main", "snapshots/commit/config.json"])
@pytest.mark.parametrize("others", [("another",), ()], ids=["several", "only"])
def test_a_reference_or_link_that_is_switched_to_a_snapshot_is_found(
    tiny, tmp_path, others, changed
):
    snapshot, path = repository_of(tiny, tmp_path, *others), tmp_path / changed
    since = settle()
    digest_of_model(snapshot, since_ns=since)
    if path.is_symlink():
        target = path.readlink()
        path.unlink()
        path.symlink_to(target)
    else:
        path.write_text("commit")
    with pytest.raises(ModelChanged, match=rf"{changed}' was switched"):
        digest_of_model(snapshot, since_ns=since)


@pytest.mark.parametrize("begun", ["with nothing", "with the configuration"])
def test_the_only_snapshot_may_be_the_engine_s_own_download(tiny, tmp_path, begun):
    root = tmp_path / "models--org--name"
    since = settle()
    snapshot = repository_of(tiny, root)
    (root / "refs" / "main").write_text("commit")
    if begun == "with the configuration":  # which another process had downloaded before it
        since = settle()
        link = snapshot / "model.safetensors"
        number = link.readlink()
        link.unlink()
        shutil.copy(tiny / "model.safetensors", root / "blobs" / "new")
        link.symlink_to(number.with_name("new"))
    assert digest_of_model(snapshot, since_ns=since) == digest_of_model(tiny)


def test_parts_of_other_repositories_are_refused(tmp_path):
    config = {"model_type": "x", "auto_map": {"AutoModel": "org/x--modeling.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refuse_elsewhere({"text_model_id": None}, tmp_path, trusts_code=False)
    for name in ("text_model_id", "audio_model_id"):
        with pytest.raises(ConfigurationError, match=f"{name}=org/part.*model_revision"):
            refuse_elsewhere({name: "org/part"}, tmp_path, trusts_code=False)
    with pytest.raises(ConfigurationError, match="auto_map: 'org/x--modeling"):
        refuse_elsewhere({}, tmp_path, trusts_code=True)
    config["auto_map"] = {"AutoModel": "modeling.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refuse_elsewhere({}, tmp_path, trusts_code=True)


# ------------------------------------------------------------------ memory


def content(staging: StagingPool, slot: int) -> torch.Tensor:
    """The payload of a slot."""
    return payload(staging.frame(slot), LAYOUT.block_nbytes).view(torch.float32)


@pytest.mark.parametrize("gap", [0, 24], ids=["evenly apart", "unevenly apart"])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [0, 1, 4, 3, 7]])
@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_reach_their_places_and_come_back_whatever_the_order_of_the_slots(
    gap, order, transposed
):
    size = 9 * T * 2 * 8
    memory = torch.zeros(4 * size + gap)
    starts = [number * size + gap * (number == 3) for number in range(4)]
    planes = [memory[start : start + size].view(9, T, 2, 8) for start in starts]
    staging = StagingPool(1 << 20, LAYOUT.block_nbytes)
    slots = staging.take(Direction.LOAD, 8)
    for slot in slots:
        content(staging, slot).copy_(torch.randn(LAYOUT.block_nbytes // 4))
    if transposed:
        views = [plane.view(9, 2, 8, T).permute(0, 3, 1, 2) for plane in planes]
        copier: PoolCopier = StridedCopier(StridedPlanes(tuple(views)), LAYOUT, staging)
    else:
        views = planes
        copier = HostCopier(PagedKv.from_views(views, per_layer=2), LAYOUT, staging)
    blocks = [3, 8, 1, 0, 6]
    copier.copy_in([slots[index] for index in order], blocks)
    for number, view in enumerate(views):
        for block, index in zip(blocks, order, strict=True):
            stored = content(staging, slots[index]).view(4, T, 2, 8)
            assert torch.equal(view[block], stored[number])
        assert not view[[2, 4, 5, 7]].any()
    saved = staging.take(Direction.SAVE, len(blocks))
    copier.copy_out(blocks, saved, None)
    for slot, index in zip(saved, order, strict=True):
        assert torch.equal(content(staging, slot), content(staging, slots[index]))
    before = memory.clone()
    for wrong in (-1, 9):
        with pytest.raises(IndexError, match="not all of the pool"):
            copier.copy_in(slots[:2], [0, wrong])
    assert torch.equal(memory, before)


def test_detached_memory_is_neither_written_nor_saved():
    memory = torch.zeros(LAYOUT.num_layers * 2, 9, T, 2, 8)
    planes = PagedKv.from_views(list(memory), per_layer=2)
    staging = StagingPool(1 << 20, LAYOUT.block_nbytes)
    copier = AttachedCopier(LAYOUT, staging, torch.device("cpu"))
    slots = staging.take(Direction.LOAD, 1)
    content(staging, slots[0]).fill_(1)
    with copier.attached(planes) as first:
        copier.copy_in(slots, [first + 3])
    assert memory[:, 3].all()
    memory.zero_()
    copier.copy_in(slots, [first + 3])
    assert not memory.any()
    with pytest.raises(UsageError, match="not attached"):
        copier.copy_out([first + 3], slots, None)


def test_planes_of_another_shape_are_refused():
    keys, values = torch.zeros(2, 9, T, 2, 8)
    assert isinstance(planes_of([(keys, values)] * 2, LAYOUT, 9, name="m"), PagedKv)
    for planes, says in (
        ([(keys, values)], "1 layers"),
        ([(keys,)] * 2, "1 planes"),
        ([(keys, values[..., :4])] * 2, "values.*cannot be served"),
        ([(keys.double(), values)] * 2, "float64"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            planes_of(planes, LAYOUT, 9, name="m")


# ------------------------------------------------------------------ access, whose loop is stuck


@pytest.fixture
def access() -> Iterator[tuple[StoreAccess, torch.Tensor]]:
    values = torch.randn(LAYOUT.num_layers, 2, 9, T, 2, 8)
    planes = PagedKv.from_views([view for layer in values for view in layer], per_layer=2)
    store = from_url(StoreUrl.parse("memory:?capacity=16MiB"))
    made = StoreAccess(arguments(store, load_timeout_s=0.2), [planes])
    yield made, values
    made.close()
    made.close()


def blocks(keys: list[BlockKey], ids: list[int]) -> list[BlockSave]:
    tokens = np.arange(T, dtype=np.int32)
    parents = [ROOT, *keys]
    return [
        BlockSave(key, parent, number, block, tokens, 35)
        for number, (key, parent, block) in enumerate(zip(keys, parents, ids, strict=False))
    ]


def test_nothing_is_copied_once_a_caller_was_told_that_the_loop_is_stuck(access, monkeypatch):
    monkeypatch.setattr(blocking, "_SPARE_S", 0.1)
    made, values = access
    keys = chain([]).keys()[:3]
    made.save(blocks(keys, [1, 2, 3]))
    assert made.flush(60)
    before = values.clone()
    opened, told, go_on = made._access.store, threading.Event(), threading.Event()
    load = opened.backend.load

    async def load_and_block(keys, into):
        filled = await load(keys, into)
        asyncio.get_running_loop().call_later(0.05, go_on.wait, 60)
        return filled

    monkeypatch.setattr(opened.backend, "load", load_and_block)
    for _ in range(2):  # all threads that copy
        opened.copying.submit(lambda: told.wait(60))
    assert made.load(keys, [5, 6, 7]) == 0
    told.set()
    behind = threading.Barrier(3)
    for _ in range(2):
        opened.copying.submit(lambda: behind.wait(60))
    behind.wait(60)
    go_on.set()
    assert torch.equal(values, before)


def test_what_is_staged_is_written_though_its_access_is_dropped(monkeypatch):
    monkeypatch.setattr(access_of_pools, "CALL_NBYTES", 1)  # a block of a call
    store = from_url(StoreUrl.parse("memory:?capacity=16MiB"))
    values = torch.randn(LAYOUT.num_layers * 2, 9, T, 2, 8)
    made = StoreAccess(arguments(store), [PagedKv.from_views(list(values), per_layer=2)])
    opened, go_on = made._access.store, threading.Event()
    opened.io.call_soon(lambda: go_on.wait(60))
    assert made.save(blocks(chain([]).keys()[:8], list(range(1, 9)))) == 8
    saves = made._saves
    del made
    go_on.set()
    assert saves.flush(20)
    opened.release()


def test_each_lookup_has_the_whole_budget(access, monkeypatch):
    made, _ = access
    keys = chain([]).keys()[:3]
    made.save(blocks(keys, [1, 2, 3]))
    assert made.flush(60)
    backend = made._access.store.backend
    lookup = backend.lookup

    async def lookup_later(keys):
        await asyncio.sleep(0.02)
        return await lookup(keys)

    monkeypatch.setattr(backend, "lookup", lookup_later)
    for _ in range(2):
        made._budget._left_s = 0.0  # as after a lookup that took it all
        assert made.lookup(keys) == 3
