"""The attention of queries to keys that lie in memory: fused kernels, softcaps and sinks.

Grouped queries are handled by views: the heads that share a KV head become a dimension of their
own, nothing is repeated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvconnect.engine.model.latents import KeysAndValues, Latents

_MOST_SCORES = 1 << 23
"""Elements of scores that are held at once where no fused kernel computes them."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001  no other name
"""The kernel of `scaled_dot_product_attention` on the CPU; it also returns sums of exponentials."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInput:
    """The inputs of one layer's attention, of all tokens of the packed row.

    Attributes:
        query: ``[1, heads, tokens, dim]``; fewer tokens where not all are attended from.
        key: ``[1, kv_heads, tokens, dim]``.
        value: ``[1, kv_heads, tokens, value_dim]``.
        scaling: the factor of the scores; ``None``: one over the square root of `dim`.
        window: the number of tokens that each token sees, itself included; ``None``: all.
        softcap: bound of the scores, which approach it by a tangent; ``None``: unbounded.
        sinks: ``[heads]``, a score of each head that takes part in the softmax without a value.
        latents: the latents' module of a layer whose `key` holds latents and whose `value` is
            empty.
        chosen: ``[tokens, most]``, the positions that each token attends to, as far as they are
            not behind it; -1: none. ``None``: each token attends to all up to itself.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float | None
    window: int | None
    softcap: float | None = None
    sinks: Tensor | None = None
    latents: Latents | None = None
    chosen: Tensor | None = None

    @property
    def value_dim(self) -> int:
        """The elements of a head's result."""
        return self.value.shape[-1] if self.latents is None else self.latents.value_dim


def attended(q: Tensor, keys: KeysAndValues, mask: Tensor | None, given: AttentionInput) -> Tensor:
    """Attends from the tokens of a chunk to keys.

    Args:
        q: ``[heads, tokens, dim]``.
        keys: the keys and values.
        mask: ``[tokens, keys]``, added to the scores; ``None``: the keys are those of the tokens,
            and each token sees those up to itself.
        given: the scaling, softcap and sinks of the scores.

    Returns:
        ``[tokens, heads, value_dim]``.
    """
    k, v = keys
    q = _grouped(q, k.shape[0])
    k, v = _shared(k, q), _shared(v, q)
    out = _weighed(q, k, v, mask, given, sinks=_sinks(q, given), causal=mask is None)
    return out.flatten(0, 1).transpose(0, 1)


def attended_in_parts(
    q: Tensor, own: KeysAndValues, before: Iterable[KeysAndValues], given: AttentionInput
) -> Tensor | None:
    """Attends from the tokens of a chunk to its keys up to each token, and to all keys before it.

    No part needs a mask, which would cost a third of the products' time. The results are weighted
    by the sums of their exponentials, whose logarithms the kernel returns.

    Args:
        q: ``[heads, tokens, dim]``.
        own: keys and values of these tokens.
        before: the result of the tokens before them, in parts.
        given: the scaling, softcap and sinks of the scores.

    Returns:
        ``[tokens, heads, value_dim]``; ``None`` if no kernel computes it: see `attended`.
    """
    if given.softcap is not None or not _suits_flash(q, *own):
        return None
    q = _grouped(q, own[0].shape[0])
    out: Tensor
    out, sums = _flash(q, *(_shared(one, q) for one in own), is_causal=True, scale=given.scaling)
    for part in before:
        far, far_sums = _flash(q, *(_shared(one, q) for one in part), scale=given.scaling)
        weight = torch.sigmoid(far_sums - sums)[..., None]
        out = torch.lerp(out.to(weight.dtype), far.to(weight.dtype), weight)
        sums = torch.logaddexp(sums, far_sums)
    if (sinks := _sinks(q, given)) is not None:
        out = _with_sinks(out, sums, sinks)
    return out.flatten(0, 1).transpose(0, 1)


def single_attended(
    q: Tensor, keys: KeysAndValues, mask: Tensor | None, given: AttentionInput
) -> Tensor:
    """Attends from single tokens of several sequences.

    Args:
        q: ``[sequences, heads, dim]``.
        keys: ``[sequences, kv_heads, keys, dim]``, with values.
        mask: ``[sequences, 1, 1, keys]``, added to the scores; ``None``: all keys are seen.
        given: the scaling, softcap and sinks of the scores.

    Returns:
        ``[sequences, heads, value_dim]``.
    """
    # The heads that share a KV head stand where queries of several positions would: they see the
    # same keys.
    k, v = keys
    q = q.reshape(len(q), k.shape[1], -1, k.shape[3])
    sinks = None if given.sinks is None else given.sinks.view(k.shape[1], -1)
    return _weighed(q, k, v, mask, given, sinks=sinks).flatten(1, 2)


def causal_mask(
    start: int, end: int, seen: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns the mask of the tokens ``start..end`` over those from `seen` on."""
    queries = torch.arange(start, end, device=device)[:, None]
    keys = torch.arange(seen, end, device=device)[None]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return mask.masked_fill_(hidden, -torch.inf)


def _weighed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    given: AttentionInput,
    *,
    sinks: Tensor | None,
    causal: bool = False,
) -> Tensor:
    """Returns the values, weighted for each query; all are ``[., ., tokens, dim]``.

    `sinks` are broadcast over the first three dimensions of `q`.
    """
    if given.softcap is None and sinks is None:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=given.scaling
        )
    if given.softcap is None and sinks is not None and _suits_flash(q, k, v):
        out, sums = _flash(q, k, v, is_causal=causal, attn_mask=mask, scale=given.scaling)
        return _with_sinks(out, sums, sinks)
    rows = max(1, _MOST_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    parts = []
    for first in range(0, q.shape[2], rows):
        part = q[:, :, first : first + rows]
        stop = first + part.shape[2]
        if causal:
            seen = causal_mask(first, stop, 0, None, q.dtype, q.device)
            parts.append(_plain(part, k[:, :, :stop], v[:, :, :stop], seen, given, sinks))
        else:
            own = mask if mask is None or mask.shape[-2] == 1 else mask[..., first:stop, :]
            parts.append(_plain(part, k, v, own, given, sinks))
    return torch.cat(parts, 2)


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    given: AttentionInput,
    sinks: Tensor | None,
) -> Tensor:
    scaling = q.shape[-1] ** -0.5 if given.scaling is None else given.scaling
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-1, -2)).to(exact).mul_(scaling)
    if given.softcap is not None:
        scores.div_(given.softcap).tanh_().mul_(given.softcap)
    if mask is not None:
        scores.add_(mask)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        column = sinks.to(exact)[..., None].expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    return weights.to(v.dtype) @ v


def _with_sinks(out: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """Returns weighted values after the sinks took their part of the weights.

    Args:
        out: ``[., ., tokens, dim]``.
        sums: ``[., ., tokens]``, logarithms of the sums of exponentials.
        sinks: broadcast to `sums`.
    """
    return out * torch.sigmoid(sums - sinks)[..., None].to(out.dtype)


def _sinks(q: Tensor, given: AttentionInput) -> Tensor | None:
    # [kv_heads, heads of each, 1], as grouped queries are.
    return None if given.sinks is None else given.sinks.view(q.shape[0], -1, 1)


def _suits_flash(q: Tensor, k: Tensor, v: Tensor) -> bool:
    # The conditions that torch checks before it uses this kernel, and those that it does not.
    return all(
        one.device.type == "cpu" and one.stride(-1) == 1 and one.shape[-1] == q.shape[-1]
        for one in (q, k, v)
    )


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    # [kv_heads, heads of each, tokens, dim] of [heads, tokens, dim].
    return q.reshape(kv_heads, -1, *q.shape[1:])


def _shared(states: Tensor, q: Tensor) -> Tensor:
    # Keys or values, [kv_heads, tokens, dim], for each of the heads of grouped queries.
    return states[:, None].expand(-1, q.shape[1], -1, -1)
