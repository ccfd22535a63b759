"""The latents of DeepSeek's attention: cached in place of the keys and values of all heads.

transformers' modules make keys and values by `expand_kv`, from ``kv_nope`` ``[1, 1, tokens, rank]``
and ``k_rot`` ``[1, 1, tokens, rope]``, which all heads share. The cache keeps those two.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kvconnect.engine.model.projections import close

KeysAndValues: TypeAlias = tuple[Tensor, Tensor]
"""Keys and values, ``[kv_heads, tokens, dim]`` each."""

_EXPANDED = 1 << 24
"""Elements of keys that are expanded at once."""

_DIMS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


class Latents:
    """Replaces `expand_kv` of an attention module, and computes attention from latents.

    A head's key is a product of the latent with a part of `kv_b_proj`, so the product may as well
    be made with the query (absorbed), once for each query instead of once for each key. The same
    holds for values and the result.

    Args:
        module: with `expand_kv`, `kv_b_proj` and the dimensions `_DIMS`.

    Attributes:
        dim: elements of a token's latent: rank, then rope.
        value_dim: elements of a head's result.
        part_tokens: how many tokens are expanded at once.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._expand = module.expand_kv
        self._rank: int = module.kv_lora_rank
        self._nope: int = module.qk_nope_head_dim
        self._rope: int = module.qk_rope_head_dim
        self.dim = self._rank + self._rope
        self.value_dim: int = module.v_head_dim
        heads = len(self._weights())
        self.part_tokens = max(1, _EXPANDED // (heads * (self._nope + self._rope)))

    def __call__(self, kv_nope: Tensor, k_rot: Tensor) -> KeysAndValues:
        """Returns the latents as keys of one head, and values without elements."""
        return torch.cat((kv_nope, k_rot), -1), kv_nope[..., :0]

    def pays_to_expand(self, count: int, end: int) -> bool:
        """Returns whether fewer products are made with keys and values of all heads.

        Args:
            count: consecutive queries of one sequence.
            end: the position after the last one; keys are those before it.
        """
        keys = self._nope + self._rope
        if self.value_dim > keys:
            return False
        saved = 2 * (self.dim - keys)
        expanding = (end - count) * self._rank * (self._nope + self.value_dim)
        pays: bool = count * (end - count / 2) * saved > expanding
        return pays

    def expanded(self, latents: Tensor) -> KeysAndValues:
        """Returns keys and values of all heads, ``[heads, tokens, dim]``.

        Values shorter than keys are padded with zeros: fused kernels take one dimension.

        Args:
            latents: ``[1, tokens, dim]``.
        """
        parts = latents[None].split_with_sizes((self._rank, self._rope), -1)
        keys, values = self._expand(*parts)
        return keys[0], pad(values[0], (0, keys.shape[-1] - values.shape[-1]))

    def absorbed(self, q: Tensor) -> Tensor:
        """Returns queries for latents, ``[heads, tokens, dim]``, of those for keys."""
        nope, rope = q.split_with_sizes((self._nope, self._rope), -1)
        return torch.cat((nope @ self._weights()[:, : self._nope], rope), -1)

    def values_of(self, attended: Tensor) -> Tensor:
        """Returns weighted values, ``[tokens, heads, value_dim]``, of weighted latents."""
        weights = self._weights()[:, self._nope :].transpose(1, 2)
        return (attended[..., : self._rank].transpose(0, 1) @ weights).transpose(0, 1)

    def agrees(self) -> bool:
        """Returns whether absorbed products are those with the module's own keys and values."""
        weights = self._weights()
        if weights.is_meta:
            return True  # there are shapes only
        generator = torch.Generator().manual_seed(0)
        q, latents = (
            torch.randn(1, 3, size, generator=generator).to(weights)
            for size in (self._nope + self._rope, self.dim)
        )
        q, whole = q.expand(len(weights), -1, -1), latents.expand(len(weights), -1, -1)
        with torch.inference_mode():
            keys, values = self.expanded(latents)
            scores = self.absorbed(q) @ latents.transpose(1, 2)
            results = self.values_of(whole.transpose(0, 1)).transpose(0, 1)
            return close(scores, q @ keys.transpose(1, 2)) and close(
                results, values[..., : self.value_dim]
            )

    def _weights(self) -> Tensor:
        # [heads, nope + value_dim, rank]; a view, made anew since weights move while a model loads.
        weight: Tensor = self._module.kv_b_proj.weight
        return weight.view(-1, self._nope + self.value_dim, self._rank)


def keep_latents(model: nn.Module) -> int:
    """Makes the attention of `model` give its latents to the cache where it has any.

    Modules that make keys and values in another way keep all heads.

    Returns:
        How many layers have latents.
    """
    found: list[Any] = [module for module in model.modules() if _has_latents(module)]
    for module in found:
        module.expand_kv = Latents(module)
    return len(found)


def _has_latents(module: nn.Module) -> bool:
    return (
        callable(getattr(module, "expand_kv", None))
        and all(isinstance(getattr(module, name, None), int) for name in _DIMS)
        and type(getattr(module, "kv_b_proj", None)) is nn.Linear  # not quantised, no adapter
        and Latents(module).agrees()
    )
