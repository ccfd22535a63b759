"""What goes wrong for one request ends that request: not the others, and not the engine."""

from __future__ import annotations

import pkgutil
import threading

import pytest
from observed import hold_forwards
from rank_connectors import Picky, Planted, Worker

from kvconnect import KvCacheConnectorConfig, SamplingParams
from kvconnect.errors import ConnectorContractError, EngineClosed

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=4, ignore_eos=True, temperature=1.0, seed=3)


class Stuck(Worker):
    """Stuck where a test says so."""

    stuck_in = ""
    entered = threading.Event()
    go_on = threading.Event()

    def start_load_kv(self, stream):
        self._maybe_stuck("start_load_kv")

    def shutdown(self):
        self._maybe_stuck("shutdown")

    def _maybe_stuck(self, method):
        if self.stuck_in == method:
            self.entered.set()
            self.go_on.wait(60)


@pytest.fixture
def picky():
    return KvCacheConnectorConfig(
        connector_module=__name__,
        connector_scheduler_class=Picky.__name__,
        connector_worker_class=Stuck.__name__,
        save_timeout_s=0.2,
    )


def check_unharmed(llm):
    """The engine goes on, and holds nothing of any request."""
    assert llm.generate([9, 9, 9], SHORT)[0].finish_reason == "length"
    stats = llm.stats()
    held = (stats.waiting_requests, stats.running_requests, stats.loading_requests)
    assert (*held, stats.saving_requests) == (0, 0, 0, 0)
    assert stats.free_blocks == stats.max_blocks
    if records := getattr(llm._engine._connector, "_records", None):
        assert records == {}
    assert not len(llm._engine._live)


def submitted_in_one_batch(llm, prompts, broken, params):
    """Handles of `prompts`, which the engine takes in at once; the one of `broken` has `params`."""
    gate, reached = hold_forwards(llm)
    first = llm.submit([1, 2, 3], SHORT)
    assert reached.wait(60)
    handles = [
        llm.submit(prompt, SHORT, kv_transfer_params=params if index == broken else None)
        for index, prompt in enumerate(prompts)
    ]
    gate.set()
    first.result(60)
    return handles


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"raise_in": "on_new_request"}, Planted, "on_new_request of"),
        ({"raise_in": "get_num_new_matched_tokens"}, Planted, "get_num_new_matched_tokens of"),
        ({"raise_in": "update_state_after_alloc"}, Planted, "update_state_after_alloc of"),
        ({"raise_in": "request_finished"}, Planted, "request_finished of"),
        ({"raise_in": "get_kv_transfer_params"}, Planted, "get_kv_transfer_params of"),
        ({"match": "seven"}, ConnectorContractError, "Picky.get_num_new_matched_tokens"),
        ({"match": -1}, ConnectorContractError, "tokens cannot be negative"),
        ({"keep": None}, ConnectorContractError, "Picky.request_finished answered None"),
    ],
)
def test_a_connector_that_raises_for_one_request(
    open_llm, llama, prompts, picky, params, error, message
):
    expected = [one.output_token_ids for one in open_llm(llama).generate(prompts, SHORT)]
    llm = open_llm(llama, connector=picky)
    handles = submitted_in_one_batch(llm, prompts, 3, params)
    for index, (handle, tokens) in enumerate(zip(handles, expected, strict=True)):
        if index == 3:
            with pytest.raises(error, match=message):
                handle.result(60)
            with pytest.raises(error):
                list(handle.stream())
        else:
            assert handle.result(60).output_token_ids == tokens
    check_unharmed(llm)


def test_a_connector_that_raises_for_the_only_request(open_llm, llama, picky):
    llm = open_llm(llama, connector=picky)
    for method in ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc"):
        handle = llm.submit([1] * 40, SHORT, kv_transfer_params={"raise_in": method})
        with pytest.raises(Planted, match=method):
            handle.result(60)
        check_unharmed(llm)


def test_a_connector_that_raises_for_an_aborted_request(open_llm, llama, picky):
    llm = open_llm(llama, connector=picky)
    handle = llm.submit([1], LONG, kv_transfer_params={"raise_in": "request_aborted"})
    next(handle.stream())
    handle.abort()
    with pytest.raises(Planted, match="request_aborted"):
        handle.result(60)
    check_unharmed(llm)


def test_a_connector_that_raises_for_a_preempted_request(open_llm, llama, picky):
    llm = open_llm(llama, connector=picky, max_tokens=96, scheduling="max_utilization")
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    raising = {"raise_in": "request_reset"}
    gate, reached = hold_forwards(llm)
    first = llm.submit([5], SHORT)
    assert reached.wait(60)
    handles = [llm.submit([at] * 33, params, kv_transfer_params=raising) for at in (1, 2)]
    gate.set()
    first.result(60)
    with pytest.raises(Planted, match="request_reset"):
        handles[1].result(60)
    assert handles[0].result(60).finish_reason == "length"
    check_unharmed(llm)


def test_a_connector_that_raises_for_a_rewound_request(open_llm, llama, picky, monkeypatch):
    llm = open_llm(llama, connector=picky, speculative="ngram")
    # What repeats is drafted, and a random model hardly goes on with it.
    handle = llm.submit([7, 8] * 30, LONG, kv_transfer_params={"raise_in": "on_rewind"})
    with pytest.raises(Planted, match="on_rewind"):
        handle.result(60)
    check_unharmed(llm)


def test_what_ends_the_engine_while_it_takes_requests_in_reaches_them_all(open_llm, llama, picky):
    llm = open_llm(llama, connector=picky)
    gate, reached = hold_forwards(llm)
    llm.submit([1, 2, 3], LONG)
    assert reached.wait(60)
    handles = [
        llm.submit([at], SHORT, kv_transfer_params={"raise_in": "arrival"} if at == 3 else None)
        for at in range(8)
    ]
    gate.set()
    for handle in handles:
        with pytest.raises(SystemExit):
            handle.result(60)
    llm.close()


def fails(monkeypatch, what, wanted):
    """Lets the function `what` raise where its arguments are `wanted`."""
    module, _, name = what.rpartition(".")
    owner = pkgutil.resolve_name(module)
    plain = getattr(owner, name)

    def planted(*args):
        if wanted(*args):
            raise Planted
        return plain(*args)

    monkeypatch.setattr(owner, name, planted)


@pytest.mark.parametrize(
    ("params", "bad", "what", "wanted"),
    [
        (
            *(SHORT, {"stop_token_ids": (1000,)}, "kvconnect.engine.request.stops.StopChecker.add"),
            lambda checker, _: 1000 in checker._stop_tokens,
        ),
        (
            *(DRAWN, {"stop_token_ids": (1000,)}, "kvconnect.engine.request.stops.StopChecker.add"),
            lambda checker, _: 1000 in checker._stop_tokens,
        ),
        (
            *(DRAWN, {"seed": 4}, "kvconnect.engine.sampling.sampler._draw"),
            lambda scores, params, generator: params.seed == 4,
        ),
        (SHORT, {"logprobs": 1}, "kvconnect.engine.request.logprobs._top", lambda *_: True),
    ],
)
def test_a_step_that_fails_for_one_request(
    open_llm, llama, prompts, monkeypatch, params, bad, what, wanted
):
    llm = open_llm(llama)
    expected = [one.output_token_ids for one in llm.generate(prompts, params)]
    fails(monkeypatch, what, wanted)
    broken = params.model_copy(update=bad)
    handles = [llm.submit(one, broken if at == 2 else params) for at, one in enumerate(prompts)]
    with pytest.raises(Planted):
        handles.pop(2).result(60)
    outputs = [handle.result(60).output_token_ids for handle in handles]
    assert outputs == expected[:2] + expected[3:]
    check_unharmed(llm)


def test_a_first_completion_that_fails_leaves_the_others(open_llm, llama, prompts, monkeypatch):
    llm = open_llm(llama)
    several = DRAWN.model_copy(update={"n": 3})
    expected = llm.generate(prompts[0], several)[0].outputs[1:]
    fails(
        monkeypatch,
        "kvconnect.engine.sampling.sampler._draw",
        lambda scores, params, generator: params.seed == several.seed,
    )
    handle = llm.submit(prompts[0], several)
    with pytest.raises(Planted):
        handle.result(60)
    others = [live.result(60).output_token_ids for live in handle._lives[1:]]
    assert others == [one.token_ids for one in expected]
    check_unharmed(llm)


def test_an_output_that_cannot_be_made(open_llm, llama, monkeypatch):
    llm = open_llm(llama)
    with monkeypatch.context() as patch:
        patch.setattr(
            "kvconnect.engine.request.live_request.LiveRequest._make_output",
            lambda *_: (_ for _ in ()).throw(Planted("no output")),
        )
        with pytest.raises(Planted, match="no output"):
            llm.submit([1], SHORT).result(60)
    check_unharmed(llm)


@pytest.mark.parametrize("method", ["start_load_kv", "shutdown"])
def test_a_connector_that_is_stuck_keeps_no_result_waiting(
    open_llm, llama, picky, monkeypatch, method
):
    monkeypatch.setattr("kvconnect.engine.llm._CLOSE_S", 0.3)
    monkeypatch.setattr(Stuck, "stuck_in", method)
    monkeypatch.setattr(Stuck, "entered", threading.Event())
    monkeypatch.setattr(Stuck, "go_on", threading.Event())
    llm = open_llm(llama, connector=picky)
    handles = [llm.submit([at], LONG) for at in range(3)]
    assert method == "shutdown" or Stuck.entered.wait(60)
    closer = threading.Thread(target=llm.close)
    closer.start()
    closer.join(60)  # save_timeout_s is 0.2
    assert not closer.is_alive()
    for handle in handles:
        assert handle.done
        if method == "start_load_kv":
            with pytest.raises(EngineClosed, match="its connector is stuck"):
                handle.result(0)
    with pytest.raises(EngineClosed):
        llm.submit([1])
    Stuck.go_on.set()
    llm._thread._thread.join(60)
    assert not llm._thread._thread.is_alive()
