"""Detects changes of weights in memory, cheaply enough for a call in every step."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

_LINE = 64  # bytes; a cache line
_ROUNDS = 16  # lines of each tensor in host memory, one of which is read at each call
_TURNS = 8  # an eighth of the modules is compared at each call
_PAGE = 4096  # bytes
_PAGES = 8  # read at each call, of tensors on other devices


@dataclass(frozen=True, slots=True)
class _Watched:
    """The recorded state of a tensor: its object, its address and its version counter."""

    name: str
    tensor: weakref.ref[Tensor]
    pointer: int
    version: int | None

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Self:
        return cls(name, weakref.ref(tensor), _pointer(tensor), _version(tensor))

    def change(self) -> str | None:
        """Returns how the tensor differs from the recorded state, as text; ``None`` if equal."""
        tensor = self.tensor()
        if tensor is None:
            return f"{self.name} was replaced"
        # The two cheapest of PyTorch's calls, as all tensors of a model are compared at every step.
        if self.pointer and tensor.data_ptr() != self.pointer:
            return f"{self.name} got other memory"
        if self.version is not None and tensor._version != self.version:  # noqa: SLF001  documented
            return f"{self.name} was written to"
        return None


class _Members:
    """The recorded parameters, buffers or modules of a module.

    They are compared by ``id()``. So the `_Watched` of each must have found its object alive.
    """

    __slots__ = ("_ids", "_kind", "_module", "_names", "_path")

    def __init__(self, path: str, module: nn.Module, kind: str) -> None:
        self._path = path
        self._module = weakref.ref(module)
        self._kind = kind
        members = getattr(module, kind)
        self._names = list(members)
        self._ids = list(map(id, members.values()))

    def change(self) -> str | None:
        """Returns which member was replaced or added, as text; ``None`` if none was."""
        module = self._module()
        if module is None:
            return f"{self._path or 'the model'} was replaced"
        members = getattr(module, self._kind)
        if list(map(id, members.values())) == self._ids:
            return None
        then = dict(zip(self._names, self._ids, strict=True))
        for name in (*members, *then):
            if name not in members or id(members[name]) != then.get(name):
                how = "was replaced" if name in then else "was added"
                return f"{self._path}.{name}".lstrip(".") + f" {how}"
        return f"{self._path or 'the model'} was rearranged"


class WeightWatch:
    """Detects that a tensor of a model was replaced or written to since the watch was made.

    Each call compares every tensor's object, address and version counter, which shows the changes
    that PyTorch counts. Writes that PyTorch does not count (``weight.data.copy_()``, as engines
    load weights) show in the bytes. Each call compares 64 bytes of every tensor in host memory, at
    one of 16 offsets in turn. Of tensors on other devices it compares a page of 4 KiB, of eight
    tensors in turn.

    Tensors are referenced weakly, so that replaced weights are freed. The replacement is detected
    when the old tensor is freed. If other code keeps the old tensor alive, only a watch made with
    `of` detects the replacement, within 8 calls. Not thread-safe.

    Args:
        tensors: names and tensors, each kept alive by the caller's model. Iterated once.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._members: list[_Members] = []
        self._watched = [
            _Watched.of(name, inner) for name, one in tensors for inner in _inner_tensors(one)
        ]
        self._lines = _Lines(self._watched)
        self._pages = _Pages(self._watched)
        self._found: str | None = None
        self._turn = 0

    @classmethod
    def of(cls, module: nn.Module, *, buffers: bool = True) -> WeightWatch:
        """Returns a watch of all parameters of `module`, which also detects members set later.

        Args:
            module: the module; referenced weakly.
            buffers: whether to watch buffers, too, also those that are not saved.
        """
        kinds = ("_modules", "_parameters", *(["_buffers"] if buffers else []))
        made = cls([*module.named_parameters(), *(module.named_buffers() if buffers else ())])
        made._members = [
            _Members(path, one, kind)
            for path, one in module.named_modules()
            for kind in kinds
            if getattr(one, kind)
        ]
        return made

    def changed(self) -> str | None:
        """Returns the first detected change, as "TENSOR was written to"; ``None`` if there is none.

        After a change was detected, each call returns it. The memory must be mapped: an engine that
        unmaps its weights, as vLLM's sleep does, must not call this before it wakes up. Blocks
        until up to 8 pages are copied from the device, on a stream of its own.
        """
        if self._found is None:
            self._found = self._change()
        return self._found

    def _change(self) -> str | None:
        turn, self._turn = self._turn, (self._turn + 1) % _TURNS
        records: tuple[_Watched | _Members, ...] = (*self._watched, *self._members[turn::_TURNS])
        for one in records:
            how = one.change()
            if how is not None:
                return how
        name = self._lines.next_change() or self._pages.next_change()
        return None if name is None else f"{name} was written to past PyTorch's version counter"


class _Lines:
    """The recorded bytes of every tensor in host memory: 64 at each of 16 offsets."""

    def __init__(self, watched: Iterable[_Watched]) -> None:
        self._names: list[str] = []
        # Views of addresses: they keep no memory alive, and are valid while their tensor lives.
        self._rounds: list[list[ctypes.Array[ctypes.c_char]]] = [[] for _ in range(_ROUNDS)]
        for one in watched:
            nbytes = _readable_nbytes(one.tensor(), on_host=True)
            if nbytes:
                self._names.append(one.name)
                line = ctypes.c_char * min(_LINE, nbytes)
                step = (nbytes - ctypes.sizeof(line)) / (_ROUNDS - 1)
                for number, lines in enumerate(self._rounds):
                    lines.append(line.from_address(one.pointer + int(step * number)))
        self._content = [b"".join(lines) for lines in self._rounds]
        self._next = 0

    def next_change(self) -> str | None:
        """Compares the bytes at the next offset; returns the name of a changed tensor or ``None``.

        Every tensor must be alive, at its recorded address.
        """
        number, self._next = self._next, (self._next + 1) % _ROUNDS
        lines, then = self._rounds[number], self._content[number]
        if b"".join(lines) == then:
            return None
        begin = 0
        for name, line in zip(self._names, lines, strict=True):
            if line.raw != then[begin : begin + len(line)]:
                return name
            begin += len(line)
        return "a weight"  # it is being written to at this moment


class _Pages:
    """The recorded bytes of one page of every tensor on another device than the host."""

    def __init__(self, watched: Iterable[_Watched]) -> None:
        self._watched = [one for one in watched if _readable_nbytes(one.tensor(), on_host=False)]
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._content = [self._read([one])[0] for one in self._watched]
        self._next = 0

    def next_change(self) -> str | None:
        """Compares the next 8 pages; returns the name of a changed tensor or ``None``.

        Does nothing while a CUDA graph is captured.
        """
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
                # Not on the engine's stream, so that only these copies are waited for.
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


def _inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yields `tensor`, or the tensors that a subclass (quantised, sharded) consists of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from _inner_tensors(getattr(tensor, name))


def _pointer(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001  documented


def _readable_nbytes(tensor: Tensor | None, *, on_host: bool) -> int:
    """Returns the size of a contiguous tensor whose memory is (`on_host`) or is not on the host.

    Returns 0 for all other tensors.
    """
    if tensor is None or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return 0
    if (tensor.device.type == "cpu") != on_host or not tensor.is_contiguous():
        return 0
    return tensor.numel() * tensor.element_size()


def _page(tensor: Tensor) -> Tensor:
    """Returns a uint8 view of up to 4 KiB in the middle of a contiguous `tensor`."""
    nbytes = tensor.numel() * tensor.element_size()
    size = min(_PAGE, nbytes)
    begin = tensor.storage_offset() * tensor.element_size() + (nbytes - size) // 2
    found = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return found.set_(tensor.untyped_storage(), begin, (size,), (1,))


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
