"""What every backend around another one says of itself: what the inner one can do."""

from __future__ import annotations

from kvconnect.backend import Backend

__all__ = ["BackendWrapper"]


class BackendWrapper(Backend):
    """A backend that passes on the capabilities of `inner`; its methods are its own.

    Attributes:
        inner: the backend that is wrapped.
    """

    inner: Backend

    @property
    def device_buffers(self) -> bool:  # type: ignore[override]
        """As `inner` says."""
        return self.inner.device_buffers

    @property
    def enumerable(self) -> bool:  # type: ignore[override]
        """As `inner` says."""
        return self.inner.enumerable

    @property
    def inline(self) -> bool:  # type: ignore[override]
        """As `inner` says."""
        return self.inner.inline

    @property
    def durable(self) -> bool:  # type: ignore[override]
        """As `inner` says."""
        return self.inner.durable

    @property
    def shared(self) -> bool:  # type: ignore[override]
        """As `inner` says."""
        return self.inner.shared

    @property
    def expires(self) -> bool:  # type: ignore[override]
        """As `inner` says."""
        return self.inner.expires

    @property
    def max_value_bytes(self) -> int | None:  # type: ignore[override]
        """As `inner` says."""
        return self.inner.max_value_bytes

    @property
    def variable_length(self) -> bool:  # type: ignore[override]
        """As `inner` says."""
        return self.inner.variable_length
