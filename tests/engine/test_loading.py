"""Models are loaded on a thread that ends."""

from __future__ import annotations

import threading

import pytest

from kvconnect.engine.checkpoint import loading
from kvconnect.engine.checkpoint.loading import load_model


def test_no_thread_that_lives_on_has_computed(llama, monkeypatch):
    """OpenMP keeps a team for every thread that did: with the engine's, more than cores."""
    threads: list[threading.Thread] = []
    making = loading.Model

    def note(*args, **kwargs):
        threads.append(threading.current_thread())
        return making(*args, **kwargs)

    monkeypatch.setattr(loading, "Model", note)
    load_model(llama, dtype="float32", device="cpu")
    (loader,) = threads
    loader.join(60)
    assert loader is not threading.current_thread()
    assert not loader.is_alive()


def test_what_fails_while_loading_is_raised_to_the_caller(llama, monkeypatch):
    def fail(*args, **kwargs):
        raise MemoryError("no room for weights")

    monkeypatch.setattr(loading, "Model", fail)
    with pytest.raises(MemoryError, match="no room for weights"):
        load_model(llama, dtype="float32", device="cpu")
