"""The hooks of the built-in pair: what a subclass of its scheduler may decide or watch."""

from __future__ import annotations

import weakref

from kvconnect.connector.io.orders import BlockSave
from kvconnect.explain.outcome import NotSaved
from kvconnect.request import LlmRequest
from kvconnect.trace import count, warn_once


class StoreHooks:
    """The hooks of `OffloadScheduler`; a subclass overrides those that it needs.

    All are called on the leader, on the engine's thread: while one runs, no request computes. So
    none may block, wait or do I/O; what takes long belongs on a thread of its own. `request` and
    `block` are only to be read, and not to be kept after the call.

    An exception that a hook raises, or a value of another type than the one it is to return, is
    logged once for each hook and counted in ``kvconnect_hook_failures_total``. It costs what the
    hook decides, the load or the save of this request, and never an answer. Exceptions that
    are no `Exception`, such as ``KeyboardInterrupt``, end the engine.

    The hooks are about stores. Loads from another engine's memory, which a request asks for by its
    ``kv_transfer_params``, and blocks on the device or in the engine's host memory are not asked
    about.
    """

    def may_load(self, request: LlmRequest) -> bool:
        """Returns whether `request` is looked up in the store, and loaded; by default it is.

        Called once when `request` arrives, and again each time it has lost its blocks (preemption),
        unless the request itself refuses loads. False, or a failure: its prompt is computed as far
        as the device does not have it, and counts as ``not_loaded``.
        """
        return True

    def may_save(self, request: LlmRequest, block: BlockSave) -> bool:
        """Returns whether `block` of `request` is saved; by default it is.

        Called for each block that the store lacks, in the order of the blocks, in the step that
        fills it (for the part of a block at the end: when the request ends), after `priority`. With
        several pools it is called once for the blocks of all pools: `block` is that of the first
        one, and its ``block_id`` -1 where a window has freed it. It may be called again for a block
        that was not stored, or after a preemption.

        False, or a failure: neither `block` nor any later block of `request` is saved, as these
        cannot be found without it; they count as ``not_saved``. Another request that uses the block
        may save it: this hook decides for requests, not for contents.
        """
        return True

    def on_hit(self, request: LlmRequest, tokens: int) -> None:
        """Takes note that `tokens` tokens of `request` are about to be loaded from the store.

        Called once for each load, in the step that orders it. A load that fails later reports by
        `load_failed`. The default does nothing. A failure costs nothing.
        """

    def priority(self, request: LlmRequest, block: BlockSave) -> int:
        """Returns the priority that `block` of `request` is saved with, 0 to 100.

        Called as `may_save`, before it. A block below ``min_priority`` is not saved, and `may_save`
        is not asked. By default it is ``block.priority``, the retention priority on the device,
        which this changes nothing about. A failure: as of `may_save`.
        """
        return block.priority


class GuardedHooks:
    """Calls hooks so that no exception of theirs reaches the engine.

    Args:
        hooks: the scheduler that has them.
        min_priority: of blocks that are saved.

    Attributes:
        judges: `judged` has to be asked about each block; otherwise its priority decides alone.
    """

    def __init__(self, hooks: StoreHooks, min_priority: int) -> None:
        kind = type(hooks)
        self._hooks: StoreHooks = weakref.proxy(hooks)  # which has this, too
        self._min_priority = min_priority
        self.judges = (
            kind.may_save is not StoreHooks.may_save or kind.priority is not StoreHooks.priority
        )

    def may_load(self, request: LlmRequest) -> bool:
        """Returns whether `request` may load."""
        try:
            return _flag("may_load", self._hooks.may_load(request))
        except Exception as error:  # noqa: BLE001  whatever a user's hook raises costs a hit
            _failed("may_load", error)
            return False

    def hit(self, request: LlmRequest, tokens: int) -> None:
        """Calls `on_hit`."""
        try:
            self._hooks.on_hit(request, tokens)
        except Exception as error:  # noqa: BLE001  as above
            _failed("on_hit", error)

    def judged(self, request: LlmRequest, block: BlockSave) -> int | NotSaved:
        """Returns the priority that `block` is saved with, or why it is not saved."""
        name = "priority"
        try:
            priority = _level(self._hooks.priority(request, block))
            if priority < self._min_priority:
                return NotSaved.BELOW_MIN_PRIORITY
            name = "may_save"
            block = block._replace(priority=priority)
            allowed = _flag(name, self._hooks.may_save(request, block))
        except Exception as error:  # noqa: BLE001  whatever a user's hook raises costs a save
            _failed(name, error)
            return NotSaved.HOOK_FAILED
        return priority if allowed else NotSaved.HOOK


def _flag(name: str, given: object) -> bool:
    if not isinstance(given, bool):
        raise TypeError(f"{name} returned a {type(given).__name__}; True or False is needed")
    return given


def _level(given: object) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= 100:
        raise TypeError(f"priority returned {given!r}; an integer from 0 to 100 is needed")
    return int(given)


def _failed(name: str, error: Exception) -> None:
    count("connector.hook.failed", (("hook", name),))
    warn_once(f"connector.hook.{name}", f"hook {name} failed: {type(error).__name__}: {error}")
