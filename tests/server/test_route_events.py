"""A router that follows events: a prompt finds its server, also after restarts."""

from __future__ import annotations

import itertools
import random

import msgspec
import numpy as np
import pytest
import torch
from server_fleet import started
from server_process import running, wait_until

from kvconnect.cache.block_manager import BlockManager
from kvconnect.config import KvCacheConfig
from kvconnect.events.format import AllBlocksCleared, Batch
from kvconnect.events.held import HeldBlocks
from kvconnect.events.subscriber import Followed
from kvconnect.events.translation import Translation
from kvconnect.keys import KeyChain, Namespace, root_key
from kvconnect.layout import KvCacheLayout
from kvconnect.server.route.fleet import Fleet
from kvconnect.server.route.followed_events import _reached
from kvconnect.server.route.prompt import Prompt
from kvconnect.server.route.settings import RouteSettings
from kvconnect.tokens import TokenBuffer

T = 16
LAYOUT = KvCacheLayout(1, 1, 4, 4, T, torch.float32)
ROOT = root_key(b"m", [LAYOUT], Namespace())


class InProcessServer:
    """A block manager whose events the router's instance gets, over the wire format."""

    def __init__(self, instance, blocks):
        self.instance, self.blocks = instance, blocks
        self.followed = Followed(HeldBlocks(10_000))
        instance.held = self.followed.held
        self.requests = 0
        self.time = 0
        self.start()

    def start(self):
        """Starts with an empty cache, and a publisher whose numbers begin again."""
        config = KvCacheConfig(tokens_per_block=T, event_buffer_max_size=10_000)
        self.cache = BlockManager(config, LAYOUT, num_blocks=self.blocks)
        self.translation = Translation([LAYOUT])
        self.number = 0
        self.publish([AllBlocksCleared()])

    def publish(self, events):
        self.time += 1
        payload = msgspec.msgpack.encode(Batch(self.time, events, 0))
        assert self.followed.take(self.number, payload)
        self.number += 1

    def holds(self, tokens):
        return self.cache.match(tokens)

    def answer(self, tokens):
        self.requests += 1
        chain = KeyChain(ROOT, T, TokenBuffer(np.array(tokens, np.int32)))
        self.cache.add_sequence(self.requests, tokens, keys=chain)
        self.cache.commit(self.requests, len(tokens))
        self.cache.release(self.requests)
        events = [one for event in self.cache.take_events() for one in self.translation.of(event)]
        if events:
            self.publish(events)


@pytest.mark.parametrize("requests", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_prompts_find_their_server_though_servers_restart_and_evict(requests):
    rng = random.Random(7)
    urls = tuple(f"http://d{number}" for number in range(4))
    fleet = Fleet(RouteSettings(prefill=urls, decode=("http://d",)))
    servers = {one: InProcessServer(one, 400) for one in fleet.prefill}
    sessions = [[rng.randrange(1000) for _ in range(160)] for _ in range(60)]
    known = found = 0
    for number in range(requests):
        if number % 100 == 99:
            servers[rng.choice(fleet.prefill)].start()
        tokens = rng.choice(sessions) + [rng.randrange(1000) for _ in range(rng.randrange(40))]
        if rng.random() < 0.3:  # by another router
            servers[rng.choice(fleet.prefill)].answer(tokens)
            continue
        best = max(one.holds(tokens) for one in servers.values()) // T
        prompt = Prompt.of("/v1/completions", {"prompt": tokens})
        chosen = servers[fleet.choose("prefill", prompt, ()).instance]
        if best:
            known += 1
            # A piece is 64 tokens: less than that does not decide.
            found += chosen.holds(tokens) // T > best - 64 // T
        chosen.answer(tokens)
    assert known > requests // 3
    assert found >= 0.99 * known


def test_a_salted_prompt_is_not_taken_for_another():
    fleet = Fleet(RouteSettings(prefill=("http://a", "http://b"), decode=("http://d",)))
    server = InProcessServer(fleet.prefill[1], 400)
    tokens = list(range(200))
    server.answer(tokens)
    body = {"prompt": tokens}
    for salt, pieces in ((None, 3), ("secret", 0)):
        prompt = Prompt.of("/v1/completions", body | {"cache_salt": salt})
        assert fleet.prefill[1].pieces_of(prompt) == pieces


def test_prompts_that_are_being_computed_count_until_they_are_done():
    fleet = Fleet(RouteSettings(prefill=("http://a", "http://b"), decode=("http://d",)))
    (one, _) = fleet.prefill
    one.held = HeldBlocks(10)
    prompt = Prompt.of("/v1/completions", {"prompt": list(range(200))})
    with one.loaded(1, prompt.prefixes):
        assert one.pieces_of(prompt) == 3
    assert one.pieces_of(prompt) == 0
    assert not one._coming


def test_publishers_are_reached_where_their_server_is():
    assert _reached("http://h:80", "tcp://0.0.0.0:7") == "tcp://h:7"
    assert _reached("http://[::1]:80", "tcp://[::]:7") == "tcp://[::1]:7"
    assert _reached("http://127.0.0.1:80", "tcp://127.0.0.1:7") == "tcp://127.0.0.1:7"
    assert _reached("http://h:80", "tcp://10.0.0.1:7") == "tcp://10.0.0.1:7"
    assert _reached("http://h:80", "tcp://127.0.0.1:7") is None


def hit_tokens(server):
    return server.figure("kvconnect_hit_tokens_total", tier="device")


def is_found_by(router, server, number):
    """Whether `router` sends a text to `server`, which had it already by another way."""
    body = {"model": "tiny", "prompt": f"{number:04}" * 128, "max_tokens": 1}
    for to in (server, router):
        before = hit_tokens(server)
        status, answer, _ = to.post(body)
        assert status == 200, answer
    return hit_tokens(server) - before > 400


def test_a_router_finds_what_servers_computed_without_it(model, tmp_path):
    """Only events say so. Without them, new texts go to one server after the other."""
    numbers = itertools.count()
    with (
        started(model, tmp_path, 0, 2, "--events", "tcp://127.0.0.1:0") as servers,
        running(None, tmp_path / "router", "--decode", *(one.url for one in servers.decode)) as one,
    ):
        for server in servers.decode:
            wait_until(
                lambda server=server: all(is_found_by(one, server, next(numbers)) for _ in "1234"),
                "the router knows",
            )
