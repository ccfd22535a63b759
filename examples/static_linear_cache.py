"""A transformers model on a static linear cache, written to by `kv_cache_update`.

Usage: ``python examples/static_linear_cache.py [MODEL_DIR] [--compile]``

Keys and values of all sequences lie in tensors ``[batch, heads, max_length, dim]`` that are made
once. Prompts of different lengths are computed together; afterwards every sequence grows by one
token per step, each from its own place on: ``write_indices``. The output is compared with
`model.generate()`, which keeps a cache of its own. ``--compile`` makes one graph of a step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
        self.max_length = max_length
        self.lengths = lengths

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the memory, once."""
        batch, heads, _, key_dim = key_states.shape
        self.keys = key_states.new_zeros(batch, heads, self.max_length, key_dim)
        value_dim = value_states.shape[-1]
        self.values = value_states.new_zeros(batch, heads, self.max_length, value_dim)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends to each sequence. Attention reads the whole cache under a mask."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.keys, self.values
        if keys is None or values is None:
            raise RuntimeError("lazy_initialization was not called")
        return (
            kv_cache_update(keys, key_states, self.lengths),
            kv_cache_update(values, value_states, self.lengths),
        )

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
    lengths = torch.zeros(len(prompts), dtype=torch.int64)
    layers: list[Any] = [
        LinearLayer(longest + num_tokens, lengths) for _ in range(model.config.num_hidden_layers)
    ]
    cache = Cache(layers=layers)

    def step(ids: Tensor) -> Tensor:
        positions = lengths[:, None] + torch.arange(ids.shape[1])
        places = torch.arange(longest + num_tokens)
        # Each sequence sees its own past. Beyond that the cache holds padding, or no token yet.
        mask = places <= positions[:, None, :, None]
        out = model(
            ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
        )
        logits: Tensor = out.logits
        return logits

    padded = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
    logits = step(padded)
    ends = torch.tensor([len(prompt) for prompt in prompts])
    latest = logits[torch.arange(len(prompts)), ends - 1].argmax(-1)
    lengths += ends
    decode: Callable[[Tensor], Tensor] = torch.compile(step, fullgraph=True) if compiled else step
    tokens = [latest]
    for _ in range(num_tokens - 1):
        latest = decode(latest[:, None])[:, -1].argmax(-1)
        lengths += 1
        tokens.append(latest)
    return [list(map(int, column)) for column in zip(*tokens, strict=True)]


def reference(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Returns what transformers generates for one prompt by itself."""
    ids = torch.tensor([prompt])
    out: Tensor = model.generate(  # type: ignore[operator]
        ids,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    return [int(token) for token in out[0, len(prompt) :]]


def main() -> None:
    """Generates both ways, and compares the tokens."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?", help="default: a small random Llama")
    parser.add_argument("--tokens", type=int, default=24, help="to generate")
    parser.add_argument("--compile", action="store_true", help="make one graph of a decode step")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.model
        if path is None:
            print("The model is random: its answers make no sense.")
            path = make_model(Path(folder) / "model", "llama")
        # In double precision no sum depends on how it is cut into pieces, so tokens are equal.
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        model.requires_grad_(requires_grad=False)
        found = generate(model, PROMPTS, arguments.tokens, compiled=arguments.compile)
        for prompt, tokens in zip(PROMPTS, found, strict=True):
            expected = reference(model, prompt, arguments.tokens)
            same = "as generate()" if tokens == expected else f"but generate() says {expected}"
            print(f"{len(prompt)} prompt tokens, then {tokens}: {same}")
            if tokens != expected:
                sys.exit(1)


if __name__ == "__main__":
    main()
