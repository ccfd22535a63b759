"""Planted identities between a prefill and a decode: what P computes, and D would not have.

Two nodes of the transfer pair meet as two engines do: by the digest of each one's model. Damage on
the way stands in ``tests/transfer`` and ``tests/disagg``, several ranks in ``tests/connector``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from engines import ANSWER, PREFILL, open_engine, prompt_of, until
from file_plants import file_plants, flip_byte
from model_directories import CONFIG, SHARDS, make, tensors
from rows import cells

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig
from kvconnect.config import TransferConfig
from kvconnect.connector.data import KvCachePool, LlmArgs
from kvconnect.connector.disagg.node import TransferNode
from kvconnect.digest import model_digest
from kvconnect.engine.checkpoint.random_model import make_model
from kvconnect.layout import KvCacheLayout

SECRET = "correct horse battery staple"
LAYOUT = KvCacheLayout(1, 2, 4, 4, 8, torch.float32)
PROMPT = prompt_of(60)


# --------------------------------------------------------------- the files of a model's directory


class Nodes:
    """A node of each role, for the model of a digest."""

    def __init__(self) -> None:
        self._open: list[TransferNode] = []

    def node(self, role: str, digest: bytes) -> TransferNode:
        transfer = TransferConfig(role=role, secret=SECRET)
        args = LlmArgs(
            "model",
            KvCacheConfig(max_tokens=64),
            KvCacheConnectorConfig(transfer=transfer),
            layouts=(LAYOUT,),
            model_digest=digest,
        )
        node = TransferNode.acquire(args)
        self._open.append(node)
        node.open([KvCachePool(LAYOUT, torch.zeros(4, LAYOUT.block_nbytes, dtype=torch.uint8))])
        return node

    def refusal(self, ours: bytes, theirs: bytes) -> str:
        """Why a decode of one model reads nothing from a prefill of another; empty: it does."""
        prefill, decode = self.node("prefill", theirs), self.node("decode", ours)
        (claim,) = decode.claim(prefill.address, "a prompt")
        until(lambda: claim.failed or (claim.link is not None and claim.link.handle is not None))
        refused = claim.reason
        claim.drop()
        self.close()
        return refused

    def close(self) -> None:
        while self._open:
            self._open.pop().release()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


HF = {"model.safetensors": tensors("a")}


@pytest.mark.parametrize("plant", file_plants("transfer", "refused"))
def test_models_of_other_files_do_not_read_from_each_other(plant, nodes, tmp_path):
    model = make(tmp_path / "model", HF)
    plant.prepare(model)
    one = model_digest(model, cache_dir=tmp_path)
    plant.change(model)
    assert "model: " in nodes.refusal(one, model_digest(model, cache_dir=tmp_path))


@pytest.mark.planted("weight-byte", "transfer", "refused")
def test_models_that_differ_in_one_byte_do_not_read_from_each_other(nodes, tmp_path):
    model = make(tmp_path / "model", HF)
    one = model_digest(model, cache_dir=tmp_path)
    flip_byte(model / "model.safetensors")
    assert "model: " in nodes.refusal(one, model_digest(model, cache_dir=tmp_path))


@pytest.mark.planted("same-revision", "transfer", "refused")
def test_a_revision_promises_weights_and_no_settings(nodes, tmp_path):
    changed = {"config.json": json.dumps(CONFIG | {"rope_theta": 2e4}).encode()}
    one, other = make(tmp_path / "one", HF), make(tmp_path / "other", HF | changed)
    digests = [model_digest(each, revision="v1", cache_dir=tmp_path) for each in (one, other)]
    assert "model: " in nodes.refusal(*digests)


@pytest.mark.planted("files-alone", "transfer", "hit")
def test_one_model_in_two_places_reads_from_itself(nodes, tmp_path):
    digests = [
        model_digest(make(tmp_path / name, SHARDS), cache_dir=tmp_path) for name in ("a", "b")
    ]
    assert nodes.refusal(*digests) == ""


# ------------------------------------------------------------------------------------ two engines


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("transfer") / "model", "llama")


@pytest.fixture
def opened() -> Iterator[Callable[..., LLM]]:
    engines: list[LLM] = []

    def start(directory: Path, role: str, **more) -> LLM:
        engines.append(open_engine(directory, role, **more))
        return engines[-1]

    yield start
    for llm in engines:
        llm.close()


def fetched(prefill: LLM, decode: LLM, prompt=PROMPT, ours=None, theirs=None) -> int:
    """Tokens of the prompt that the decode took; `theirs` is said to the prefill, `ours` to it."""
    (first,) = prefill.generate(
        [prompt], PREFILL, kv_transfer_params={"do": "prefill"}, **(theirs or {})
    )
    (output,) = decode.generate(
        [prompt], ANSWER, kv_transfer_params=first.kv_transfer_params, **(ours or {})
    )
    return output.reused_store_tokens


WHOLE = len(PROMPT) - 1


@pytest.mark.planted("replaced-after-loading", "transfer", "refused")
def test_a_directory_that_was_switched_between_two_starts_is_another_model(model, opened, tmp_path):
    other = make_model(tmp_path / "other", "llama", seed=1)
    link = tmp_path / "link"
    link.symlink_to(model)
    prefill = opened(link, "prefill")
    same = opened(link, "decode")
    assert fetched(prefill, same) == WHOLE
    link.unlink()
    link.symlink_to(other)
    assert fetched(prefill, opened(link, "decode")) == 0


REFUSED = cells(
    "transfer",
    "refused",
    {
        "computes-in-other-dtype": ({"dtype": "float32"}, 0),
        "cache-dtype": ({"cache": {"dtype": "fp8"}}, 0),
        "other-window": ({"cache": {"max_attention_window": (32,)}}, 0),
    },
)
EQUAL = cells(
    "transfer", "equal", {"other-block-size": ({"cache": {"tokens_per_block": 32}}, WHOLE)}
)


@pytest.mark.planted("overridden-configuration", "transfer", "refused")
@pytest.mark.parametrize(("more", "tokens"), [*REFUSED, *EQUAL])
def test_settings_that_shape_kv_are_as_another_model(more, tokens, model, opened):
    prefill, alone = opened(model, "prefill"), opened(model, None)
    cache = KvCacheConfig(**({"tokens_per_block": 16, "max_tokens": 1024} | more.get("cache", {})))
    connector = KvCacheConnectorConfig(transfer={"role": "decode"})
    dtype = more.get("dtype", "float64")
    with LLM(model, kv_cache=cache, connector=connector, dtype=dtype) as decode:
        assert fetched(prefill, decode) == tokens
        if tokens:
            (again,) = decode.generate([PROMPT], ANSWER)
            (own,) = alone.generate([PROMPT], ANSWER)
            assert again.output_token_ids == own.output_token_ids


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[tuple[LLM, LLM]]:
    waits = {"claim_timeout_s": 0.2}
    with (
        open_engine(model, "prefill", transfer=waits) as prefill,
        open_engine(model, "decode", transfer=waits) as decode,
    ):
        yield prefill, decode


LONG = "tenant " * 146  # 1,022 characters


OTHERS = cells(
    "transfer",
    "key",
    {
        "other-salt": ({"cache_salt": "a"}, {"cache_salt": "b"}),
        "other-salt: none": ({}, {"cache_salt": "a"}),
        "long-salt": ({"cache_salt": f"{LONG}ab"}, {"cache_salt": f"{LONG}ac"}),
        "other-adapter": ({"lora_id": "a"}, {"lora_id": "b"}),
        "no-adapter": ({"lora_id": "a"}, {}),
    },
)


@pytest.mark.parametrize(("theirs", "ours"), OTHERS)
def test_salts_and_adapters_are_in_the_name_of_a_prompt(theirs, ours, pair):
    seed = len(repr((theirs, ours)))
    assert fetched(*pair, prompt_of(60, seed), theirs=theirs, ours=ours) == 0
    assert fetched(*pair, prompt_of(60, -seed % 1000), theirs=ours, ours=ours) == WHOLE
