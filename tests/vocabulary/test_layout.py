"""The shape of a block."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout, StateTensor

LAYOUT = KvCacheLayout(
    num_layers=4, num_kv_heads=2, key_dim=8, value_dim=8, tokens_per_block=16, dtype=torch.float32
)


def test_a_block_with_equal_dimensions_has_two_planes():
    assert LAYOUT.kv_factor == 2
    assert LAYOUT.plane_elements == 16 * 2 * 8
    assert LAYOUT.layer_nbytes == 2 * 16 * 2 * 8 * 4
    assert LAYOUT.block_nbytes == 4 * LAYOUT.layer_nbytes
    assert LAYOUT.token_nbytes * 16 == LAYOUT.block_nbytes
    assert LAYOUT.flat_shape(10) == (10, 4, 2, 256)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(192, 128), (576, 0)])
def test_a_block_with_unequal_dimensions_has_one_plane(key_dim, value_dim):
    layout = dataclasses.replace(LAYOUT, key_dim=key_dim, value_dim=value_dim)
    assert layout.kv_factor == 1
    assert layout.plane_elements == 16 * 2 * (key_dim + value_dim)
    assert layout.block_nbytes == 4 * 16 * 2 * (key_dim + value_dim) * 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_bytes_follow_the_dtype(dtype):
    layout = dataclasses.replace(LAYOUT, dtype=dtype)
    assert layout.block_nbytes == torch.empty(layout.flat_shape(1), dtype=dtype).nbytes


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 5},
        {"num_kv_heads": 1},
        {"key_dim": 4},
        {"value_dim": 4},
        {"tokens_per_block": 32},
        {"dtype": torch.int32},  # as many bytes
        {"window": 64},
    ],
)
def test_the_fingerprint_changes_with_every_field(change):
    assert dataclasses.replace(LAYOUT, **change).fingerprint() != LAYOUT.fingerprint()


def test_the_fingerprint_stays_the_same():
    # What is in stores, on disk and in other processes has it.
    assert LAYOUT.fingerprint().hex() == "4361267fc27523edeaa640be7b609411"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("num_kv_heads", -1),
        ("key_dim", 0),
        ("value_dim", -1),
        ("tokens_per_block", 1),
        ("window", 0),
    ],
)
def test_an_impossible_field_is_refused_by_name(field, value):
    with pytest.raises(ConfigurationError, match=f"^{field}: {value} "):
        dataclasses.replace(LAYOUT, **{field: value})


STATE = StateTensor(3, "conv", (3, 5), torch.float32)
STATES = KvCacheLayout.of_states([STATE, dataclasses.replace(STATE, layer=4)], 16)


def test_a_block_of_states_has_the_tensors_of_all_its_layers():
    assert STATES.kind == "state"
    assert STATES.layer_numbers == (3, 4)
    assert STATES.window == 16, "a window of one block"
    assert STATES.layer_nbytes == 64, "60 bytes, to a multiple of 16"
    assert STATES.flat_shape(7) == (7, 2, 1, 64)
    assert not STATES.is_latent
    assert [LAYOUT.kind, dataclasses.replace(LAYOUT, num_kv_heads=1, value_dim=0).kind] == [
        "kv",
        "latent",
    ]


@pytest.mark.parametrize(
    "change",
    [{"name": "recurrent"}, {"shape": (5, 3)}, {"dtype": torch.int32}, {"layer": 2}],
)
def test_the_fingerprint_of_states_changes_with_every_field(change):
    changed = [dataclasses.replace(STATE, **change), dataclasses.replace(STATE, layer=4)]
    assert KvCacheLayout.of_states(changed, 16).fingerprint() != STATES.fingerprint()


@pytest.mark.parametrize(
    "states", [[], [STATE, STATE], [STATE, dataclasses.replace(STATE, layer=1)]]
)
def test_states_out_of_order_are_refused(states):
    with pytest.raises(ConfigurationError):
        KvCacheLayout.of_states(states, 16)


def test_large_blocks_of_states_are_divided_by_layers():
    assert LAYOUT.divided(1) == (LAYOUT,)
    assert STATES.divided() == STATES.divided(128) == (STATES,)
    first, second = STATES.divided(127)
    assert (first.layers, second.layers) == ((3,), (4,))
    assert (first.states, second.states) == (STATES.states[:1], STATES.states[1:])
    assert first.layer_nbytes == STATES.layer_nbytes
    assert first.fingerprint() != second.fingerprint()
