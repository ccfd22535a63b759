"""The digest of tensors in memory: name, shape, dtype and whole content of each."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, TypeAlias

import torch
import xxhash
from torch import Tensor, nn

from kvconnect.digest.progress import in_threads

NamedTensor: TypeAlias = tuple[str, Tensor]
"""A parameter or buffer by its full name."""

_LEAF = 16 << 20

# Ten times as fast as torch.equal; it lets other threads run.
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def module_tensors(module: nn.Module) -> list[NamedTensor]:
    """Returns all parameters and buffers of `module`, and tensors that are plain attributes.

    Buffers that are not saved with the model are among them. A tensor that several names share is
    returned under each of them.
    """
    found: list[NamedTensor] = []
    for path, one in module.named_modules():
        own = [*one.named_parameters(recurse=False), *one.named_buffers(recurse=False)]
        own += [(name, value) for name, value in vars(one).items() if isinstance(value, Tensor)]
        found += [(f"{path}.{name}".lstrip("."), tensor) for name, tensor in own]
    return found


def content_of_tensors(tensors: Iterable[NamedTensor]) -> bytes:
    """Returns a digest of 32 bytes of the names, shapes, dtypes and contents of `tensors`.

    It is BLAKE2b of all names and of leaves: XXH3-128 of 16 MiB each, hashed by several threads.
    XXH3 finds accidental changes. It does not find two models that were made to have the same
    digest. The digest depends neither on the device nor on strides.

    Blocks, and logs progress every 5 seconds. Content on a GPU is copied to the host, a leaf at a
    time.
    """
    named = sorted(tensors, key=lambda one: one[0])
    # Tied weights are read once.
    places = [memory_place(tensor) for _, tensor in named]
    distinct = dict(zip(places, (tensor for _, tensor in named), strict=True))
    leaves = dict(zip(distinct, _leaves(list(distinct.values())), strict=True))
    state = hashlib.blake2b(digest_size=32, person=b"kvc-tensors")
    for (name, tensor), place in zip(named, places, strict=True):
        for part in (name, str(tensor.dtype), str(list(tensor.shape))):
            encoded = part.encode("utf-8", "surrogatepass")
            state.update(len(encoded).to_bytes(8, "little") + encoded)
        state.update(len(leaves[place]).to_bytes(8, "little"))
        for leaf in leaves[place]:
            state.update(leaf)
    return state.digest()


def pieces(tensor: Tensor, nbytes: int = _LEAF) -> Iterator[Tensor]:
    """Yields `tensor` in flat contiguous parts of at most `nbytes`, in row-major order.

    Parts of a contiguous tensor are views. Others are copied, a part at a time.
    """
    count = max(1, nbytes // tensor.element_size())
    if tensor.is_contiguous() or tensor.ndim == 0:
        yield from torch.split(tensor.detach().reshape(-1), count)
        return
    row = tensor[0].numel()
    if row <= count:
        rows = max(1, count // max(1, row))
        for part in torch.split(tensor.detach(), rows):
            yield part.reshape(-1)
        return
    for one in tensor.detach():
        yield from pieces(one, nbytes)


def as_bytes(piece: Tensor) -> memoryview:
    """Returns the bytes of a flat contiguous `piece`: a view in host memory, else a copy."""
    flat: Any = piece.view(torch.uint8).cpu().numpy()
    return memoryview(flat)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Returns whether two flat contiguous tensors have the same bytes.

    So a NaN equals itself, and zeros of different sign differ. On a GPU the call blocks until the
    tensors are compared.
    """
    if one.nbytes != other.nbytes or one.device != other.device:
        return False
    if one.device.type != "cpu":
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return bool(_memcmp(one.data_ptr(), other.data_ptr(), one.nbytes) == 0)


def _leaves(tensors: Sequence[Tensor]) -> list[list[bytes]]:
    """Returns the digests of each tensor's leaves."""
    parts = [_cut(tensor) for tensor in tensors]
    hashed = in_threads(_digests, list(chain(*parts)), lambda part: part.nbytes)
    return [list(chain(*islice(hashed, len(own)))) for own in parts]


def _cut(tensor: Tensor) -> list[Tensor]:
    """Returns the leaves of a contiguous tensor. Any other one is split by its hashing thread."""
    return list(pieces(tensor)) if tensor.is_contiguous() else [tensor.detach()]


def _digests(part: Tensor) -> list[bytes]:
    whole = part.contiguous()
    return [xxhash.xxh3_128(as_bytes(one)).digest() for one in pieces(whole) if one.numel()]


def memory_place(tensor: Tensor) -> tuple[object, ...]:
    """Returns a value that is equal only for tensors that view the same memory in the same way."""
    where = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    return (*where, tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())
