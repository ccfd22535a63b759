"""The simulator: small traces, counted by hand. Blocks have 4 tokens."""

from __future__ import annotations

import pytest

from kvconnect.errors import ConfigurationError
from kvconnect.simulate.machine import Machine
from kvconnect.simulate.retention_policy import RetentionPolicy
from kvconnect.simulate.simulator import Simulator

T = 4


def simulator(device=64, policy=(), **more) -> Simulator:
    machine = Machine(device_blocks=device, tokens_per_block=T, **more)
    return Simulator(machine, RetentionPolicy(policy))


def served(sim: Simulator, *requests):
    """All counts after these requests."""
    for request in requests:
        sim.arrive(request)
    sim.finish()
    return sim.tally.total()


def run(first: int, length: int) -> range:
    """Tokens that no other `first` has."""
    return range(first * 1000, first * 1000 + length)


# ---------------------------------------------------------------- hits


def test_the_same_prompt_again_is_found_but_for_its_last_token(request_of):
    counts = served(simulator(), request_of(run(1, 16)), request_of(run(1, 16)))
    assert counts.prompt_tokens == 32
    assert counts.device_tokens == 15
    assert counts.computed_tokens == 17
    # Three whole blocks are shared, and three tokens of the fourth are copied.
    assert counts.device_copied_tokens == 3
    assert counts.hit_rate() == counts.hit_rate("device") == 15 / 32


def test_the_cache_forgets_what_was_used_longest_ago(request_of):
    # Four blocks: A and B fill them, C takes the place of A.
    a, b, c = (request_of(run(n, 8)) for n in (1, 2, 3))
    counts = served(simulator(device=4), a, b, c, b, a)
    assert counts.device_tokens == 7  # B only
    # C takes A's two blocks. B copies its last block into C's last one, which is blank at the end
    # (B has that block already); so A takes that and C's first.
    assert counts.evicted_blocks == 2 + 1 + 1


def test_requests_share_while_they_are_served(request_of):
    # The second arrives after the first's prompt was computed (16 s), before its answer is there.
    first = request_of(run(1, 16), run(2, 100))
    second = request_of([*run(1, 16), *run(3, 4)], at=20)
    sim = simulator(prefill_tokens_per_s=1, decode_tokens_per_s=1)
    assert served(sim, first, second).device_tokens == 16


def test_a_prompt_is_found_only_once_it_is_computed(request_of):
    first, second = request_of(run(1, 16)), request_of([*run(1, 16), *run(3, 4)], at=10)
    sim = simulator(prefill_tokens_per_s=1, decode_tokens_per_s=1)
    assert served(sim, first, second).device_tokens == 0


# ---------------------------------------------------------------- waiting


def test_a_request_that_does_not_fit_waits_for_one_that_ends(request_of):
    # 8 blocks; the first holds 6 of them for 16 + 8 seconds.
    first, second = request_of(run(1, 16), run(2, 8)), request_of(run(3, 16), at=4)
    sim = simulator(device=8, prefill_tokens_per_s=1, decode_tokens_per_s=1)
    counts = served(sim, first, second)
    assert counts.requests == 2
    assert counts.waited_s == counts.longest_wait_s == 20
    assert counts.most_waiting == 1
    assert counts.most_blocks == 6
    assert sim.now == 24 + 16


def test_no_request_overtakes_the_first_that_waits(request_of):
    first = request_of(run(1, 24))  # 6 of 8 blocks, until 24
    large, small = request_of(run(2, 16), at=1), request_of(run(3, 4), at=2)
    sim = simulator(device=8, prefill_tokens_per_s=1)
    assert served(sim, first, large, small).waited_s == 23 + 22


def test_blocks_are_enough_where_the_beginning_is_shared_with_a_running_request(request_of):
    # 5 + 5 blocks, of which 4 are shared: 6 of 6, and none waits.
    first = request_of([*run(1, 16), *run(2, 4)], run(4, 1))
    second = request_of([*run(1, 16), *run(3, 3)], run(5, 1), at=30)
    sim = simulator(device=7, prefill_tokens_per_s=1, decode_tokens_per_s=1e-3)
    counts = served(sim, first, second)
    assert counts.waited_s == 0
    assert counts.most_blocks == 6 + 1


def test_requests_beyond_the_batch_wait(request_of):
    sim = simulator(prefill_tokens_per_s=1, max_batch_size=1)
    counts = served(sim, request_of(run(1, 10)), request_of(run(2, 10)))
    assert counts.waited_s == 10


def test_requests_beyond_the_queue_are_turned_away(request_of):
    sim = simulator(prefill_tokens_per_s=1, max_batch_size=1, max_waiting=1)
    counts = served(sim, *(request_of(run(n, 10)) for n in range(1, 5)))
    assert (counts.requests, counts.turned_away, counts.most_waiting) == (2, 2, 1)
    assert counts.prompt_tokens == 20


def test_without_a_queue_a_request_is_served_or_turned_away(request_of):
    sim = simulator(prefill_tokens_per_s=1, max_batch_size=1, max_waiting=0)
    counts = served(sim, *(request_of(run(n, 10), at=6 * n) for n in (0, 1, 2)))
    assert (counts.requests, counts.turned_away) == (2, 1)


def test_what_would_not_fit_alone_is_not_waited_for(request_of):
    counts = served(simulator(device=4), request_of(run(1, 13), run(2, 4)), request_of(run(3, 16)))
    assert (counts.too_long, counts.requests) == (1, 1)


def test_a_request_may_fill_the_device_alone(request_of):
    request = request_of(run(1, 12), run(2, 4))
    counts = served(simulator(device=4), request, request, request)
    assert counts.requests == 3
    assert counts.most_blocks == 4


# ---------------------------------------------------------------- the external tier


def test_what_the_device_forgot_comes_from_the_external_tier(request_of):
    a, b = request_of(run(1, 16)), request_of(run(2, 16))
    counts = served(simulator(device=4, external_blocks=100), a, b, a)
    assert (counts.device_tokens, counts.external_tokens) == (0, 15)
    assert counts.computed_tokens == 33
    assert counts.saved_blocks == 8  # each once
    assert counts.loaded_blocks == 4  # the last one whole, although its last token is computed


def test_the_external_tier_goes_on_where_the_device_ends(request_of):
    # The device has the 4 shared blocks and 4 of the 9 that follow them; of the fifth it has 2
    # tokens, and those are loaded with their block.
    prompt = request_of(run(1, 52))
    sim = simulator(device=14, external_blocks=100)
    served(sim, prompt)
    other = request_of([*run(1, 34), *run(2, 22)])
    served(sim, other)
    before = sim.tally.total()
    counts = served(sim, prompt)
    found = counts.external_tokens - before.external_tokens
    on_device = counts.device_tokens - before.device_tokens
    assert found + on_device == 51
    assert on_device % T == 0
    assert counts.loaded_blocks - before.loaded_blocks == 13 - on_device // T


def test_a_full_external_tier_forgets_the_oldest_chain_from_its_end(request_of):
    a, b = request_of(run(1, 12)), request_of(run(2, 8))
    sim = simulator(device=3, external_blocks=4)
    counts = served(sim, a, b, a)
    # A's third block went for B's second. The device kept the first; the second is loaded, and the
    # third is saved again.
    assert (counts.device_tokens, counts.external_tokens) == (4, 4)
    assert counts.saved_blocks == 3 + 2 + 1
    assert counts.external_evicted_blocks == 2


# ---------------------------------------------------------------- retention


def test_a_kept_system_prompt_outlives_newer_blocks(request_of):
    def hits(policy):
        sim = simulator(device=6, policy=policy)
        system = [*run(1, 8)]
        others = [request_of(run(n, 16), system=0) for n in (5, 6)]
        first = request_of([*system, *run(2, 8)], system=8)
        again = request_of([*system, *run(3, 8)], system=8)
        return served(sim, first, *others, again).device_tokens

    assert hits([]) == 0
    assert hits(["system=90"]) == 8


def test_retention_ends_on_the_traces_own_clock(request_of):
    def hits(seconds):
        sim = simulator(device=6, policy=[f"system=90:{seconds}s"])
        first = request_of(run(1, 16), system=8)
        again = request_of([*run(1, 8), *run(3, 8)], at=100, system=8)
        # Each needs 4 of the 6 blocks; to the second one, all but the kept two are newer.
        others = (request_of(run(n, 16), at=at, system=0) for n, at in ((5, 50), (6, 60)))
        return served(sim, first, *others, again).device_tokens

    assert hits(1000) == 8
    assert hits(59) == 0


def test_a_rule_about_system_prompts_needs_to_know_their_length(request_of):
    sim = simulator(policy=["system=90"])
    with pytest.raises(ConfigurationError, match=r"line 1 of the trace has no system_length"):
        sim.arrive(request_of(run(1, 8)))


# ---------------------------------------------------------------- the machine


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"device_blocks": 0}, "device_blocks"),
        ({"host_blocks": -1}, "host_blocks"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"prefill_tokens_per_s": 0}, "prefill_tokens_per_s"),
        ({"decode_tokens_per_s": float("nan")}, "decode_tokens_per_s"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(settings, field):
    with pytest.raises(ConfigurationError, match=field):
        Machine(**({"device_blocks": 8} | settings))


# ---------------------------------------------------------------- recurrent states


def test_a_turn_goes_on_from_the_state_at_the_end_of_the_last_one(request_of):
    first = request_of(run(1, 22), run(2, 20))
    second = request_of([*run(1, 22), *run(2, 20), *run(3, 8)])
    counts = served(simulator(state_blocks=2, state_interval=16), first, second)
    # 41 tokens have KV, and the last state is at the end of ten blocks.
    assert counts.device_tokens == 40
    assert counts.computed_tokens == 22 + 10
    assert counts.no_state_tokens == 0
    # 16, 20; 24, 28, 32, 36, 40; 48; the second answer is empty.
    assert counts.snapshots == 8


def test_a_prompt_that_forks_between_two_states_computes_what_lies_between(request_of):
    first, second = request_of(run(1, 30)), request_of([*run(1, 24), *run(2, 6)])
    counts = served(simulator(state_blocks=2, state_interval=16), first, second, second)
    assert counts.no_state_tokens == 24 - 16
    assert counts.device_tokens == 16 + 28


def test_states_take_their_memory_from_the_device(request_of):
    requests = [request_of(run(n, 32)) for n in range(6)] * 2
    without = served(simulator(device=128), *requests)
    small = served(simulator(device=128, state_blocks=1, state_interval=16), *requests)
    large = served(simulator(device=128, state_blocks=6, state_interval=16), *requests)
    assert without.device_tokens > small.device_tokens > large.device_tokens


def test_a_machine_that_is_too_small_for_states_is_refused():
    with pytest.raises(ConfigurationError, match="device_blocks"):
        simulator(device=8, state_blocks=3)
    with pytest.raises(ConfigurationError, match="external_blocks"):
        simulator(state_blocks=3, external_blocks=8)
