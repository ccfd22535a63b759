"""The reference of every op in plain torch, for tests and for ``path="torch"``.

The code is written to be obviously right, on any device and between devices. It checks nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gather(planes: Sequence[Tensor], block_ids: Sequence[int], out: Tensor) -> None:
    """Copies block ``block_ids[i]`` to row i of `out`; -1 is skipped.

    Args:
        planes: ``[num_blocks, T, heads, dim]`` or ``[num_blocks, heads, T, dim]`` each.
        block_ids: one id for each row of `out`.
        out: uint8 ``[rows, bytes of a block]``; changed.
    """
    for row, block_id in enumerate(block_ids):
        if block_id >= 0:
            parts = [_flat(plane[block_id]) for plane in planes]
            out[row] = torch.cat(parts).to(out.device)


def scatter(src: Tensor, planes: Sequence[Tensor], block_ids: Sequence[int]) -> None:
    """Copies row i of `src` to block ``block_ids[i]`` of `planes`; -1 is skipped."""
    for row, block_id in enumerate(block_ids):
        if block_id >= 0:
            parts = torch.split(src[row], [_flat(plane[0]).numel() for plane in planes])
            for plane, part in zip(planes, parts, strict=True):
                block = _bytes(plane[block_id])
                block.copy_(part.view(block.shape))


def copy(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    pairs: Sequence[tuple[int, int]],
    num_tokens: Sequence[int] | None = None,
    *,
    token_axis: int = 0,
) -> None:
    """Copies the first ``num_tokens[i]`` tokens of block ``pairs[i][0]`` to block ``pairs[i][1]``.

    Pairs with a -1 are skipped. `token_axis` is the axis of tokens within a block: 0 for NHD.
    """
    for source, target in zip(sources, targets, strict=True):
        old, new = _bytes(source), _bytes(target)
        for index, (from_id, to_id) in enumerate(pairs):
            if from_id >= 0 and to_id >= 0:
                count = old.shape[1 + token_axis] if num_tokens is None else num_tokens[index]
                to_tokens = new[to_id].narrow(token_axis, 0, count)
                to_tokens.copy_(old[from_id].narrow(token_axis, 0, count))


def append(states: Tensor, plane: Tensor, slots: Sequence[int] | Tensor) -> None:
    """Writes token i, ``states[i]`` (``[heads, dim]``), to slot ``slots[i]``; -1 is skipped.

    `plane` is ``[num_blocks, T, heads, dim]``; slot s is token ``s % T`` of block ``s // T``.
    """
    numbers = torch.as_tensor(slots, device=plane.device).long()
    used = numbers >= 0
    blocks, tokens = numbers[used] // plane.shape[1], numbers[used] % plane.shape[1]
    _bytes(plane)[blocks, tokens] = _bytes(states)[used]


def update_padded(cache: Tensor, update: Tensor, write_indices: Sequence[int]) -> None:
    """Sets ``cache[i, :, write_indices[i] + s] = update[i, :, s]`` for each token s."""
    length = update.shape[2]
    for index, start in enumerate(write_indices):
        _bytes(cache)[index, :, start : start + length] = _bytes(update)[index]


def update_packed(
    cache: Tensor, update: Tensor, write_indices: Sequence[int], update_lengths: Sequence[int]
) -> None:
    """Writes packed sequences, `update` ``[tokens, heads, dim]``, to `cache`.

    Sequence i is the tokens ``update_lengths[i]`` to ``update_lengths[i + 1]``, and begins in the
    cache at ``write_indices[i]``.
    """
    for index, start in enumerate(write_indices):
        first, stop = update_lengths[index : index + 2]
        part = _bytes(update)[first:stop].transpose(0, 1)
        _bytes(cache)[index, :, start : start + stop - first] = part


def _bytes(tensor: Tensor) -> Tensor:
    """Returns `tensor` viewed as uint8, since few operations exist for every dtype."""
    return tensor.view(torch.uint8)


def _flat(block: Tensor) -> Tensor:
    return _bytes(block).reshape(-1)
