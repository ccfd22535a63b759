"""The account of a prompt: every token under one outcome, whatever happens to the request."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvconnect.explain.account import PromptAccount
from kvconnect.explain.outcome import NotSaved, Outcome, Span

POSITION = st.integers(0, 60)
EVENT = st.one_of(
    st.tuples(st.just("reach"), POSITION, st.booleans()),
    st.tuples(st.just("lose"), st.sampled_from(list(Outcome)), POSITION),
)


def counted(account: PromptAccount) -> list[tuple[int, int, str]]:
    return [(span.start, span.end, str(span.outcome)) for span in account.spans()]


@given(st.integers(1, 50), st.lists(EVENT, max_size=12), POSITION, st.lists(POSITION, max_size=4))
def test_spans_have_no_gap_and_no_overlap(length, events, base, cuts):
    account = PromptAccount(length)
    stops = sorted({*cuts, base} - set(range(base)))
    why = [Span(low, high, Outcome.EVICTED) for low, high in pairwise(stops)]
    account.explain(base, why)
    for name, *arguments in events:
        if name == "reach":
            account.reach(arguments[0], reused=arguments[1])
        else:
            account.lose(*arguments)
    spans = account.spans()
    assert [span.start for span in spans] == [0, *(span.end for span in spans)][:-1]
    assert spans[-1].end == length
    assert all(len(span) > 0 for span in spans)


def test_the_last_token_is_always_computed():
    account = PromptAccount(20)
    account.explain(0, ())
    account.reach(20, reused=False)
    assert counted(account) == [(0, 19, "new"), (19, 20, "last")]


def test_tokens_of_a_request_that_ended_early_are_unreached():
    account = PromptAccount(20)
    account.reach(8, reused=True)
    account.reach(12, reused=False)
    assert counted(account)[-1] == (12, 20, "unreached")


def test_a_token_counts_as_it_became_valid_first():
    account = PromptAccount(20)
    account.explain(8, ())
    account.reach(8, reused=True)
    account.reach(20, reused=False)
    account.reach(16, reused=True)  # after a preemption
    assert counted(account) == [(0, 8, "reused"), (8, 19, "new"), (19, 20, "last")]


def test_tokens_computed_beside_a_load_were_slower_to_load():
    account = PromptAccount(20)
    account.explain(16, ())
    account.reach(4, reused=True)
    account.reach(12, reused=False)
    account.reach(16, reused=True)
    account.reach(20, reused=False)
    assert counted(account) == [
        *((0, 4, "reused"), (4, 12, "slower"), (12, 16, "reused")),
        *((16, 19, "new"), (19, 20, "last")),
    ]


def test_tokens_of_a_load_that_failed_are_lost_to_it():
    account = PromptAccount(20)
    account.explain(16, ())
    account.reach(8, reused=True)
    account.lose(Outcome.DAMAGED, 16)
    account.reach(20, reused=False)
    assert counted(account)[:2] == [(0, 8, "reused"), (8, 16, "damaged")]
    assert account.explanation().tokens == {"reused": 8, "damaged": 8, "new": 3, "last": 1}


def test_blocks_below_the_priority_stay_unsaved():
    account, told = PromptAccount(20), []
    account.when_unsaved = lambda *what: told.append(what)
    account.not_saved(8, NotSaved.BACKLOG)
    account.saved_after_all()
    assert account.unsaved is None
    account.not_saved(4, NotSaved.BELOW_MIN_PRIORITY)
    account.not_saved(8, NotSaved.BACKLOG)
    account.saved_after_all()
    assert account.unsaved == (4, "below min_priority")
    assert told == [(8, "backlog"), (4, "below min_priority")]


def test_a_refused_block_behind_one_that_was_dropped_stays_unsaved():
    account = PromptAccount(20)
    account.not_saved(4, NotSaved.BACKLOG)
    account.not_saved(12, NotSaved.HOOK)
    account.not_saved(16, NotSaved.REQUEST)
    assert account.unsaved == (4, "backlog")
    account.saved_after_all()
    assert account.unsaved == (12, "refused by a hook")


def test_states_that_are_missing_after_a_preemption_explain_nothing():
    account = PromptAccount(20)
    account.lack_states(8)
    account.lack_states(4)
    account.explain(0, ())
    account.lack_states(16)  # the tokens were computed before
    account.reach(20, reused=False)
    assert [(one.start, one.end, str(one.outcome)) for one in account.spans()] == [
        *((0, 8, "no_state"), (8, 19, "new"), (19, 20, "last")),
    ]
