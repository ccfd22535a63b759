"""The process of a follower, as `launch` starts it: ``python -m kvconnect.engine.ranks RANK``."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import select
import signal
import sys
import threading
from typing import NoReturn

_log = logging.getLogger("kvconnect.engine.ranks")
_POLL_S = 1.0
_PR_SET_PDEATHSIG = 1


def _end_with_leader(pipe: int, leader: int) -> NoReturn:
    """Ends this process when the leader's has ended, which closes its end of the pipe.

    A process that was forked from the leader's may keep that end open, so a new parent is checked
    for, too. The leader ends its stores' transfers by itself: nothing is drained here.
    """
    while os.getppid() == leader:
        if select.select([pipe], [], [], _POLL_S)[0] and not os.read(pipe, 1):
            break
    os._exit(1)


def _be_killed_with_leader(leader: int) -> None:
    """Makes the kernel kill this process when the leader's ends, where it can: on Linux.

    A process that is stopped cannot end itself.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != leader:  # it ended before that call
        os._exit(1)


def main() -> NoReturn:
    """Runs the follower of the rank in the command line.

    The process ends at once afterwards: the interpreter takes seconds to free all modules, and
    nothing is left to be done. After an error it must not keep the other ranks waiting, either.
    """
    leader = os.getppid()
    _be_killed_with_leader(leader)
    pipe = sys.stdin.fileno()
    lines = _two_lines(pipe)
    threading.Thread(target=_end_with_leader, args=(pipe, leader), daemon=True).start()
    start = json.loads(lines[0])
    sys.path[:] = start["sys_path"]  # where a user's connector may lie
    from kvconnect.engine.ranks.preparation import prepare

    prepare(start["prepare"])
    from kvconnect.engine.ranks.follower import follow
    from kvconnect.engine.ranks.meeting import Meeting
    from kvconnect.engine.ranks.settings import RankSettings

    rank = int(sys.argv[1])
    settings = RankSettings.decode(lines[1])
    try:
        follow(settings, Meeting.joined(start["port"], rank, settings.size), rank)
    except BaseException as error:  # noqa: BLE001  the leader raises it
        _log.error("rank %d ended: %s: %s", rank, type(error).__name__, error)
        status = 1
    else:
        status = 0
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)


def _two_lines(pipe: int) -> list[str]:
    data = b""
    while data.count(b"\n") < 2:
        part = os.read(pipe, 1 << 16)
        if not part:
            sys.exit(1)
        data += part
    return data.decode().split("\n")


if __name__ == "__main__":
    main()
