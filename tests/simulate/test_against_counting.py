"""The simulator against a count by hand: every block by its tokens, in plain dictionaries."""

from __future__ import annotations

from random import Random

import pytest

from kvconnect.simulate.machine import Machine
from kvconnect.simulate.simulator import Simulator

T = 4

Path = tuple[int, ...]


class Lru:
    """Blocks named by all tokens up to their end; those without successors go, oldest use first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[Path, int] = {}
        self.evicted = 0
        self.now = 0

    def whole(self, tokens: Path, limit: int) -> int:
        """Leading blocks of the first `limit` tokens."""
        count = 0
        while (count + 1) * T <= limit and tokens[: (count + 1) * T] in self.used:
            count += 1
        return count

    def make_room(self, blocks: int, kept: set[Path]) -> None:
        while self.capacity - len(self.used) < blocks:
            parents = {path[: (len(path) - 1) // T * T] for path in self.used}
            free = [p for p in self.used if p not in kept and p not in parents]
            del self.used[min(free, key=lambda path: self.used[path])]
            self.evicted += 1


class Device(Lru):
    """One request at a time: match, allocate, publish."""

    def partial(self, tokens: Path, count: int, limit: int) -> tuple[Path | None, int]:
        """The block that shares most tokens with what follows `count` whole ones."""
        parent, wanted = tokens[: count * T], tokens[count * T : limit][:T]
        best: tuple[int, int, Path] | None = None
        for path, used in self.used.items():
            if len(path) > len(parent) and path[: (len(path) - 1) // T * T] == parent:
                block = path[len(parent) :]
                shared = 0
                while shared < min(len(block), len(wanted)) and block[shared] == wanted[shared]:
                    shared += 1
                if shared and (best is None or (shared, used) > best[:2]):
                    best = (shared, used, path)
        return (None, 0) if best is None else (best[2], best[0])

    def serve(self, tokens: Path, prompt: int, most: int | None) -> int:
        """Tokens found of a request whose last token is never computed if it was generated."""
        limit = prompt - 1 if most is None else min(prompt - 1, most)
        count = self.whole(tokens, limit)
        source, shared = self.partial(tokens, count, limit)
        in_prompt, in_all = -(-prompt // T), -(-len(tokens) // T)
        if self.capacity - in_prompt < 1:
            source, shared = None, 0
        held = {tokens[: (n + 1) * T] for n in range(count)}
        self.make_room(in_prompt - count, held | ({source} if source else set()))
        if source:
            self.now += 1
            self.used[source] = self.now
        self.make_room(in_all - count, held)
        valid = len(tokens) - (len(tokens) > prompt)
        self.now += 1
        for end in range(T, valid + 1, T):
            if tokens[:end] in held or tokens[:end] not in self.used:
                self.used[tokens[:end]] = self.now
        whole = valid // T * T
        tail = tokens[whole:valid]
        longer = any(
            path[:valid] == tokens[:valid] and whole < len(path) <= whole + T for path in self.used
        )
        if tail and not longer:
            self.used[tokens[:valid]] = self.now
        return count * T + shared

    def predict_match(self, tokens: Path, prompt: int) -> int:
        count = self.whole(tokens, prompt - 1)
        _, shared = self.partial(tokens, count, prompt - 1)
        return count * T + (shared if self.capacity - -(-prompt // T) >= 1 else 0)


class Store(Lru):
    """Full blocks, by key."""

    saved = 0

    def save(self, tokens: Path, valid: int) -> None:
        count = min(valid // T, self.capacity)
        found = self.whole(tokens, count * T)
        self.now += 1
        chain = [tokens[: (n + 1) * T] for n in range(count)]
        self.make_room(count - found, set(chain))
        self.used.update(dict.fromkeys(chain, self.now))
        self.saved += count - found


def trace(random: Random, num_requests: int, longest: int):
    """Prompts that are often the beginning of an earlier text, or go on from one."""
    texts: list[list[int]] = []
    for _ in range(num_requests):
        text = []
        if texts and random.random() < 0.8:
            text = random.choice(texts)
            text = text[: random.randint(1, len(text))]
        text = text + [random.randint(0, 2) for _ in range(random.randint(1, 14))]
        text = text[:longest]
        output = random.choice([0, 0, 1, 2, 5])
        output = min(output, longest - len(text))
        answer = [random.randint(0, 2) for _ in range(output)]
        texts.append(text + answer)
        yield text, answer


@pytest.mark.parametrize(
    ("device", "external"), [(8, 0), (8, 12), (9, 5), (13, 5), (13, 40), (30, 0), (30, 12)]
)
def test_every_count_is_that_of_the_dictionaries(request_of, device, external):
    random = Random(100 * device + external)
    machine = Machine(device_blocks=device, external_blocks=external, tokens_per_block=T)
    sim, naive, store = Simulator(machine), Device(device), Store(external)
    from_store = loaded = from_device = 0
    for prompt, answer in trace(random, 400, device * T):
        tokens, length = tuple(prompt + answer), len(prompt)
        most, end = None, 0
        if external:
            end = min(store.whole(tokens, length) * T, length - 1)
            on_device = naive.predict_match(tokens, length)
            if end > on_device:
                most = on_device // T * T
            else:
                end = 0
        matched = naive.serve(tokens, length, most)
        if end:
            from_store += end - matched
            loaded += -(-end // T) - matched // T
        from_device += matched
        if external:
            store.save(tokens, length)
            valid = len(tokens) - bool(answer)
            if valid // T > length // T:
                store.save(tokens, valid)
        sim.arrive(request_of(prompt, answer))
        sim.finish()
        found = sim.tally.total()
        assert found.device_tokens == from_device
        assert found.external_tokens == from_store
        assert found.evicted_blocks == naive.evicted
        assert (found.loaded_blocks, found.saved_blocks) == (loaded, store.saved)
        assert found.external_evicted_blocks == store.evicted
        assert found.saved_tokens + found.computed_tokens == found.prompt_tokens
    assert naive.evicted > 50  # it was about something
    assert from_device > 400


@pytest.mark.parametrize("seed", range(3))
def test_no_token_is_lost_under_load(request_of, seed):
    random = Random(seed)
    machine = Machine(
        device_blocks=8,
        external_blocks=15,
        tokens_per_block=T,
        prefill_tokens_per_s=10,
        decode_tokens_per_s=5,
        max_waiting=5,
    )
    sim = Simulator(machine)
    now, prompts, answers = 0.0, {}, {}
    for number, (prompt, answer) in enumerate(trace(random, 300, 60)):
        now += random.expovariate(1.0)
        before = sim.tally.total()
        sim.arrive(request_of(prompt, answer, at=now))
        after = sim.tally.total()
        if after.turned_away == before.turned_away and after.too_long == before.too_long:
            prompts[number], answers[number] = len(prompt), len(answer)
    sim.finish()
    total = sim.tally.total()
    assert total.requests + total.turned_away + total.too_long == 300
    assert min(total.turned_away, total.too_long, total.waited_s, total.external_tokens) > 0
    assert total.requests == len(prompts)
    assert total.prompt_tokens == sum(prompts.values())
    assert total.output_tokens == sum(answers.values())
    assert total.saved_tokens + total.computed_tokens == total.prompt_tokens
    assert total.most_waiting <= 5
    assert len(sim._waiting) == sim._num_running == 0
