"""Finds out that weights in memory have changed, at a cost that a step does not notice."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["WeightWatch"]

_LINE = 64  # bytes; a cache line
_ROUNDS = 16  # lines of each tensor in host memory, one of which is read at each call
_PAGE = 4096  # bytes
_PAGES = 8  # read at each call, of tensors on other devices


@dataclass(frozen=True, slots=True)
class _Watched:
    """A tensor as it was found: its object, its memory, and how often it was written to."""

    name: str
    tensor: weakref.ref[Tensor]
    pointer: int
    version: int

    def change(self) -> str | None:
        """Returns how the tensor differs from what was found, or ``None``."""
        tensor = self.tensor()
        if tensor is None:
            return f"{self.name} was replaced by another tensor"
        if _pointer(tensor) != self.pointer:
            return f"{self.name} got other memory"
        if _version(tensor) != self.version:
            return f"{self.name} was written to"
        return None


class _Members:
    """The parameters, buffers and modules that a module holds, as they were found."""

    __slots__ = ("_held", "_module", "_path")

    def __init__(self, path: str, module: nn.Module, *, buffers: bool) -> None:
        self._path = path
        self._module = weakref.ref(module)
        self._held = [
            (kind, [(name, _reference(one)) for name, one in getattr(module, kind).items()])
            for kind in ("_parameters", "_modules", *(["_buffers"] if buffers else []))
        ]

    def change(self) -> str | None:
        """Returns which member is another one now, or ``None``."""
        module = self._module()
        if module is None:
            return f"{self._path or 'the model'} was replaced by another module"
        for kind, members in self._held:
            now = getattr(module, kind)
            for name, member in members:
                if now.get(name) is not member():
                    return f"{self._path}.{name}".lstrip(".") + " was replaced"
            if len(now) != len(members):
                added = sorted(now.keys() - {name for name, _ in members})
                return f"{self._path}.{added[0]}".lstrip(".") + " was added"
        return None


class WeightWatch:
    """Finds that a tensor of a model was replaced or written to since the watch was made.

    Each call compares every tensor's object, address and version counter, which shows the changes
    that PyTorch counts. Writes that PyTorch does not count (``weight.data.copy_()``, as engines
    load weights) show in the bytes. Each call compares 64 bytes of every tensor in host memory, at
    one of 16 offsets in turn. Of tensors on other devices it compares a page of 4 KiB, of eight
    tensors in turn.

    Tensors are held weakly, so that replaced weights are freed. Not thread-safe.

    Args:
        tensors: names and tensors, each held by the caller's model. They are read once, so a tensor
            that is replaced is found when the old one is freed. `of` finds it in any case.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._members: list[_Members] = []
        self._watched = [
            _Watched(name, weakref.ref(inner), _pointer(inner), _version(inner))
            for name, one in tensors
            for inner in _inner_tensors(one)
        ]
        self._lines = _Lines(self._watched)
        self._pages = _Pages(self._watched)
        self._found: str | None = None

    @classmethod
    def of(cls, module: nn.Module, *, buffers: bool = True) -> WeightWatch:
        """Watches all parameters of `module`, and that it and its modules hold no others.

        Args:
            module: is held weakly.
            buffers: watch buffers, too, also those that are not saved.
        """
        made = cls([*module.named_parameters(), *(module.named_buffers() if buffers else ())])
        made._members = [
            _Members(path, one, buffers=buffers) for path, one in module.named_modules()
        ]
        return made

    def changed(self) -> str | None:
        """Returns the first change that is found, as "TENSOR was written to", or ``None``.

        Once a change was found, each call returns it. The memory must be mapped: an engine that
        unmaps its weights, as vLLM's sleep does, must not call this before it wakes up. Blocks
        until a few pages are copied from the device, beside the engine's own stream.
        """
        if self._found is None:
            self._found = self._change()
        return self._found

    def _change(self) -> str | None:
        records: tuple[_Members | _Watched, ...] = (*self._members, *self._watched)
        for one in records:
            how = one.change()
            if how is not None:
                return how
        name = self._lines.next_change() or self._pages.next_change()
        return None if name is None else f"{name} was written to past PyTorch's version counter"


class _Lines:
    """Bytes of every tensor in host memory, as they were found."""

    def __init__(self, watched: Iterable[_Watched]) -> None:
        self._names: list[str] = []
        self._rounds: list[list[tuple[int, int]]] = [[] for _ in range(_ROUNDS)]
        for one in watched:
            nbytes = _readable_nbytes(one.tensor(), "cpu")
            if nbytes:
                self._names.append(one.name)
                size = min(_LINE, nbytes)
                for number, spans in enumerate(self._rounds):
                    spans.append((one.pointer + (nbytes - size) * number // (_ROUNDS - 1), size))
        self._content = [self._read(number) for number in range(_ROUNDS)]
        self._next = 0

    def next_change(self) -> str | None:
        """Returns the name of a tensor whose bytes differ at the next offset, or ``None``."""
        number, self._next = self._next, (self._next + 1) % _ROUNDS
        now, then = self._read(number), self._content[number]
        if now == then:
            return None
        return next(name for name, a, b in zip(self._names, now, then, strict=True) if a != b)

    def _read(self, number: int) -> list[bytes]:
        # The addresses are valid: every tensor was just seen alive, with this very memory.
        return [ctypes.string_at(address, size) for address, size in self._rounds[number]]


class _Pages:
    """A page of every tensor on another device than the host, as it was found."""

    def __init__(self, watched: Iterable[_Watched]) -> None:
        self._watched = [one for one in watched if _readable_nbytes(one.tensor(), "other")]
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._content = [self._read([one])[0] for one in self._watched]
        self._next = 0

    def next_change(self) -> str | None:
        """Returns the name of one of the next tensors whose page differs, or ``None``."""
        if not self._watched or _is_capturing():
            return None
        start = self._next
        stop = min(start + _PAGES, len(self._watched))
        self._next = stop % len(self._watched)
        watched = self._watched[start:stop]
        for one, now, then in zip(
            watched, self._read(watched), self._content[start:stop], strict=True
        ):
            if now != then:
                return one.name
        return None

    def _read(self, watched: list[_Watched]) -> list[bytes]:
        tensors = [one.tensor() for one in watched]
        pages = [_page(tensor) for tensor in tensors if tensor is not None]
        copies = []
        for page in pages:
            if page.device.type == "cuda":
                # Beside the engine's own stream: this waits for these copies alone.
                stream = self._streams.get(page.device)
                if stream is None:
                    stream = self._streams[page.device] = torch.cuda.Stream(page.device)  # type: ignore[no-untyped-call]
                with torch.cuda.stream(stream):
                    copy = torch.empty(page.shape, dtype=page.dtype, pin_memory=True)
                    copies.append(copy.copy_(page, non_blocking=True))
            else:
                copies.append(page.cpu())
        for stream in {page.device: self._streams.get(page.device) for page in pages}.values():
            if stream is not None:
                stream.synchronize()
        return [copy.numpy().tobytes() for copy in copies]


def _reference(member: Tensor | nn.Module | None) -> Callable[[], object]:
    return _nothing if member is None else weakref.ref(member)


def _nothing() -> None:
    return None


def _inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """`tensor`, or those that a subclass is made of: quantised ones, shards."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from _inner_tensors(getattr(tensor, name))


def _pointer(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001  documented


def _readable_nbytes(tensor: Tensor | None, device: str) -> int:
    """How many bytes at the tensor's address are its own; 0 if it is elsewhere."""
    if tensor is None or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return 0
    if (tensor.device.type == "cpu") != (device == "cpu") or not tensor.is_contiguous():
        return 0
    return tensor.numel() * tensor.element_size()


def _page(tensor: Tensor) -> Tensor:
    """The bytes in the middle of a contiguous `tensor`."""
    nbytes = tensor.numel() * tensor.element_size()
    size = min(_PAGE, nbytes)
    begin = tensor.storage_offset() * tensor.element_size() + (nbytes - size) // 2
    found = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return found.set_(tensor.untyped_storage(), begin, (size,), (1,))


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
