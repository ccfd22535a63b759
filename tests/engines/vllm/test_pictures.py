"""Pictures in a real engine: found by what they are, never by what a client calls them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

import vllm
from picture_model import make_picture_model, picture
from vllm_engine import Engine, connector, engine

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

LOADED = 96  # of 8 tokens of a picture and 100 of text
HASH = "ab" * 32
NO_HASHES = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def start_with_pictures(tmp_path_factory: pytest.TempPathFactory):
    model = make_picture_model(tmp_path_factory.mktemp("pictures"))
    return partial(engine, model, skip_tokenizer_init=False, limit_mm_per_prompt={"image": 1})


def ask(made: Engine, number: int, uuid: str | None = None, **more: Any) -> tuple[list[int], int]:
    """The answer to a prompt with this picture, and how many of its tokens were found."""
    made.forget_device()
    prompt = {
        "prompt_token_ids": [5] * 40 + [7] * 60,
        "multi_modal_data": {"image": [picture(number)]},
        **({} if uuid is None else {"multi_modal_uuids": {"image": [uuid]}}),
        **more,
    }
    sampling = vllm.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
    [output] = made.llm.generate([prompt], sampling, use_tqdm=False)
    made.flush()
    return list(output.outputs[0].token_ids), output.num_cached_tokens or 0


@pytest.mark.planted("other-picture", "vllm", "key")
@pytest.mark.planted("picture-uuid", "vllm", "refused")
@pytest.mark.planted("picture-uuid-like-hash", "vllm", "refused")
@pytest.mark.planted("picture-settings", "vllm", "key")
def test_pictures_by_whatever_name(start_with_pictures, store):
    settings = {"mm_processor_kwargs": {"do_normalize": False}}
    with start_with_pictures(None, mm_processor_cache_gb=0) as plain:
        wanted = [ask(plain, number)[0] for number in (1, 2)]
        other = [ask(plain, number, **settings)[0] for number in (1, 2)]
    assert wanted[0] != wanted[1]
    # A client that gives one name to two pictures, with each of vLLM's caches on and off.
    for options in ({}, {"mm_processor_cache_gb": 0}, NO_HASHES):
        with start_with_pictures(connector(store), **options) as made:
            for uuid in (HASH, "cat"):
                for more in ({}, settings):
                    ask(made, 2, uuid, **more)
                    ask(made, 1, uuid, **more)
    with start_with_pictures(connector(store), **NO_HASHES) as made:
        for number in (1, 2):
            ask(made, number, **settings)  # one of them may be new to the store
            ask(made, number)
            for uuid in (None, f"{number}", f"{number}" * 64):
                assert ask(made, number, uuid) == (wanted[number - 1], LOADED)
                assert ask(made, number, uuid, **settings) == (other[number - 1], LOADED)
