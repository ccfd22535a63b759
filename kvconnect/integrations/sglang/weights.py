"""A guard that detects when a running server's weights are no longer those that keys name."""

from __future__ import annotations

import threading
from typing import Any

import torch

from kvconnect.digest.watch import WeightWatch
from kvconnect.errors import ConfigurationError
from kvconnect.integrations.sglang.server import Server
from kvconnect.integrations.sglang.updates import updates

# With these, SGLang itself moves weights about, or unmaps them, while they stay the same.
_MOVING = (
    *("enable_memory_saver", "cpu_offload_gb", "offload_group_size", "enable_paged_experts"),
    *("enable_eplb", "elastic_ep_backend", "enable_elastic_expert_backup", "kt_weight_path"),
    *("weight_cache_mode", "ple_offload_embedding"),
)


class WeightGuard:
    """A guard that detects replacements of the server's weights. Thread-safe.

    It has three sources: the methods by which SGLang replaces weights (see `updates`), the settings
    that name the weights, and the model's parameters. The last are left out if SGLang moves weights
    itself.

    Args:
        server: whose weights count. Without a server nothing is found.
        is_named: ``model_revision`` stands for the weights as they are now.

    Raises:
        ConfigurationError: weights may have been replaced before, or may be replaced unseen.
    """

    def __init__(self, server: Server, *, is_named: bool) -> None:
        self._server = server
        self._settings = server.weights()
        self._lock = threading.Lock()
        self._watch: WeightWatch | None = None
        self._found: str | None = None
        if server.is_there:
            is_hooked = updates.hook(is_starting=server.is_starting)
            if not is_named:
                _refuse_unseen(server, is_hooked=is_hooked)
        self._begun = updates.number
        self._may_hold_older = server.is_there and not (updates.since_start and not self._begun)

    def refuse_older_pages(self, pool: Any) -> None:
        """Refuses a server that holds pages which earlier weights may have computed.

        Args:
            pool: SGLang's host pool.

        Raises:
            ConfigurationError: weights may have been replaced, and pages are held.
        """
        tree = getattr(self._server.scheduler, "tree_cache", None)
        if not self._may_hold_older or tree is None:
            return
        held = tree.total_size()
        in_host = pool.size - pool.available_size()
        if in_host or (sum(held) if isinstance(held, tuple) else held):
            raise ConfigurationError(
                "model_revision: cannot name pages that the server has computed before, perhaps "
                "with other weights; flush its cache (POST /flush_cache), then attach the storage"
            )

    def change(self) -> str | None:
        """Returns how the weights were replaced, or ``None``. Blocks for a few page reads."""
        if not self._server.is_there:
            return None
        with self._lock:
            if self._found is None:
                self._found = self._change()
            return self._found

    def _change(self) -> str | None:
        if updates.number != self._begun:
            return updates.last
        if self._server.weights() != self._settings:
            return "the server's settings name others"
        model = getattr(self._server.runner, "model", None)
        if not isinstance(model, torch.nn.Module) or any(map(self._server.is_set, _MOVING)):
            return None
        first = next(model.parameters(), torch.empty(0))
        with torch.cuda.device(first.get_device()):  # -1 in host memory: no device
            if self._watch is None:
                # From the first call on: by then the server has finished its start. Buffers are
                # left out, since SGLang lengthens tables of positions while it runs.
                self._watch = WeightWatch.of(model, buffers=False)
            return self._watch.changed()


def _refuse_unseen(server: Server, *, is_hooked: bool) -> None:
    if not is_hooked:
        raise ConfigurationError(
            "model_revision: is missing, and this SGLang has no hooks on updates of its weights "
            "(kvconnect was tested with 0.5.23): name weights that stay as long as the server runs"
        )
    if not updates.since_start or updates.number:
        raise ConfigurationError(
            "model_revision: is missing, and this storage is attached to a running server, whose "
            "weights may have been replaced before: name the weights that it has now, or give the "
            "storage when the server starts"
        )
    if not isinstance(getattr(server.runner, "model", None), torch.nn.Module):
        raise ConfigurationError(
            "model_revision: is missing, and the model of this server cannot be watched: name "
            "weights that stay as long as the server runs"
        )
