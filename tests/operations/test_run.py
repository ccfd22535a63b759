"""The runs of verbs on a server: they are aborted, and write no progress."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest

from kvconnect.operations.progress import Progress, is_shown
from kvconnect.operations.run import AbortableRun


def test_an_abort_from_another_thread_cancels_the_work():
    run, begun, ended = AbortableRun(), threading.Event(), []

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cleaned up")

    def abort() -> None:
        assert begun.wait(10)
        assert not run.done
        run.abort()

    aborting = threading.Thread(target=abort)
    aborting.start()
    with pytest.raises(asyncio.CancelledError):
        run(work())
    aborting.join()
    assert (run.done, ended) == (True, ["cleaned up"])
    run.abort()  # has no effect any more


def test_an_abort_before_the_work_begins_keeps_it_from_beginning():
    run, begun = AbortableRun(), []

    async def work() -> None:
        begun.append(True)

    run.abort()
    with pytest.raises(asyncio.CancelledError):
        run(work())
    assert not begun


@pytest.mark.parametrize("shown", [True, False])
def test_progress_is_written_only_where_it_is_shown(shown, capsys, monkeypatch):
    monkeypatch.setattr("kvconnect.operations.progress._SECONDS_BETWEEN_LINES", 0.0)

    def advance() -> None:
        is_shown.set(shown)
        with Progress("warm", 2, "tokens") as progress:
            progress.advance(1)

    contextvars.copy_context().run(advance)
    assert capsys.readouterr().err == ("warm: 1 of 2 tokens\n" if shown else "")
