"""Pictures, sounds and videos are what the model is given, not what the client calls them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_stand_in import PROMPT, Open, StandIn, T

from kvconnect.digest.doubts import Doubt
from kvconnect.integrations.vllm import pictures
from kvconnect.integrations.vllm.pictures import FeatureDigests
from kvconnect.integrations.vllm.requests import Roles
from kvconnect.trace import metrics

WHOLE = 5 * T
HASH = "ab" * 32


def feature(
    pixels: float = 1.0,
    identifier: str = HASH,
    *,
    modality: str = "image",
    is_embed: torch.Tensor | None = None,
    **data: object,
) -> SimpleNamespace:
    """A picture over the second and third block; `data` in place of its pixels."""
    values = data or {"pixel_values": torch.full((3, 4), pixels), "grid": [1, 2]}
    return SimpleNamespace(
        data={name: SimpleNamespace(data=value) for name, value in values.items()},
        modality=modality,
        identifier=identifier,
        mm_hash=identifier,
        mm_position=SimpleNamespace(offset=6, length=3, is_embed=is_embed),
    )


def ask(engine: StandIn, *features: SimpleNamespace, **more: object) -> int:
    """How many tokens of the prompt with `features` came from the store."""
    answer = engine.answer(PROMPT, mm_features=list(features), **more)
    engine.flush()
    return answer.cached


@pytest.mark.planted("other-picture", "vllm", "key")
def test_pictures_count_from_the_block_that_they_touch(open_engine: Open):
    engine = open_engine()
    assert ask(engine, feature(1.0, "a")) == 0
    assert ask(engine, feature(1.0, "a")) == WHOLE
    assert ask(engine, feature(2.0, "b")) == T
    assert ask(engine) == T


@pytest.mark.parametrize(
    "identifier",
    [
        pytest.param("cat.png", marks=pytest.mark.planted("picture-uuid", "vllm", "refused")),
        pytest.param(HASH, marks=pytest.mark.planted("picture-uuid-like-hash", "vllm", "refused")),
    ],
)
def test_an_identifier_that_is_given_to_another_picture_is_no_name(
    open_engine: Open, shared, identifier
):
    """VLLM gives the second picture what its encoder made of the first, so neither is cached."""
    engine = open_engine(url=shared)
    assert ask(engine, feature(1.0, identifier)) == 0
    before = metrics.snapshot().get("engine.request.uncached", 0)
    for pixels in (2.0, 1.0, 2.0):
        assert ask(engine, feature(pixels, identifier)) == 0
    assert metrics.snapshot()["engine.request.uncached"] == before + 3
    engine.check_empty()
    other = open_engine(url=shared)
    assert ask(other, feature(2.0, "its own")) == T  # nothing of the second one was saved
    assert ask(other, feature(1.0, "and of the first")) == WHOLE


@pytest.mark.planted("picture-uuid", "vllm", "hit")
def test_a_picture_is_found_whatever_it_is_called(open_engine: Open, shared):
    assert ask(open_engine(url=shared), feature(1.0, "renderer0-mm-1-image-0")) == 0
    engine = open_engine(url=shared)
    for identifier in ("renderer0-mm-1-image-0", "cat.png", HASH):
        assert ask(engine, feature(1.0, identifier)) == WHOLE


@pytest.mark.planted("picture-settings", "vllm", "key")
@pytest.mark.planted("sound-or-video", "vllm", "key")
def test_all_that_the_model_is_given_counts(open_engine: Open):
    kinds = [
        feature(),
        feature(modality="video"),
        feature(is_embed=torch.tensor([True, False, True])),
        feature(pixel_values=torch.full((3, 4), 1.0), grid=[2, 1]),
        feature(pixel_values=torch.full((4, 3), 1.0), grid=[1, 2]),
        feature(pixel_values=torch.zeros(3, 4, dtype=torch.float16)),
        feature(pixel_values=torch.zeros(3, 4, dtype=torch.bfloat16)),
        feature(input_features=np.ones((3, 4), np.float32), modality="audio"),
        feature(input_features=[torch.ones(3), torch.ones(1)], modality="audio"),
    ]
    engine = open_engine()
    for number, one in enumerate(kinds):
        one.identifier = str(number)
        assert ask(engine, one) == (T if number else 0)
    for one in kinds:
        assert ask(engine, one) == WHOLE


@pytest.mark.parametrize(
    "data",
    [
        {"address": 4096, "monotonic_id": 1, "signature": [1]},
        {"pixel_values": None},
        {"pixel_values": object()},
        {"pixel_values": np.array(["text"])},
    ],
    ids=["elsewhere", "none", "no array", "text"],
)
def test_what_is_not_here_or_of_no_known_kind_is_not_cached(open_engine: Open, data):
    engine = open_engine()
    for _ in range(2):
        assert ask(engine, feature(identifier="of data", **data)) == 0
        absent = feature(identifier="absent")
        absent.data = None
        assert ask(engine, absent) == 0
        assert ask(engine, feature(identifier="embeds", modality="prompt_embeds")) == 0
    engine.check_empty()


def test_outputs_of_encoders_that_come_from_elsewhere_have_no_name(open_engine: Open):
    engine = open_engine(Roles(features_are_own=False))
    for _ in range(2):
        assert ask(engine, feature()) == 0
    assert ask(engine) == 0
    assert ask(engine) == WHOLE


def test_behind_streaming_input_pictures_have_no_name(open_engine: Open):
    """VLLM adds pictures to such a request that no connector is told of."""
    engine = open_engine()
    assert ask(engine, feature()) == 0
    assert ask(engine, feature()) == WHOLE
    engine.answer(PROMPT, resumable=True)
    assert ask(engine, feature()) == 0


def test_what_other_requests_bring_is_noted_though_they_are_not_cached(open_engine: Open):
    engine = open_engine()
    assert ask(engine, feature(1.0), prompt_embeds="a tensor") == 0
    assert ask(engine, feature(2.0)) == 0
    assert ask(engine, feature(2.0)) == 0


def test_of_identifiers_a_bounded_number_is_known(monkeypatch):
    monkeypatch.setattr(pictures, "_MOST_KNOWN", 3)
    digests = FeatureDigests()
    for number in range(10):
        found = digests.start([feature(identifier=str(number))]).result()
        assert not isinstance(found, Doubt)
    assert len(digests._known) == 3
    assert digests.start([feature(2.0, "9")]).result() is Doubt.USER_IDENTIFIER
    digests.close()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)


@settings(max_examples=40)
@given(VALUES, VALUES)
def test_no_two_values_look_alike(one, other):
    digests = [pictures._digest(feature(value=[value])) for value in (one, other)]
    assert None not in digests
    assert (digests[0] == digests[1]) == (repr(_plain(one)) == repr(_plain(other)))


def _plain(value: object) -> object:
    """`value` with the members of mappings in order."""
    if isinstance(value, dict):
        return {name: _plain(value[name]) for name in sorted(value)}
    return [_plain(one) for one in value] if isinstance(value, list) else value
