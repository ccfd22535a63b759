"""Of models with ``longrope`` KV depends on more than tokens: that is in keys, or it is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvconnect.integrations.core.configuration import config_of_directory, original_length
from kvconnect.integrations.trtllm.settings import variant_of

ROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
ORIGINAL = {"original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "original"),
    [
        ({}, None),
        ({"rope_scaling": None, **ORIGINAL}, None),
        ({"rope_scaling": {"rope_type": "llama3", **ORIGINAL}}, None),
        ({"rope_scaling": {**ROPE, **ORIGINAL}}, 4096),
        ({"rope_scaling": {"type": "su"}, **ORIGINAL}, 4096),
        ({"rope_parameters": ROPE, **ORIGINAL}, 4096),
        ({"rope_parameters": {"full_attention": {**ROPE, **ORIGINAL}}}, 4096),
        ({"text_config": {"rope_scaling": ROPE, **ORIGINAL}}, 4096),
        ({"llm_config": {"rope_scaling": ROPE, **ORIGINAL}}, 4096),
        ({"thinker_config": {"text_config": {"rope_scaling": ROPE}}, **ORIGINAL}, 4096),
        ({"rope_scaling": ROPE}, 0),
        ({"rope_scaling": {**ROPE, "original_max_position_embeddings": "4096"}}, 0),
    ],
)
def test_the_original_length_is_found_where_configurations_have_it(config, original):
    assert original_length(config) == original


def test_a_directory_without_a_configuration_has_an_empty_one(tmp_path):
    assert config_of_directory(tmp_path) == {}
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        assert config_of_directory(tmp_path) == {}


def test_tensorrt_llm_turns_by_the_factors_that_its_longest_sequence_asks_for(with_rope, tiny):
    def variant(directory: Path, longest: int | None) -> object:
        return variant_of(SimpleNamespace(max_seq_len=longest), directory)

    assert variant(tiny, 4096) == variant(tiny, 8192) == {}
    apart = [variant(with_rope, longest) for longest in (None, 4096, 8192)]
    assert all(one not in apart[:number] for number, one in enumerate(apart))
