"""What goes wrong for one request ends that request: not the others, and not the engine."""

from __future__ import annotations

import threading

import pytest
from forwards import hold_forwards

from kvconnect import KvCacheConnectorConfig, SamplingParams
from kvconnect.connector.scheduler import KvCacheConnectorScheduler
from kvconnect.connector.worker import KvCacheConnectorWorker
from kvconnect.engine.sampling import sampler
from kvconnect.errors import ConnectorContractError, EngineClosed

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=4, ignore_eos=True, temperature=1.0, seed=3)


class Planted(RuntimeError):
    pass


class Picky(KvCacheConnectorScheduler):
    """Raises in the method that a request's ``kv_transfer_params`` name."""

    def _at(self, method, request, error=Planted):
        if (request.kv_transfer_params or {}).get("raise_in") == method:
            raise error(f"{method} of {request.request_id}")

    def build_connector_meta(self, scheduler_output):
        return None

    def on_new_request(self, request):
        self._at("on_new_request", request)
        self._at("arrival", request, SystemExit)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self._at("get_num_new_matched_tokens", request)
        wrong = (request.kv_transfer_params or {}).get("match", 0)
        return wrong, False

    def update_state_after_alloc(self, request, block_ids):
        self._at("update_state_after_alloc", request)

    def request_finished(self, request, cache_block_ids):
        self._at("request_finished", request)
        return (request.kv_transfer_params or {}).get("keep", False)

    def request_aborted(self, request):
        self._at("request_aborted", request)

    def request_reset(self, request):
        self._at("request_reset", request)

    def on_rewind(self, request, block_ids):
        self._at("on_rewind", request)

    def get_kv_transfer_params(self, request):
        self._at("get_kv_transfer_params", request)


class Idle(KvCacheConnectorWorker):
    """Moves nothing. Stuck where a test says so."""

    stuck_in = ""
    entered = threading.Event()
    go_on = threading.Event()

    def _maybe_stuck(self, method):
        if self.stuck_in == method:
            self.entered.set()
            self.go_on.wait(60)

    def register_kv_caches(self, kv_cache_tensor): ...

    def start_load_kv(self, stream):
        self._maybe_stuck("start_load_kv")

    def wait_for_layer_load(self, layer_idx, stream): ...

    def save_kv_layer(self, layer_idx, stream): ...

    def wait_for_save(self, stream): ...

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        return finished_gen_req_ids, started_loading_req_ids

    def shutdown(self):
        self._maybe_stuck("shutdown")


@pytest.fixture
def picky():
    return KvCacheConnectorConfig(
        connector_module=__name__,
        connector_scheduler_class="Picky",
        connector_worker_class="Idle",
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


@pytest.mark.parametrize("params", [SHORT, DRAWN])
def test_a_step_that_fails_for_one_request(open_llm, llama, prompts, params, monkeypatch):
    llm = open_llm(llama)
    expected = [one.output_token_ids for one in llm.generate(prompts, params)]
    make = llm._make
    bad = prompts[2]

    def planted(*_):
        raise Planted("no such token")

    def make_one(prompt, *rest):
        (live,) = make(prompt, *rest)
        if prompt is bad:
            live._stops.add = planted
        return [live]

    monkeypatch.setattr(llm, "_make", make_one)
    handles = [llm.submit(prompt, params) for prompt in prompts]
    with pytest.raises(Planted):
        handles.pop(2).result(60)
    outputs = [handle.result(60).output_token_ids for handle in handles]
    assert outputs == expected[:2] + expected[3:]
    check_unharmed(llm)


def test_a_draw_that_fails_for_one_request(open_llm, llama, prompts, monkeypatch):
    llm = open_llm(llama)
    expected = [one.output_token_ids for one in llm.generate(prompts, DRAWN)]
    draw = sampler._draw

    def fails_for_one(scores, params, generator):
        if params.seed == 4:
            raise Planted("no token can be drawn")
        return draw(scores, params, generator)

    monkeypatch.setattr(sampler, "_draw", fails_for_one)
    bad = DRAWN.model_copy(update={"seed": 4})
    handles = [llm.submit(one, bad if at == 2 else DRAWN) for at, one in enumerate(prompts)]
    with pytest.raises(Planted):
        handles.pop(2).result(60)
    outputs = [handle.result(60).output_token_ids for handle in handles]
    assert outputs == expected[:2] + expected[3:]
    check_unharmed(llm)


def test_a_first_completion_that_fails_leaves_the_others(open_llm, llama, prompts, monkeypatch):
    llm = open_llm(llama)
    several = DRAWN.model_copy(update={"n": 3})
    expected = llm.generate(prompts[0], several)[0].outputs[1:]
    draw = sampler._draw

    def fails_for_the_first(scores, params, generator):
        if params.seed == several.seed:
            raise Planted("no token can be drawn")
        return draw(scores, params, generator)

    monkeypatch.setattr(sampler, "_draw", fails_for_the_first)
    handle = llm.submit(prompts[0], several)
    with pytest.raises(Planted):
        handle.result(60)
    others = [live.result(60).output_token_ids for live in handle._lives[1:]]
    assert others == [one.token_ids for one in expected]
    check_unharmed(llm)


def test_log_probabilities_that_fail_for_one_request(open_llm, llama, prompts, monkeypatch):
    llm = open_llm(llama)
    expected = [one.output_token_ids for one in llm.generate(prompts, SHORT)]
    monkeypatch.setattr(
        "kvconnect.engine.request.logprobs._top",
        lambda *_: (_ for _ in ()).throw(Planted("no memory")),
    )
    bad = SHORT.model_copy(update={"logprobs": 1})
    handles = [llm.submit(one, bad if at == 2 else SHORT) for at, one in enumerate(prompts)]
    with pytest.raises(Planted):
        handles.pop(2).result(60)
    outputs = [handle.result(60).output_token_ids for handle in handles]
    assert outputs == expected[:2] + expected[3:]
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
    monkeypatch.setattr(Idle, "stuck_in", method)
    monkeypatch.setattr(Idle, "entered", threading.Event())
    monkeypatch.setattr(Idle, "go_on", threading.Event())
    llm = open_llm(llama, connector=picky)
    handles = [llm.submit([at], LONG) for at in range(3)]
    assert method == "shutdown" or Idle.entered.wait(60)
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
    Idle.go_on.set()
    llm._thread._thread.join(60)
    assert not llm._thread._thread.is_alive()
