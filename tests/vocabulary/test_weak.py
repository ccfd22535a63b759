"""Callbacks to an owner: they call it, and do not keep it."""

from __future__ import annotations

import weakref

import pytest

from kvconnect.weak import weakly


class Owner:
    def named(self, name, *, end="!"):
        return name + end


def test_it_calls_the_owner_and_does_not_keep_it():
    owner = Owner()
    call, kept = weakly(owner.named), weakref.ref(owner)
    assert call("a", end="?") == "a?"
    del owner
    assert kept() is None
    with pytest.raises(ReferenceError, match=r"the owner of Owner\.named has been freed"):
        call("a")
