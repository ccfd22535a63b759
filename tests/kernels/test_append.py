"""`reshape_and_cache` puts each token at its slot, and nothing elsewhere."""

from __future__ import annotations

import pytest
import torch
from caches import Shape, shapes
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.kernels.update import reshape_and_cache


def states_of(cache, count):
    """New keys and values, perhaps as a slice of something larger."""
    shape = cache.shape
    found = []
    for seed, dim in enumerate((shape.key_dim, shape.value_dim)):
        generator = torch.Generator().manual_seed(seed)
        nbytes = dim * shape.dtype.itemsize
        data = torch.randint(
            0, 256, (shape.heads, count, nbytes), dtype=torch.uint8, generator=generator
        )
        found.append(data.view(shape.dtype).transpose(0, 1) if dim else None)
    return found


@settings(max_examples=120, deadline=None)
@given(st.data(), shapes())
def test_each_token_at_its_slot(data, shape):
    cache = shape.make(3)
    numbers = st.integers(0, shape.blocks * shape.tokens - 1)
    slots = data.draw(st.lists(numbers, unique=True, max_size=8))
    slots = data.draw(st.permutations(slots + [-1] * data.draw(st.integers(0, 2))))
    layer = data.draw(st.integers(0, shape.layers - 1))
    key, value = states_of(cache, len(slots))
    expected = cache.clone()
    for index, slot in enumerate(slots):
        if slot < 0:
            continue
        block, token = divmod(slot, shape.tokens)
        for plane, states in zip(expected.of(range(layer, layer + 1)), (key, value), strict=False):
            new = states.view(torch.uint8)[index]
            if shape.layout == "NHD":
                plane[block, token] = new
            else:
                plane[block, :, token] = new
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    reshape_and_cache(key, value, cache.kv, torch.tensor(slots, dtype=dtype), layer=layer)
    assert torch.equal(cache.memory, expected.memory)


SHAPE = Shape("pool", "NHD", torch.float32, 2, 3, 4, 2, 8, 8)
BARE = Shape("latent", "NHD", torch.float32, 2, 3, 4, 1, 8, 0)
KEY = torch.rand(3, 2, 8)
SLOTS = torch.tensor([1, 5, 9])
WRONG = {
    "slot beyond": (SHAPE, (KEY, KEY, torch.tensor([0, 1, 12]), 0), IndexError, "slot 12"),
    "slot below": (SHAPE, (KEY, KEY, torch.tensor([0, 1, -2]), 0), IndexError, "slot -2"),
    "slot twice": (SHAPE, (KEY, KEY, torch.tensor([1, 2, 1]), 0), ValueError, "twice"),
    "slot dtype": (SHAPE, (KEY, KEY, SLOTS.float(), 0), TypeError, "slot_mapping"),
    "slots": (SHAPE, (KEY, KEY, SLOTS[:2], 0), ValueError, "key"),
    "slot axes": (SHAPE, (KEY, KEY, SLOTS[None], 0), ValueError, "slot_mapping"),
    "layer": (SHAPE, (KEY, KEY, SLOTS, 2), IndexError, "layer"),
    "layer below": (SHAPE, (KEY, KEY, SLOTS, -1), IndexError, "layer"),
    "key dtype": (SHAPE, (KEY.double(), KEY, SLOTS, 0), TypeError, "key"),
    "value dtype": (SHAPE, (KEY, KEY.half(), SLOTS, 0), TypeError, "value"),
    "key heads": (SHAPE, (KEY[:, :1], KEY, SLOTS, 0), ValueError, "key"),
    "value dim": (SHAPE, (KEY, KEY[..., :4], SLOTS, 0), ValueError, "value"),
    "no value": (SHAPE, (KEY, None, SLOTS, 0), ValueError, "value"),
    "a value": (BARE, (KEY[:, :1], KEY[:, :1], SLOTS, 0), ValueError, "value"),
}


@pytest.mark.parametrize(("shape", "arguments", "error", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_and_nothing_written(shape, arguments, error, words):
    cache = shape.make(1)
    before = cache.memory.clone()
    key, value, slots, layer = arguments
    with pytest.raises(error, match=words):
        reshape_and_cache(key, value, cache.kv, slots, layer=layer)
    assert torch.equal(cache.memory, before)
