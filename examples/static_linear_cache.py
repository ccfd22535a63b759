"""A transformers model on a static linear cache, written to by `kv_cache_update`.

Usage: ``python examples/static_linear_cache.py [MODEL_DIR] [--compile]``

Prompts of different lengths are computed together, in tensors ``[batch, heads, max_length, dim]``;
then each sequence grows by one token per step. `model.generate()` must give the same tokens.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from kvconnect.engine.checkpoint.random_model import make_model
from kvconnect.kernels.update import kv_cache_update

PROMPTS = ([5, 17, 200, 31, 8, 99, 4], [42], [7, 7, 12, 150, 66, 3, 91, 30, 11, 12, 13])


class LinearLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The keys and values of one layer. `lengths` holds the tokens that each sequence has."""

    def __init__(self, max_length: int, lengths: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.max_length, self.lengths = max_length, lengths

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the memory, once."""
        batch, heads, _, dim = key_states.shape
        self.keys = key_states.new_zeros(batch, heads, self.max_length, dim)
        self.values = self.keys.new_zeros(batch, heads, self.max_length, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends to each sequence. Attention reads the whole cache under a mask."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys = kv_cache_update(cast("Tensor", self.keys), key_states, self.lengths)
        values = kv_cache_update(cast("Tensor", self.values), value_states, self.lengths)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the size and the offset of a mask over the whole cache."""
        return self.max_length, 0

    def get_seq_length(self) -> int:
        """Returns the length of the longest sequence."""
        return int(self.lengths.max())

    def get_max_length(self) -> int:
        """Returns the length that was allocated."""
        return self.max_length


@torch.inference_mode()
def generate(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_tokens: int, *, compiled: bool
) -> list[list[int]]:
    """Decodes several prompts at once, greedily; returns the new tokens of each."""
    longest = max(map(len, prompts))
    size = longest + num_tokens
    lengths = torch.zeros(len(prompts), dtype=torch.int64)
    layers: list[Any] = [LinearLayer(size, lengths) for _ in range(model.config.num_hidden_layers)]
    cache = Cache(layers=layers)

    def step(ids: Tensor) -> Tensor:
        positions = lengths[:, None] + torch.arange(ids.shape[1])
        # Each sequence sees its own past. Beyond that the cache holds padding, or no token yet.
        mask = torch.arange(size) <= positions[:, None, :, None]
        given = {"position_ids": positions, "attention_mask": mask, "past_key_values": cache}
        return cast("Tensor", model(ids, use_cache=True, **given).logits)

    ends = torch.tensor([len(prompt) for prompt in prompts])
    padded = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
    tokens = [step(padded)[torch.arange(len(prompts)), ends - 1].argmax(-1)]
    lengths += ends  # the padding is overwritten, token by token
    decode: Callable[[Tensor], Tensor] = torch.compile(step, fullgraph=True) if compiled else step
    for _ in range(num_tokens - 1):
        tokens.append(decode(tokens[-1][:, None])[:, -1].argmax(-1))
        lengths += 1
    return [list(map(int, column)) for column in zip(*tokens, strict=True)]


def main() -> None:
    """Generates both ways, and compares the tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="default: a small random Llama")
    parser.add_argument("--tokens", type=int, default=24, help="to generate")
    parser.add_argument("--compile", action="store_true", help="make one graph of a decode step")
    given = parser.parse_args()
    if given.model is None:
        print("The model is random: its answers make no sense.")
    with tempfile.TemporaryDirectory() as folder:
        path = given.model or make_model(Path(folder) / "model", "llama")
        # In double precision no sum depends on how it is cut into pieces, so tokens are equal.
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        found = generate(model, PROMPTS, given.tokens, compiled=given.compile)
        for prompt, tokens in zip(PROMPTS, found, strict=True):
            greedy = {"max_new_tokens": given.tokens, "do_sample": False, "eos_token_id": None}
            expected = model.generate(torch.tensor([prompt]), **greedy)[0, len(prompt) :].tolist()
            same = "as generate()" if tokens == expected else f"but generate() says {expected}"
            print(f"{len(prompt)} prompt tokens, then {tokens}: {same}")
            if tokens != expected:
                sys.exit(1)


if __name__ == "__main__":
    main()
