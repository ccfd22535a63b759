"""For every check of the kit there is a backend that it finds wrong."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
import toy_server as toy
import wrong_backends as wrong

from kvconnect import frame
from kvconnect.backends.guard.breaker import Breaker
from kvconnect.testing.checks import all_checks, faults, keys
from kvconnect.testing.runner import run_check
from kvconnect.testing.subject import Address, Subject
from kvconnect.testing.subjects import DiskSubject

CHECKS = {one.id: one for one in all_checks()}


def guard(kind):
    return type("WrongGuard", (wrong.WithGuard,), {"guard": kind})


class OtherHash:
    """Stands for keys that are made with Python's own hash()."""

    @staticmethod
    def plant(monkeypatch):
        monkeypatch.setattr(keys, "digest", lambda: str(hash("tokens")))


class TrustsFrames:
    @staticmethod
    def plant(monkeypatch):
        monkeypatch.setattr(
            frame,
            "check",
            lambda data, key, prints, taken=None: frame.FrameHeader(16, 8192, b"", key),
        )


WRONG = {
    "contract.round_trip": wrong.memory(wrong.DropsLastByte),
    "contract.large_value": wrong.memory(wrong.OnlySixteenMiB),
    "contract.mixed_batch": wrong.memory(wrong.OneSizePerBatch),
    "contract.long_batch": wrong.memory(wrong.ShortBatches),
    "contract.absent_key": wrong.memory(wrong.WedgesAfterMiss),
    "contract.empty_batch": wrong.memory(wrong.NeedsOneKey),
    "contract.leading_count": wrong.memory(wrong.CountsAll),
    "contract.loaded_is_right": wrong.memory(wrong.WritesBeyond),
    "contract.other_length": wrong.memory(wrong.SaysWhatIsThere),
    "contract.longer_buffer": wrong.declares(variable_length=False),
    "contract.save_again": wrong.memory(wrong.CountsNewOnes),
    "contract.duplicates": wrong.memory(wrong.CountsKeys),
    "contract.delete": wrong.memory(wrong.DeleteRaises),
    "contract.scrub": wrong.memory(wrong.ScrubsTooMuch),
    "contract.own_copy": wrong.memory(wrong.KeepsBuffers),
    "contract.read_only_input": wrong.memory(wrong.SpoilsInput),
    "contract.metadata": wrong.memory(wrong.NeedsTokens),
    "contract.without_layouts": wrong.memory(wrong.NeedsLayouts),
    "contract.concurrent_calls": wrong.memory(wrong.OneCallAtATime),
    "contract.races": wrong.memory(wrong.ReusesPlaces),
    "contract.races_with_eviction": wrong.memory(wrong.ReusesPlaces),
    "contract.buffers_are_left_alone": wrong.memory(wrong.WritesLater),
    "contract.cancelled_loads": wrong.EndsCancelled,
    "contract.buffers_come_back_once": guard(wrong.HandsBuffersOn),
    "contract.close_in_flight": wrong.memory(wrong.CloseWaits),
    "contract.open_again": wrong.memory(wrong.OpensOnce),
    "contract.nothing_is_left": wrong.memory(wrong.LeavesTask),
    "contract.nothing_is_left ": wrong.memory(wrong.LeavesThread),
    "contract.nothing_is_left  ": wrong.memory(wrong.LeavesFile),
    "contract.nothing_is_left   ": wrong.memory(wrong.LeavesLane),
    "contract.loop_stays_free": wrong.memory(wrong.BlocksTheLoop),
    "contract.two_processes": wrong.files("RemovesFirst"),
    "contract.processes_see_each_other": wrong.OwnFolderPerProcess,
    "capabilities.declared": wrong.declares(durable="yes"),
    "capabilities.durable": wrong.declares(durable=True),
    "capabilities.max_value_bytes": wrong.declares(max_value_bytes=16384),
    "capabilities.scan": wrong.memory(wrong.ScansTwice),
    "capabilities.children": wrong.memory(wrong.MixesTokens),
    "capabilities.many_children": wrong.memory(wrong.ForgetsTheLast),
    "capabilities.stats": wrong.memory(wrong.NeverCountsDown),
    "keys.every_ingredient": wrong.memory(wrong.SaysYes),
    "keys.same_in_every_process": OtherHash,
    "keys.another_salt_never_hits": wrong.memory(wrong.SaysYes),
    "contract.answers_follow": wrong.memory(wrong.RemembersLookups),
    "eviction.chains_from_their_end": wrong.memory(wrong.FirstInFirstOut),
    "eviction.use_counts_for_ancestors": wrong.memory(wrong.FirstInFirstOut),
    "eviction.dropped_is_not_found": wrong.memory(wrong.RemembersLookups),
    "pins.refused_without": wrong.declares(pins=False),
    "pins.answers": wrong.memory(wrong.PinsWhatIsAbsent),
    "pins.kept_in_a_full_store": wrong.memory(wrong.PinsInWords),
    "pins.until_their_time": wrong.memory(wrong.PinsForEver),
    "pins.within_their_share": wrong.memory(wrong.PinsAll),
    "pins.kept_past_their_ttl": wrong.ExpiresWhilePinned,
    "pins.durable_pins": wrong.PinsUntilItCloses,
    "keys.alike": wrong.renames(lambda key: key[:8]),
    "keys.alike ": wrong.renames(lambda key: key[-8:]),
    "keys.all_bits_count": wrong.renames(lambda key: key[:31]),
    "keys.all_bits_count ": wrong.renames(lambda key: key.lower()),
    "keys.any_bytes": wrong.renames(lambda key: key.strip(b"\0")),
    "keys.keys_are_not_copied": wrong.memory(wrong.DeletesEqualContent),
    **{
        f"integrity.{name}": wrong.Unchecked
        for name in (
            *("flipped_header", "flipped_payload", "flipped_end", "truncated", "swapped"),
            *("older_generation", "future_format", "garbage", "one_of_many"),
        )
    },
    "integrity.truncated_padding": wrong.UncheckedShort,
    "integrity.longer": wrong.CutsLong,
    "faults.raises": wrong.Unguarded,
    "faults.hangs": wrong.Unguarded,
    "faults.answers_late": guard(wrong.HandsBuffersOn),
    "faults.lies": wrong.Unchecked,
    "faults.miscounts": wrong.Unguarded,
    "faults.truncates": wrong.Unchecked,
    "faults.flips_bits": wrong.Unchecked,
    "faults.swaps": wrong.Unchecked,
    "time.ttl_border": wrong.ForgetsTtl,
    "time.ttl_of_a_block": wrong.memory(wrong.IgnoresTheTtlOfBlocks),
    "time.clock_jumps_forward": wrong.ExpiresInADay,
    "time.clock_jumps_back": wrong.memory(wrong.ClockMustRise),
    "time.clock_jumps_in_a_full_store": wrong.memory(wrong.StopsWhenTheClockJumps),
    "time.deadlines_are_monotonic": guard(wrong.WallClockDeadline),
    "resources.failing_read": wrong.files("BreaksForGood"),
    "resources.failing_write": wrong.files("InPlace"),
    "resources.no_space_at_write": wrong.files("InPlace"),
    "resources.failing_open": wrong.files("BreaksForGood"),
    "resources.interrupted": wrong.files("BreaksForGood"),
    "resources.short_transfers": wrong.files("WritesOnce"),
    "resources.limited_file_size": wrong.ClaimsAll,
    "resources.full_filesystem": wrong.ClaimsAll,
    "resources.read_only_filesystem": wrong.files("SwallowsErrors"),
    "resources.no_descriptors": wrong.RunsOutOfFiles,
    "resources.vanished_directory": wrong.files("RemembersNames"),
    "resources.capacity": wrong.FourTimesTheCapacity,
    "resources.capacity_of_several": wrong.FourTimesTheCapacity,
    "resources.too_large": wrong.memory(wrong.TakesAnything),
    "resources.memory_is_bounded": wrong.LeakySubject,
    "crash.killed_while_saving": wrong.files("AcknowledgesEarly"),
    "crash.killed_while_saving ": wrong.files("InPlace"),
    "crash.killed_while_evicting": wrong.files("LeavesParts"),
    "crash.killed_at_named_points": wrong.files("InPlace"),
    "crash.stopped_process": wrong.files("LocksForever"),
    "model.random_operations": wrong.memory(wrong.ForgetsAfterDelete),
    "model.random_operations_when_full": wrong.memory(wrong.RevivesDeleted),
    "end to end.same_tokens_and_reuse": wrong.files("NeverFinds"),
    "end to end.same_tokens_on_several_ranks": wrong.ForgetsInOtherProcesses,
    "end to end.same_tokens_whatever_fails": TrustsFrames,
}
WRONG_NETWORK = {
    **{
        f"network.{name}": toy.StaysBroken
        for name in (
            *("refused", "black_hole", "half_open", "frozen", "one_byte_per_second"),
            *("slow_answers", "garbage_answers", "wrong_length"),
        )
    },
    "network.reset_anywhere": toy.TakesPartOfAnAnswer,
    "network.unreachable_at_start": toy.ConnectsLater,
    "network.close_while_frozen": toy.ClosesSlowly,
    "network.breaker": toy.ToyBackend,
    "network.restart_with_data": toy.ToyBackend,
    "network.restart_empty": toy.ToyBackend,
}


def test_there_is_a_wrong_backend_for_every_check():
    assert {name.strip() for name in WRONG} | set(WRONG_NETWORK) == set(CHECKS)


SLOW = {"end to end.same_tokens_on_several_ranks"}


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in WRONG]
)
def test_wrong_backend_is_found(name, tmp_path, monkeypatch):
    make = WRONG[name]
    if hasattr(make, "plant"):
        make.plant(monkeypatch)
        subject = DiskSubject(tmp_path / "store")
    elif isinstance(make, type) and issubclass(make, DiskSubject):
        subject = make(tmp_path / "store")
    else:
        subject = make()
    subject.directory = None if subject.directory is None else tmp_path / "store"
    if isinstance(subject, wrong.FileSubject):
        subject.directory = tmp_path / "store"
    subject.patience_s = 0.3
    subject.long = name.startswith("model.")  # chance must not decide whether this test passes
    check = CHECKS[name.strip()]
    if name == "faults.hangs":
        check = replace(check, limit_s=1.0)
    outcome = run_check(check, subject)
    if outcome.result == "skipped" and check.needs_root:
        pytest.skip(outcome.reason)
    assert outcome.result == "failed", outcome
    print(outcome.reason)


class ToySubject(Subject):
    def __init__(self, server, backend):
        self.server = server
        self.backend = backend
        self.address = Address("127.0.0.1", server.port)
        self.patience_s = 0.3
        self.deadline_s = 0.2

    def make_backend(self):
        return self.make_via(self.address)

    def make_via(self, address):
        return self.backend(address.host, address.port)

    async def restart_server(self, *, empty):
        self.server.restart(empty=not empty)


@pytest.mark.parametrize("name", WRONG_NETWORK)
def test_wrong_backend_of_a_server_is_found(name, monkeypatch):
    monkeypatch.setattr(faults, "_BUSY_S", 0.5)  # what is too late need not be so by seconds
    if name == "network.breaker":
        monkeypatch.setattr(Breaker, "failed", lambda *_: None)
    server = toy.ToyServer()
    server.close = server.stop
    with closing(server):
        outcome = run_check(CHECKS[name], ToySubject(server, WRONG_NETWORK[name]))
    assert outcome.result == "failed", outcome
    print(outcome.reason)
