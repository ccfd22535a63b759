"""The pieces in which blocks are loaded: one is checked while the next is loaded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvconnect.backends.guard.calls import together

if TYPE_CHECKING:
    from torch import Tensor

# The bytes of a piece: large enough to hide its fixed costs (a thread switch, a query), small
# enough that the last check, which overlaps with no load, is short.
PIECE_NBYTES = 16 << 20


def pieces(buffers: Sequence[Tensor]) -> Iterator[slice]:
    """Yields slices over `buffers` of about `PIECE_NBYTES` each."""
    start = nbytes = 0
    for index, buffer in enumerate(buffers):
        nbytes += buffer.numel()
        if nbytes >= PIECE_NBYTES or index + 1 == len(buffers):
            yield slice(start, index + 1)
            start, nbytes = index + 1, 0


async def load_pieces(
    into: Sequence[Tensor],
    fill: Callable[[slice], Awaitable[int]],
    check: Callable[[slice], Awaitable[int]],
    *,
    wanted: Callable[[], bool] = lambda: True,
) -> int:
    """Loads and checks piece by piece; returns how many leading buffers are filled and sound.

    Args:
        into: the buffers.
        fill: fills the buffers of a slice; returns how many leading ones are filled.
        check: returns how many leading buffers of a slice are sound; may run beside `fill`.
        wanted: returns false once no caller waits any more; then no further piece is loaded.

    Raises:
        Exception: the error of `fill` or `check`; neither is running any more.
    """
    parts = list(pieces(into))
    if not parts:
        return 0
    sound, filled = 0, await fill(parts[0])
    for part, ahead in zip(parts, [*parts[1:], None], strict=True):
        size = part.stop - part.start
        got = slice(part.start, part.start + filled)
        if ahead is None or filled < size or not wanted():
            return sound + await check(got)
        good, filled = await together(check(got), fill(ahead))
        sound += good
        if good < size:
            break
    return sound
