"""`own_process` runs a test elsewhere, and fails with it."""

from __future__ import annotations

import os

import pytest
from own_process import own_process


@own_process
def passes(pid):
    assert os.getpid() != pid


@own_process
async def fails(pid):
    assert os.getpid() == pid, "it runs elsewhere"


@own_process
def dies():
    os._exit(3)


def test_a_test_passes_and_fails_with_its_process():
    passes(pid=os.getpid())
    with pytest.raises(pytest.fail.Exception, match="it runs elsewhere"):
        fails(pid=os.getpid())
    with pytest.raises(pytest.fail.Exception, match="ended early: 3"):
        dies()
