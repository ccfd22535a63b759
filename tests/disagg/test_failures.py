"""Whatever goes wrong between two engines costs time: answers stay right, blocks come back."""

from __future__ import annotations

import itertools
import socket
import threading

import pytest
from engines import (
    ANSWER,
    PREFILL,
    T,
    address_of,
    hand_over,
    hands_out,
    is_claimed,
    leaks_nothing,
    nbytes_read,
    node_of,
    open_engine,
    prompt_of,
    result_of,
    until,
)

from kvconnect import (
    LLM,
    ConfigurationError,
    DecodeConnector,
    KvCacheConfig,
    KvCacheConnectorConfig,
    PrefillConnector,
)
from kvconnect.config import TransferConfig
from kvconnect.connector.disagg.fetch.fetcher import Fetcher
from kvconnect.connector.offload import OffloadScheduler
from kvconnect.connector.runtime.ledger import TransferLedger

PROMPT = prompt_of(100)
SMALL = KvCacheConfig(tokens_per_block=T, max_tokens=1024)


def submit_both(prefill, decode, prompt, transfer_id, computing=PREFILL):
    """The prompt at both, the reader first and its claim there."""
    here, there = hands_out(address_of(prefill), transfer_id)
    reading = decode.submit(prompt, ANSWER, kv_transfer_params=there)
    until(lambda: is_claimed(prefill))
    return prefill.submit(prompt, computing, kv_transfer_params=here), reading


@pytest.fixture(scope="module", params=["tcp", pytest.param("nixl", marks=pytest.mark.slow)])
def pair(request, llama):
    """A prefill and a decode for the tests that end neither; each has prompts of its own."""
    transfer = {"transport": request.param, "lease_s": 60.0}
    with (
        open_engine(llama, "prefill", max_num_tokens=48, transfer=transfer) as prefill,
        open_engine(llama, "decode", transfer=transfer) as decode,
    ):
        yield prefill, decode


def test_what_is_not_there_is_computed(open_one, answer_of, counted):
    prefill = open_one("prefill", transfer={"claim_timeout_s": 0.2, "lease_s": 0.5})
    decode = open_one("decode", transfer={"claim_timeout_s": 0.2})
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"127.0.0.1:{server.getsockname()[1]}"
    for seed, changed in enumerate(({"transfer_id": "of nothing"}, {"address": nobody})):
        prompt = prompt_of(100, seed)
        assert hand_over(prefill, decode, prompt, **changed) == (answer_of(prompt), 0)
    assert counted["transfer.fetched"] == 0
    leaks_nothing(prefill, decode)


def test_a_prefill_of_another_salt_or_prompt_is_not_waited_for(open_one, answer_of):
    """It has computed the transfer of that id: nothing else comes of it."""
    prefill, decode = open_one("prefill"), open_one("decode")  # they wait for 120 s
    asked = [*PROMPT[:-2], 7, 7]
    assert hand_over(prefill, decode, PROMPT, cache_salt="another") == (answer_of(PROMPT), 0)
    assert hand_over(prefill, decode, PROMPT, asked=asked) == (answer_of(asked), 0)


def test_a_piece_that_could_not_be_asked_for_does_not_count_as_read(
    pair, answer_of, counted, monkeypatch
):
    """Whatever is raised on the way: the fetch fails, and its prompt is computed."""
    start, calls, prompt = Fetcher._start, itertools.count(), prompt_of(100, 12)

    def failing(*args):
        if next(calls) == 0:
            raise ValueError("planted")
        return start(*args)

    monkeypatch.setattr(Fetcher, "_start", failing)
    assert hand_over(*pair, prompt) == (answer_of(prompt), 0)
    assert (counted["transfer.fetch.error"], counted["transfer.fetched"]) == (1, 0)
    leaks_nothing(*pair)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"do": "nothing"}, "'do'.*neither 'prefill' nor 'decode'"),
        ({"address": "127.0.0.1:1"}, "'transfer_id' is missing"),
        ({"transfer_id": "x", "do": "decode"}, "'address' is missing"),
        ({"transfer_id": "", "address": "127.0.0.1:1"}, "'transfer_id'.*1 to 200"),
        ({"transfer_id": "x", "address": "127.0.0.1"}, "'address'.*host:port"),
        ({"transfer_id": "x", "address": 5}, "'address'.*host:port"),
        ({"transfer_id": "x", "address": "127.0.0.1:0"}, "'address'.*port 0"),
        ({"transfer_id": "x", "address": "127.0.0.1:1", "tokens": "9"}, "'tokens'.*integer"),
        ({"do": "prefill"}, "TransferConfig.role='decode'"),
    ],
)
def test_wrong_parameters_end_their_request_alone(params, named, open_decode, answer_of):
    with pytest.raises(ConfigurationError, match=named):
        open_decode.generate([PROMPT], ANSWER, kv_transfer_params=params)
    (output,) = open_decode.generate([PROMPT], ANSWER, kv_transfer_params={"of": "others"})
    assert list(output.output_token_ids) == answer_of(PROMPT)


@pytest.fixture(scope="module")
def open_decode(llama):
    with open_engine(llama, "decode") as llm:
        yield llm


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"role": "prefil"}, "role='prefil'"),
        ({"listen": "0.0.0.0:0"}, "needs a secret"),
        ({"listen": "everywhere"}, "listen='everywhere'.*host:port"),
        ({"secret": "short"}, "at least 16 characters"),
        ({"lease": 3}, "unknown field 'lease'; did you mean 'lease_s'"),
    ],
)
def test_wrong_settings_name_the_field(fields, named):
    with pytest.raises(ConfigurationError, match=named) as caught:
        KvCacheConnectorConfig(transfer=fields)
    assert "short" not in str(caught.value)


def test_a_secret_is_never_shown():
    config = KvCacheConnectorConfig(transfer={"secret": "of at least 16 characters"})
    assert "of at least" not in repr(config)
    with pytest.raises(ConfigurationError) as caught:
        TransferConfig(secret=1234567890123456789)
    assert "12345" not in str(caught.value)


def test_a_port_that_is_taken_is_an_error_at_start(llama, transport):
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as server:
        listen = {"listen": f"127.0.0.1:{server.getsockname()[1]}", "transport": transport}
        with pytest.raises(ConfigurationError, match="is taken"):
            open_engine(llama, "both", transfer=listen)
    until(lambda: before >= set(threading.enumerate()))


def test_one_prefill_by_two_names_is_read_by_both(open_one, answer_of, counted):
    """They are two connections, neither of which takes the other's place."""
    prefill, decode = open_one("prefill"), open_one("decode")
    address = address_of(prefill)
    for number in range(6):
        prompt = prompt_of(90, number)
        name = address if number % 2 else address.replace("127.0.0.1", "localhost")
        assert hand_over(prefill, decode, prompt, address=name) == (answer_of(prompt), 89)
    links = node_of(decode).peers._links
    assert [link.attempts for link in links.values()] == [1, 1]
    assert len(node_of(prefill)._listener.channels()) == 2
    # The one that ends takes nothing from the other.
    first, second = links.values()
    first.peer.close()
    until(lambda: first.handle is None)
    for number in range(6, 8):
        prompt = prompt_of(90, number)
        assert hand_over(prefill, decode, prompt, address=second.address)[1] == 89


@pytest.mark.planted("other-model-at-peer", "transfer", "refused")
def test_other_weights_are_refused(model_of, llama, open_one, answer_of, counted, tmp_path):
    from kvconnect.engine.checkpoint.random_model import make_model

    other = make_model(tmp_path / "other", "llama", num_layers=3, seed=5)
    prefill = open_one("prefill", other, transfer={"lease_s": 0.5})
    decode = open_one("decode")
    assert hand_over(prefill, decode, PROMPT)[0] == answer_of(PROMPT)
    assert counted["transfer.fetched"] == 0
    leaks_nothing(prefill, decode)


def test_what_its_reader_let_go_of_before_it_was_computed_is_not_kept(pair):
    prefill, decode = pair
    prompt = prompt_of(100, 13)
    here, there = hands_out(address_of(prefill), "let go")
    reading = decode.submit(prompt, ANSWER, kv_transfer_params=there)
    until(lambda: is_claimed(prefill))
    reading.abort()
    until(lambda: not is_claimed(prefill))
    prefill.submit(prompt, PREFILL, kv_transfer_params=here).result(60)
    leaks_nothing(prefill, decode)


@pytest.mark.parametrize("what", ["refused", "raised"])
def test_a_prompt_whose_blocks_are_not_kept_is_handed_out_no_more(
    what, open_one, answer_of, monkeypatch
):
    """The runtime asks for no save, as where too many are late; or the store's part raises."""

    def raises(_, plan, __):
        if "do" in plan.request.kv_transfer_params:
            raise ValueError("planted")
        return False

    prefill, decode = open_one("prefill"), open_one("decode", transfer={"claim_timeout_s": 0.5})
    here, there = hands_out(address_of(prefill), "not kept")
    with monkeypatch.context() as patch:
        if what == "refused":
            patch.setattr(TransferLedger, "may_save", lambda *_: False)
        else:
            patch.setattr(OffloadScheduler, "_saves_rest", raises)
        reading = decode.submit(PROMPT, ANSWER, kv_transfer_params=there)
        until(lambda: is_claimed(prefill))
        handle = prefill.submit(PROMPT, PREFILL, kv_transfer_params=here)
        if what == "refused":
            assert "address" not in handle.result(60).kv_transfer_params
        else:
            with pytest.raises(ValueError, match="planted"):
                handle.result(60)
        assert result_of(reading)[0] == answer_of(PROMPT)
    prefill.generate([prompt_of(20)], PREFILL)
    connector = prefill._engine._connector
    until(lambda: not connector._scheduler._published._prompts)
    assert not connector._worker._publisher._shared
    assert not connector._scheduler._published._results
    until(lambda: not len(node_of(prefill).offers.server.table))
    leaks_nothing(prefill, decode)


@pytest.mark.planted("stale-lease", "transfer", "refused")
def test_a_reader_that_comes_too_late_computes(open_one, answer_of):
    prefill = open_one("prefill", transfer={"lease_s": 0.2, "claim_timeout_s": 0.2})
    decode = open_one("decode")
    (first,) = prefill.generate([PROMPT], PREFILL, kv_transfer_params={"do": "prefill"})
    leaks_nothing(prefill)
    (output,) = decode.generate([PROMPT], ANSWER, kv_transfer_params=first.kv_transfer_params)
    assert list(output.output_token_ids) == answer_of(PROMPT)
    assert output.reused_store_tokens == 0
    leaks_nothing(decode)


def test_the_reader_aborts_while_it_reads(pair, stop_at):
    prefill, decode = pair
    gate = stop_at(5)
    computing, reading = submit_both(prefill, decode, prompt_of(100, 14), "aborted")
    assert gate.reached.wait(60)
    until(lambda: node_of(decode).fetcher._fetches)
    reading.abort()
    leaks_nothing(decode)
    gate.open()
    computing.result(60)
    leaks_nothing(prefill)


@pytest.mark.parametrize("layer_calls", [5, 9])
def test_the_prefill_is_aborted_while_it_is_read(layer_calls, pair, answer_of, stop_at):
    """In the middle, and when all of it was read: its blocks go with it."""
    prefill, decode = pair
    gate, prompt = stop_at(layer_calls), prompt_of(100, 15 + layer_calls)
    aborted = PREFILL.model_copy(update={"max_tokens": 8})
    computing, reading = submit_both(prefill, decode, prompt, f"aborted {layer_calls}", aborted)
    assert gate.reached.wait(60)
    until(lambda: node_of(decode).fetcher._fetches)
    if layer_calls == 9:
        layout = decode.layout
        blocks = -(-len(prompt) // layout.tokens_per_block)
        until(lambda: nbytes_read(decode) == blocks * layout.block_nbytes)
    computing.abort()
    gate.open()
    assert result_of(reading) == (answer_of(prompt), 0)
    leaks_nothing(prefill, decode)


def test_either_side_closes_while_the_reader_reads(open_one, answer_of, stop_at):
    prefill, decode = open_one("prefill", max_num_tokens=48), open_one("decode")
    gate = stop_at(5)
    computing, _ = submit_both(prefill, decode, prompt_of(100, 1), "closed")
    assert gate.reached.wait(60)
    decode.close()
    gate.open()
    computing.result(60)
    leaks_nothing(prefill)

    decode, gate = open_one("decode"), stop_at(5)
    _, reading = submit_both(prefill, decode, PROMPT, "closes")
    assert gate.reached.wait(60)
    closing = threading.Thread(target=prefill.close)
    closing.start()
    gate.open()
    assert result_of(reading)[0] == answer_of(PROMPT)
    closing.join()
    leaks_nothing(decode)


def test_a_prefill_that_does_not_go_on_is_not_waited_for(pair, llama, answer_of, stop_at):
    prefill, gate, prompt = pair[0], stop_at(5), prompt_of(100, 16)
    transfer = {"transport": node_of(prefill).config.transport, "claim_timeout_s": 0.5}
    with open_engine(llama, "decode", transfer=transfer) as decode:
        _, reading = submit_both(prefill, decode, prompt, "stuck")
        assert gate.reached.wait(60)
        assert result_of(reading)[0] == answer_of(prompt)
        gate.open()
        leaks_nothing(prefill, decode)


@pytest.mark.planted("request-reset", "transfer", "equal")
@pytest.mark.planted("request-new-again", "transfer", "equal")
def test_the_prefill_is_preempted(open_one, answer_of, stop_at):
    # The first runs long enough to need the blocks of the second, which is being handed out.
    prefill = open_one(
        "prefill",
        max_tokens=256,
        max_num_tokens=48,
        scheduling="max_utilization",
        transfer={"lease_s": 1.0},
    )
    decode = open_one("decode")
    long = ANSWER.model_copy(update={"max_tokens": 150})
    first = prefill.submit(prompt_of(90, seed=5), long)
    here, there = hands_out(address_of(prefill), "preempted")
    second = prefill.submit(PROMPT, long, kv_transfer_params=here)
    reading = decode.submit(PROMPT, ANSWER, kv_transfer_params=there)
    assert first.result(60).output_token_ids
    assert second.result(60).preemptions
    assert result_of(reading)[0] == answer_of(PROMPT)
    leaks_nothing(prefill, decode)


def test_the_reader_has_little_room(open_one, answer_of):
    prefill = open_one("prefill")
    decode = open_one("decode", max_tokens=160, scheduling="max_utilization")
    handles = []
    for seed in range(6):
        prompt = prompt_of(90, seed)
        here, there = hands_out(address_of(prefill), f"tight {seed}")
        prefill.submit(prompt, PREFILL, kv_transfer_params=here)
        handles.append((prompt, decode.submit(prompt, ANSWER, kv_transfer_params=there)))
    for prompt, handle in handles:
        assert result_of(handle)[0] == answer_of(prompt)
    leaks_nothing(prefill, decode)


def test_the_pairs_by_role(llama, answer_of):
    with (
        LLM(llama, connector=PrefillConnector(), kv_cache=SMALL, dtype="float64") as prefill,
        LLM(llama, connector=DecodeConnector(), kv_cache=SMALL, dtype="float64") as decode,
    ):
        assert hand_over(prefill, decode, PROMPT) == (answer_of(PROMPT), 99)
    assert PrefillConnector(transfer={"lease_s": 3}).transfer.role == "prefill"
    with pytest.raises(ConfigurationError, match="must be 'decode' or 'both'"):
        DecodeConnector(transfer={"role": "prefill"})
