"""Runs the indexers of sparse attention, unmodified, on the sequences of a packed row.

An indexer makes a small key of each token, which transformers' caches keep beside the layer's keys
and values. It scores the keys of all tokens so far, and chooses the tokens that are attended to.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from kvconnect.engine.model.seam import Unmasked, running

INDEXED = frozenset(
    {"axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4", "qwen4_exp_text"}
)
"""The families whose indexers are served. Each was compared with `generate()`."""


def pack_indexers(model: PreTrainedModel) -> dict[str, Unmasked | None]:
    """Makes the indexers of `model` compute the sequences of a packed row: see `chosen_tokens`.

    Called without a step, they compute as before.

    Returns:
        The masks that the model is called with, by the type of its layers; empty: it has no
        indexers, and takes no masks.
    """
    kinds = set(getattr(model.config, "layer_types", None) or ())
    if "indexed_attention" not in kinds:
        return {}
    modules = dict(model.named_modules())
    rotary = next((one for name, one in modules.items() if name.endswith("rotary_emb")), None)
    for name, module in modules.items():
        if name.endswith(".indexer"):
            # Keys of several tokens are turned after the step, so their positions are needed.
            pools = hasattr(module, "compress_ratio")
            module.forward = _packed(module, rotary if pools else None)
    return {kind: Unmasked() if kind == "indexed_attention" else None for kind in kinds}


def _packed(indexer: Any, rotary: nn.Module | None) -> Callable[..., Any]:
    forward = indexer.forward
    signature = inspect.signature(forward)

    def packed(*args: Any, **named: Any) -> Any:
        step = running.get(None)
        if step is None:
            return forward(*args, **named)
        return step.choose(
            _Call(forward, signature.bind(*args, **named).arguments, indexer, rotary)
        )

    return packed


class _Call:
    """A call of an indexer; see `IndexCall`.

    Args:
        forward: its own `forward`.
        given: the arguments for the packed row, by name.
        indexer: the indexer.
        rotary: makes the embeddings of positions, if the indexer takes those of all tokens of a
            sequence; ``None``: it takes those of the given tokens.
    """

    def __init__(
        self,
        forward: Callable[..., Tensor],
        given: Mapping[str, Any],
        indexer: Any,
        rotary: nn.Module | None,
    ) -> None:
        self._forward = forward
        self._given = given
        self._rotary = rotary
        self.layer_idx: int = indexer.layer_idx
        heads = getattr(indexer, "n_heads", None) or indexer.index_n_heads
        self.num_heads = int(heads)
        self.num_tokens: int = given["hidden_states"].shape[1]
        self.batched = rotary is None  # or it takes the last position for that of the query

    def chosen(self, rows: Tensor, seen: Tensor, append: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the tokens that some tokens attend to; see `IndexCall.chosen`."""
        given = {name: _picked(value, rows) for name, value in self._given.items()}
        hidden: Tensor = given["hidden_states"]
        mask: Unmasked = self._given["attention_mask"]
        seen = seen.to(hidden.device)
        given["attention_mask"] = seen if mask.ndim == 3 else seen[:, None]
        given["past_key_values"] = _IndexCache(append)
        if self._rotary is not None:
            positions = torch.arange(seen.shape[2], device=hidden.device)
            given["position_embeddings"] = self._rotary(hidden, positions.expand(3, len(rows), -1))
        with _FirstOfEquals():
            found: Tensor = self._forward(**given).view(rows.numel(), -1)
        return _positions(found) if found.dtype == torch.bool else found


class _IndexCache:
    """The cache that an indexer is called with."""

    def __init__(self, append: Callable[[Tensor], Tensor]) -> None:
        self._append = append

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Stores the keys of the tokens, and returns those of the whole sequence."""
        return self._append(indexer_key_states)


class _FirstOfEquals(TorchFunctionMode):
    """Makes `topk` choose the first ones of equal values.

    The kernels choose any of them, in another way for each number of values, so that a choice
    would depend on how a prompt is divided into chunks.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in {torch.topk, Tensor.topk}:
            return _first_of_equals(*args, **kwargs or {})
        return func(*args, **kwargs or {})


def _first_of_equals(values: Tensor, k: int, dim: int = -1) -> Any:
    values = values.movedim(dim, -1)
    least = values.topk(k).values[..., -1:]
    above, level = values > least, values == least
    missing = k - above.sum(-1, keepdim=True)
    chosen = above | (level & (level.cumsum(-1) <= missing))
    indices = chosen.to(torch.uint8).topk(k).indices  # exactly k of them are 1
    found = values.gather(-1, indices)
    return torch.return_types.topk((found.movedim(-1, dim), indices.movedim(-1, dim)))


def _picked(value: Any, rows: Tensor) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_picked(one, rows) for one in value)
    return value[0, rows] if isinstance(value, Tensor) else value


def _positions(chosen: Tensor) -> Tensor:
    """Returns the places of the true elements of each row, filled up with -1."""
    most = int(chosen.sum(-1).max())
    values, places = chosen.to(torch.uint8).topk(most)
    return places.masked_fill(values == 0, -1)
