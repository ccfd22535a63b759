"""`PromptCache`: ``generate()`` of plain transformers answers as without it, cold and restored."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
import torch
from prompts import T, answer, generate, given, opened, prompt
from torch import Tensor
from transformers import AutoModelForCausalLM, BartConfig, BartForCausalLM, PreTrainedModel

from kvconnect import LLM, KvCacheConfig
from kvconnect.backends.memory.store import MemoryBackend
from kvconnect.connector.io.lookup import Hit
from kvconnect.errors import ConfigurationError, UnsupportedModel, UsageError
from kvconnect.integrations.transformers import PromptCache, StoredCache
from kvconnect.integrations.transformers.ended_caches import EndedCaches
from kvconnect.integrations.transformers.rows import CachedRow
from kvconnect.keys import BlockKey, Namespace, chain_key, salt_of, salt_tag
from kvconnect.layout import KvCacheLayout
from kvconnect.request import LlmRequest
from kvconnect.testing.faults.faulty_backend import BACKEND_FAULTS, BackendFault, FaultyBackend
from kvconnect.tokens import TokenArray
from kvconnect.trace import metrics

# Full attention, windows in some layers, a latent.
KINDS = ["llama", "gemma3", "deepseek_v3"]
OTHERS = ["gpt2", "qwen2", "qwen3", "mistral", "mixtral", "phi", "gemma", "olmo", "gpt_neox", "opt"]
ALL = [*KINDS, *(pytest.param(arch, marks=pytest.mark.slow) for arch in OTHERS)]

LoadedModel = Callable[[str], PreTrainedModel]


@pytest.fixture(scope="module")
def loaded(model_of: Callable[[str], Path]) -> LoadedModel:
    """A small model in float64, not to be changed."""

    @cache
    def load(arch: str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(
            model_of(arch), dtype=torch.float64, experts_implementation="eager"
        )

    return load


@pytest.fixture(scope="module")
def llama64(loaded: LoadedModel) -> PreTrainedModel:
    return loaded("llama")


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A store that is empty, and keeps what it gets."""
    return f"disk://{tmp_path}/kv?capacity=64MiB"


def padded(*rows: Tensor) -> dict[str, Tensor]:
    """One batch, padded on the left."""
    width = max(row.shape[1] for row in rows)
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.int64)
    for number, row in enumerate(rows):
        ids[number, width - row.shape[1] :] = row
        mask[number, width - row.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture
def prompts(llama64: PreTrainedModel, store: str) -> Iterator[PromptCache]:
    """A cache of `llama64`."""
    with opened(llama64, store) as made:
        yield made


@pytest.fixture
def warm(llama64: PreTrainedModel, prompts: PromptCache) -> PromptCache:
    """`prompts`, with ``prompt(40)`` and its answer in the store."""
    answer(llama64, prompts, given(prompt(40)))
    assert prompts.flush()
    return prompts


# ---------------------------------------------------------------------- right answers


@pytest.mark.parametrize("arch", ALL)
def test_cold_and_restored_answers_are_those_of_transformers(loaded, arch, store):
    model, inputs = loaded(arch), given(prompt(75))
    expected = generate(model, inputs)
    with opened(model, store) as prompts:
        assert answer(model, prompts, inputs) == (expected, (0,))
    with opened(model, store) as prompts:
        assert answer(model, prompts, inputs) == (expected, (74,))
        going_on = given(torch.cat([torch.tensor(expected), prompt(9, seed=2)], dim=1))
        # The last token of the answer was never fed back: all others are there, the tail included.
        # Where all layers have a window, tails are found only behind a block that is there.
        wanted, count = generate(model, going_on), 80 if arch == "mistral" else 94
        assert answer(model, prompts, going_on) == (wanted, (count,))


@pytest.mark.parametrize(
    "arch", ["gemma3", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("llama", "opt"))]
)
def test_a_padded_batch_is_restored_as_far_as_all_of_it_is_there(loaded, arch, store):
    model = loaded(arch)
    rows = prompt(70), prompt(41, seed=2), prompt(3, seed=3)
    batch = padded(*rows)
    expected = generate(model, batch)
    with opened(model, store) as prompts:
        assert answer(model, prompts, batch) == (expected, (0, 0, 0))
        assert prompts.flush()
        assert answer(model, prompts, batch) == (expected, (69, 40, 2))
        # Each by itself, which no padding moves.
        for row in rows:
            one = given(row)
            assert answer(model, prompts, one) == (generate(model, one), (row.shape[1] - 1,))
        # With its answer, whose last token was never fed back: up to its own tail.
        for row, whole in zip(rows[1:], expected[1:], strict=True):
            one = given(torch.tensor([whole[-row.shape[1] - 20 :]]))
            assert answer(model, prompts, one) == (generate(model, one), (row.shape[1] + 19,))
        # One that is new holds the others back: transformers keeps one length for all.
        other = padded(rows[0], prompt(60, seed=9))
        assert answer(model, prompts, other) == (generate(model, other), (10, 0))


def test_windows_are_restored_where_a_prompt_goes_another_way(loaded, store):
    model, first = loaded("gemma3"), prompt(90)
    other = torch.cat([first[:, :50], prompt(30, seed=2)], dim=1)
    with opened(model, store) as prompts:
        answer(model, prompts, given(first))
        assert prompts.flush()
        tokens, loaded_tokens = answer(model, prompts, given(other))
    assert (tokens, loaded_tokens) == (generate(model, given(other)), (50,))


def test_all_that_tokens_look_back_at_is_restored_wherever_a_prompt_ends(loaded, store):
    """Of windows their first token, of a batch each row's own; to the last loaded token."""
    model, ids = loaded("gemma3"), torch.cat([prompt(96), prompt(96, seed=2)])
    computed = StoredCache(None, not_cached="to compare with")
    model(ids, past_key_values=computed, use_cache=True)
    windows = [
        model.config.sliding_window if kind == "sliding_attention" else None
        for kind in model.config.layer_types
    ]
    assert len(set(windows)) == 2
    with opened(model, store) as prompts:
        answer(model, prompts, given(ids))
        assert prompts.flush()
        for length in range(70, 70 + T):
            past = prompts.prefill(given(ids[:, :length]))
            end = length - 1
            assert past.loaded_tokens == (end, end)
            for window, found, wanted in zip(windows, past.layers, computed.layers, strict=True):
                seen = slice(0 if window is None else end - window + 1, end)
                for one, other in ((found.keys, wanted.keys), (found.values, wanted.values)):
                    assert torch.allclose(one[:, :, seen], other[:, :, seen], rtol=1e-9, atol=1e-12)


def test_tokens_of_which_a_window_was_not_loaded_are_not_taken_back(loaded, store):
    """What its first tokens look back at is missing; without windows, nothing is."""
    for arch, kept in (("gemma3", 89), ("llama", 0)):
        model, ids = loaded(arch), prompt(90)
        with opened(model, store) as prompts:
            answer(model, prompts, given(ids))
            assert prompts.flush()
            past = prompts.prefill(given(ids))
            assert past.loaded_tokens == (89,)
            if kept:
                with pytest.raises(UsageError, match="loaded tokens of a model with windows"):
                    past.crop(-39)
                assert past.get_seq_length() == 89
                past.crop(0)
                past.crop(-89)
            else:
                past.crop(-39)
            start = past.get_seq_length()
            found = model(ids[:, start:60], past_key_values=past, use_cache=True).logits[:, -1]
            assert torch.allclose(found, model(ids[:, :60]).logits[:, -1], rtol=1e-9)


@pytest.mark.parametrize("chunk", [7, pytest.param(32, marks=pytest.mark.slow)])
def test_a_prompt_that_is_computed_in_chunks(llama64, chunk, prompts):
    inputs = given(prompt(75))
    expected = generate(llama64, inputs)
    assert answer(llama64, prompts, inputs, prefill_chunk_size=chunk) == (expected, (0,))
    assert prompts.flush()
    longer = given(torch.cat([inputs["input_ids"], prompt(40, seed=3)], dim=1))
    tokens, reused = answer(llama64, prompts, longer, prefill_chunk_size=chunk)
    assert (tokens, reused) == (generate(llama64, longer), (75,))


@pytest.mark.parametrize("arch", ["gemma3", pytest.param("llama", marks=pytest.mark.slow)])
def test_assisted_decoding_is_right_cold_and_restored(loaded, arch, store):
    model = loaded(arch)
    # A prompt that repeats itself, so that candidates are found, taken and rejected.
    inputs = given(torch.cat([prompt(20)] * 4, dim=1))
    expected = generate(model, inputs, max_new_tokens=40)
    for count in (0, 79):
        with opened(model, store) as prompts:
            tokens, reused = answer(
                model, prompts, inputs, max_new_tokens=40, prompt_lookup_num_tokens=5
            )
            assert (tokens, reused) == (expected, (count,))
    with opened(model, store) as prompts:  # nothing was saved under the name of rejected tokens
        going_on = given(torch.tensor(expected))
        assert answer(model, prompts, going_on) == (generate(model, going_on), (119,))


def test_sampled_answers_are_those_of_the_same_seed(llama64, store):
    inputs = given(prompt(60))
    torch.manual_seed(3)
    expected = generate(llama64, inputs, do_sample=True)
    for _ in range(2):
        with opened(llama64, store) as prompts:
            past = prompts.prefill(inputs)
            torch.manual_seed(3)
            assert generate(llama64, inputs, past_key_values=past, do_sample=True) == expected
    assert past.loaded_tokens == (59,)


def test_a_cache_that_is_kept_goes_on_and_a_copy_of_it_is_a_plain_one(llama64, prompts):
    inputs = given(prompt(40))
    past = prompts.prefill(inputs)
    tokens = generate(llama64, inputs, past_key_values=past)
    plain = copy.deepcopy(past)
    longer = given(torch.cat([torch.tensor(tokens), prompt(20, seed=4)], dim=1))
    expected = generate(llama64, longer)
    assert generate(llama64, longer, past_key_values=past) == expected
    assert generate(llama64, longer, past_key_values=plain) == expected
    assert not isinstance(plain, StoredCache)
    assert prompts.flush()
    assert answer(llama64, prompts, longer) == (expected, (79,))


# ---------------------------------------------------------------------- what is refused


def test_guidance_is_that_of_transformers(llama64, prompts):
    inputs = given(prompt(40))
    expected = generate(llama64, inputs, guidance_scale=1.5)
    assert expected != generate(llama64, inputs)
    assert answer(llama64, prompts, inputs, guidance_scale=1.5) == (expected, (0,))
    assert prompts.flush()
    assert answer(llama64, prompts, inputs, guidance_scale=1.5) == (expected, (39,))


@pytest.mark.parametrize(
    ("more", "length"),
    [({"num_beams": 3}, 40), ({"num_return_sequences": 2, "do_sample": True}, 41)],
)
def test_several_sequences_of_one_prompt_are_refused(llama64, more, length, warm):
    """Of one that was restored, and of a new one."""
    with pytest.raises(UsageError, match="beam search"):
        answer(llama64, warm, given(prompt(length, seed=length - 39)), **more)


@pytest.mark.planted("cache-dtype", "prompt_cache", "refused")
@pytest.mark.parametrize("kind", ["static", "quantized", "offloaded"])
def test_caches_of_other_kinds_are_refused(llama64, kind, store):
    with opened(llama64, store) as prompts, pytest.raises(ValueError, match="past_key_values"):
        answer(llama64, prompts, given(prompt(20)), cache_implementation=kind)


def test_another_prompt_than_was_prefilled_is_refused_where_something_was_loaded(llama64, warm):
    inputs = given(prompt(40))
    changed = prompt(40)
    changed[0, -1] = 255
    with pytest.raises(UsageError, match="other tokens"):
        generate(llama64, given(changed), past_key_values=warm.prefill(inputs))
    # Nothing was loaded: the answer is right, and nothing of it is saved by a wrong name.
    fresh, other = given(prompt(40, seed=5)), given(prompt(40, seed=6))
    tokens = generate(llama64, other, past_key_values=warm.prefill(fresh))
    assert tokens == generate(llama64, other)
    assert warm.flush()
    assert warm.prefill(fresh).loaded_tokens == (0,)


def test_another_mask_or_other_positions_are_refused_where_something_was_loaded(llama64, warm):
    inputs = given(prompt(40))
    masked = inputs | {"attention_mask": inputs["attention_mask"].clone()}
    masked["attention_mask"][0, :3] = 0
    positions = torch.arange(40)[None]
    for wrong in (
        masked,
        masked | {"position_ids": positions},
        inputs | {"position_ids": positions + 1},
    ):
        with pytest.raises(UsageError, match="attention_mask or position_ids"):
            generate(llama64, wrong, past_key_values=warm.prefill(inputs))


@pytest.mark.parametrize(
    ("inputs", "complaint"),
    [
        ("a text", "what a tokenizer returns"),
        (None, "what a tokenizer returns"),
        ([[1, 2]], "what a tokenizer returns"),
        ({}, "input_ids=None"),
        ({"input_ids": [[1, 2]]}, "input_ids"),
        ({"input_ids": torch.ones(3, dtype=torch.int64)}, "input_ids"),
        ({"input_ids": torch.ones(1, 3)}, "token ids"),
        ({"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.ones(1, 2)}, "shape"),
        ({"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.zeros(1, 3)}, "row 0"),
        (
            {"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.tensor([[1, 1, 0]])},
            "pad on the left",
        ),
    ],
)
def test_inputs_of_another_form_are_refused(llama64, inputs, complaint, store):
    with opened(llama64, store) as prompts, pytest.raises(ConfigurationError) as caught:
        prompts.prefill(inputs)
    assert complaint in str(caught.value)


def test_what_cannot_be_told_apart_is_computed_and_not_saved(llama64, prompts):
    inputs, pad = given(prompt(40)), llama64.generation_config.pad_token_id
    unmasked = {"input_ids": torch.cat([torch.full((1, 4), pad), prompt(40)], dim=1)}
    past = prompts.prefill(unmasked)
    assert "no attention_mask" in past.not_cached
    expected = generate(llama64, unmasked, pad_token_id=pad)
    assert generate(llama64, unmasked, past_key_values=past, pad_token_id=pad) == expected
    assert prompts.flush()
    assert prompts.prefill(inputs).loaded_tokens == (0,)
    assert prompts.prefill(inputs | {"token_type_ids": torch.zeros(1, 40)}).not_cached == ""


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"uri": "disk:x"}, "did you mean 'url'"),
        ({}, "names no store"),
        ("tape:x", "tape"),
        ({"url": "memory:", "transfer": {}}, "transfer"),
        ({"url": "memory:", "staging_bytes": 100}, "staging_bytes"),
    ],
)
def test_wrong_settings_are_refused_at_the_start(llama64, settings, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        PromptCache(llama64, settings)


def test_models_that_nothing_tells_from_others_are_refused(llama64):
    with pytest.raises(ConfigurationError, match="is a str"):
        PromptCache("model", "memory:")
    adapted = copy.copy(llama64)
    adapted._hf_peft_config_loaded = True
    with pytest.raises(UnsupportedModel, match="adapter"):
        PromptCache(adapted, "memory:")


@pytest.mark.parametrize("encoder_layers", [1, 3])
def test_a_decoder_of_a_pair_needs_caches_for_its_own_layers(encoder_layers, store):
    sizes = {"vocab_size": 64, "d_model": 32, "max_position_embeddings": 64, "decoder_layers": 2}
    config = BartConfig(**sizes, encoder_layers=encoder_layers, is_encoder_decoder=False)
    model = BartForCausalLM(config).eval()
    with pytest.raises(
        UnsupportedModel, match=r"2 layers .* set model.config.num_hidden_layers = 2"
    ):
        PromptCache(model, store)
    model.config.num_hidden_layers = 2
    prompt = torch.arange(3, 43)[None]
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    with PromptCache(model, store) as prompts:
        model.generate(**inputs, past_key_values=prompts.prefill(inputs), max_new_tokens=2)
        prompts.flush()
        assert prompts.prefill(inputs).loaded_tokens == (39,)


# ---------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    "arch", [pytest.param(one, marks=pytest.mark.slow) for one in (*KINDS, *OTHERS)]
)
def test_blocks_are_those_of_the_engine(loaded, model_of, arch, store):
    with (
        opened(loaded(arch), store) as prompts,
        LLM(
            model_of(arch),
            kv_cache=KvCacheConfig(tokens_per_block=T, max_tokens=256),
            dtype="float64",
        ) as llm,
    ):
        alike = prompts._geometry.layouts == llm.layouts
    assert alike == (arch != "deepseek_v3")  # transformers keeps its two parts apart


def test_a_salt_stands_with_the_blocks(llama64):
    """What is pruned by it is told so."""

    async def namespaces() -> set[bytes]:
        return {entry.namespace async for entry in store.scan()}

    store, inputs = MemoryBackend(64 << 20), given(prompt(40))
    with opened(llama64, store) as prompts:
        for salt in ("a", "b"):
            past = prompts.prefill(inputs, cache_salt=salt)
            generate(llama64, inputs, past_key_values=past)
            del past
            assert prompts.flush()
        found = asyncio.run(namespaces())
        assert {salt_of(one) for one in found} == {salt_tag("a"), salt_tag("b")}


def test_metrics_of_the_process_carry_the_engine_s_name(llama64, store, monkeypatch):
    monkeypatch.setattr(metrics, "engine", "kvconnect")
    with opened(llama64, store):
        assert metrics.engine == "transformers"


@pytest.mark.parametrize("after", [0, 1])
def test_flush_in_the_middle_of_a_forward_pass(llama64, store, after):
    """What the first layers have computed already is not taken for computed."""
    inputs = given(prompt(75))
    expected = generate(llama64, inputs)
    computing, prefilled = threading.current_thread(), threading.Event()
    passes: list[bool] = []
    flushed: list[bool] = []

    def flush(*_: object) -> None:
        if not prefilled.is_set() or threading.current_thread() is not computing:
            return  # in a canary
        passes.append(prompts.flush())
        if len(passes) > after:
            other = threading.Thread(target=lambda: flushed.append(prompts.flush()))
            other.start()
            other.join()

    with opened(llama64, store) as prompts:
        handle = llama64.model.layers[1].register_forward_hook(flush)
        past = prompts.prefill(inputs)
        prefilled.set()
        try:
            assert generate(llama64, inputs, past_key_values=past) == expected
        finally:
            handle.remove()
        assert not any(passes)  # within a pass of its own thread it checks nothing
        assert flushed
        assert all(flushed)
    with opened(llama64, store) as prompts:
        assert answer(llama64, prompts, inputs) == (expected, (74,))


def test_flush_while_a_cache_that_has_ended_is_saved(llama64, store, monkeypatch):
    """Each of the two threads waits until the other has saved."""
    inputs = given(prompt(75))
    begun, append = threading.Event(), CachedRow.append
    other = threading.Thread(target=lambda: [one.save(whole=True) for one in kept])

    def append_beside(row: CachedRow, tokens: TokenArray) -> None:
        if threading.current_thread().name == "kvconnect-prompt-cache":
            other.start()
            begun.set()
            other.join(0.2)
            assert other.is_alive()
        append(row, tokens)

    with opened(llama64, store) as prompts:
        kept = [prompts.prefill(inputs)]
        generate(llama64, inputs, past_key_values=kept[0], max_new_tokens=4)
        monkeypatch.setattr(CachedRow, "append", append_beside)
        assert prompts.flush()
        assert begun.wait(60)
        other.join()
        kept.clear()
    with opened(llama64, store) as prompts:
        assert answer(llama64, prompts, inputs)[1] == (74,)


def test_flush_beside_a_prefill_of_another_thread(llama64, prompts):
    """Caches are not added while those that there are are gone through."""

    class Live(weakref.WeakSet):
        def __iter__(self):
            for one in super().__iter__():
                if not other.ident:
                    other.start()
                    other.join(0.2)
                    assert other.is_alive()
                yield one

    made: list[StoredCache] = []
    other = threading.Thread(target=lambda: made.append(prompts.prefill(given(prompt(20)))))
    live, prompts._live = prompts._live, Live()
    past = prompts.prefill(given(prompt(20)))
    assert prompts.flush()
    other.join(60)
    assert {past, *made} == set(weakref.WeakSet.__iter__(prompts._live))
    prompts._live = live


def test_what_is_computed_beyond_the_positions_that_keys_name_is_not_saved(model_of, store):
    directory = model_of("llama")
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, rope_parameters=rope, max_position_embeddings=64
    )
    with opened(model, store) as prompts:
        shorter = given(prompt(60))
        expected = generate(model, shorter)  # crosses the limit
        for count in (0, 59):
            assert answer(model, prompts, shorter) == (expected, (count,))
            assert prompts.flush()
        within = given(torch.tensor(expected)[:, :63])
        assert prompts.prefill(within).loaded_tokens == (62,)
        # Of a pass that crosses the limit nothing is saved, nor what it computed before it.
        crossing, past = prompt(70, seed=2), prompts.prefill(prompt(60, seed=2))
        for part in (crossing[:, :60], crossing[:, 60:]):
            model(part, past_key_values=past, use_cache=True)
        del past
        assert prompts.flush()
        assert prompts.prefill(crossing[:, :63]).loaded_tokens == (60,)


# ---------------------------------------------------------------------- stores that fail


QUICK = ("hang", "lie", "flip")
FAULTS = [
    pytest.param(fault, marks=() if fault in QUICK else pytest.mark.slow)
    for fault in BACKEND_FAULTS
    if fault != "none"
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("arch", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_store_that_fails_costs_time_and_nothing_else(loaded, arch, fault: BackendFault):
    model, inputs, store = loaded(arch), given(prompt(60)), FaultyBackend(MemoryBackend(64 << 20))
    expected = generate(model, inputs)
    limits = {"lookup_timeout_ms": 200, "load_timeout_s": 0.5, "save_timeout_s": 0.5}
    with opened(model, store, **limits) as prompts:
        assert answer(model, prompts, inputs)[0] == expected
        prompts.flush()
        store.set(fault)
        for _ in range(2):
            assert answer(model, prompts, inputs)[0] == expected
        store.heal()
    assert store.hits > 0


class Forgetful(MemoryBackend):
    """Has all that it was given, it says; of these `tokens` it loads none."""

    tokens: bytes | None = None

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        lost = {
            entry.key
            async for entry in self.scan()
            if entry.tokens is not None and entry.tokens.tobytes() == self.tokens
        }
        there = list(takewhile(lambda key: key not in lost, keys))
        return await super().load(there, into[: len(there)])


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_load_that_brings_a_part_counts_as_that_part(loaded, arch):
    """With windows as nothing: they were loaded for the end that was planned."""
    model, ids, store = loaded(arch), prompt(75), Forgetful(64 << 20)
    expected = generate(model, given(ids))
    with opened(model, store) as prompts:
        assert answer(model, prompts, given(ids))[0] == expected
        assert prompts.flush()
        for lost in range(4):
            store.tokens = ids[0, lost * T : (lost + 1) * T].to(torch.int32).numpy().tobytes()
            count = lost * T if arch == "llama" else 0
            assert answer(model, prompts, given(ids)) == (expected, (count,))
        store.tokens = None
        assert answer(model, prompts, given(ids)) == (expected, (74,))


def test_a_batch_with_windows_is_loaded_whole_or_not_at_all(loaded):
    """Where one row's load fails, what others got of their windows is for another end."""
    model, rows, store = loaded("gemma3"), (prompt(75), prompt(41, seed=2)), Forgetful(64 << 20)
    batch = padded(*rows)
    expected = generate(model, batch)
    with opened(model, store) as prompts:
        assert answer(model, prompts, batch) == (expected, (0, 0))
        assert prompts.flush()
        store.tokens = rows[1][0, :T].to(torch.int32).numpy().tobytes()
        assert answer(model, prompts, batch) == (expected, (0, 0))
        store.tokens = None
        assert answer(model, prompts, batch) == (expected, (74, 40))


def test_a_cache_that_was_reset_is_used_anew_and_not_saved(llama64, warm):
    past, other = warm.prefill(given(prompt(40))), given(prompt(40, seed=2))
    assert past.loaded_tokens == (39,)
    past.reset()
    assert generate(llama64, other, past_key_values=past) == generate(llama64, other)
    del past
    assert warm.flush()
    assert warm.prefill(other).loaded_tokens == (0,)


def test_a_prompt_that_ends_one_token_before_a_block_does(llama64, prompts):
    ids = prompt(5 * T)
    past = prompts.prefill(given(ids[:, :-1]))
    llama64(ids[:, :-1], past_key_values=past, use_cache=True)
    del past
    assert prompts.flush()
    tokens, count = answer(llama64, prompts, given(ids))
    assert (tokens, count) == (generate(llama64, given(ids)), (5 * T - 1,))


def test_staging_that_is_full_drops_what_is_behind_and_the_answer_is_right(llama64):
    inputs, store = given(prompt(200)), FaultyBackend(MemoryBackend(64 << 20), operations=("save",))
    layers, heads, dim = 3, 2, 16
    block = 2 * layers * heads * dim * T * 8 + 4096
    with opened(llama64, store, staging_bytes=4 * block, save_timeout_s=0.5) as prompts:
        store.set("hang")
        expected = generate(llama64, inputs)
        assert answer(llama64, prompts, inputs) == (expected, (0,))
        store.heal()


def canaries(prompts: PromptCache) -> list[int]:
    """Grows by one with each canary of `prompts`."""
    runs: list[int] = []
    canary = prompts.guard._canary
    agrees = canary.agrees

    def counted() -> bool:
        runs.append(0)
        return agrees()

    canary.agrees = counted
    return runs


def test_the_next_prompt_that_begins_alike_waits_for_the_one_before_it(llama64, prompts):
    for count in (0, 39, 39):
        assert answer(llama64, prompts, given(prompt(40)))[1] == (count,)


@pytest.mark.parametrize(("interval", "checks"), [(0.0, 4), (3600.0, 1)])
def test_a_good_check_holds_for_the_interval(llama64, store, interval, checks):
    """Also for what is loaded; what is saved waits for a check of its own."""
    with opened(llama64, store, canary_interval=interval) as prompts:
        runs = canaries(prompts)
        answer(llama64, prompts, given(prompt(40)))
        assert prompts.flush()
        for _ in range(2):
            assert prompts.prefill(given(prompt(40))).loaded_tokens == (39,)
        assert prompts.flush()  # nothing is left to save
        assert len(runs) == checks


def test_caches_that_ended_are_held_within_a_bound(llama64, store, caplog):
    with opened(llama64, store, held_bytes=1000) as prompts:
        answer(llama64, prompts, given(prompt(40)))
        gc.collect()
        assert prompts.flush()
        assert "held_bytes" in caplog.text
        assert answer(llama64, prompts, given(prompt(40)))[1] == (0,)


def test_checks_leave_random_numbers_and_other_caches_alone(llama64, prompts):
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    live = len(prompts._live)
    prompts.prefill(given(prompt(40)))
    assert prompts.flush()
    assert len(prompts._live) == live
    assert torch.equal(torch.random.get_rng_state(), before)


def test_nothing_is_left_of_prompts_that_ended(llama64, store):
    inputs = given(prompt(40))
    with opened(llama64, store) as prompts:
        for _ in range(20):
            answer(llama64, prompts, inputs, max_new_tokens=2)
        gc.collect()
        assert prompts.flush()
        door = prompts._store
        assert not any(copier._memories for copier in door.attached)
        assert (len(prompts._live), door._loads._running) == (0, set())
        assert door._access.staging.num_free == door._access.staging.num_slots


def test_saving_at_the_end_only(llama64, store):
    inputs = given(prompt(40))
    with opened(llama64, store, save_on="finish") as prompts:
        past = prompts.prefill(inputs)
        generate(llama64, inputs, past_key_values=past)
        assert prompts.prefill(inputs).loaded_tokens == (0,)
        del past
        assert prompts.flush()
        assert prompts.prefill(inputs).loaded_tokens == (39,)


def test_after_close_the_model_is_as_it_was(llama64, store):
    hooks = len(llama64._forward_pre_hooks), len(llama64._forward_hooks)
    prompts = opened(llama64, store)
    assert len(llama64._forward_hooks) == hooks[1] + 1
    prompts.close()
    prompts.close()
    assert (len(llama64._forward_pre_hooks), len(llama64._forward_hooks)) == hooks
    with pytest.raises(UsageError, match="closed"):
        prompts.prefill(given(prompt(5)))


def test_min_load_tokens_leaves_short_prefixes_alone(llama64, store):
    inputs = given(prompt(40))
    with opened(llama64, store, min_load_tokens=60) as prompts:
        answer(llama64, prompts, inputs)
        assert prompts.flush()
        assert answer(llama64, prompts, inputs) == (generate(llama64, inputs), (0,))


def test_a_block_that_was_rejected_is_saved_again_by_its_new_name():
    tokens = np.arange(48, dtype=np.int32)
    root = BlockKey(bytes(32))
    request = LlmRequest(0, tokens[:40], chain_root=root, tokens_per_block=T, namespace=Namespace())
    row = CachedRow(request, 0, [KvCacheLayout(1, 1, 2, 2, T, torch.float32)])
    row.append(tokens[40:])
    row.note_hit(Hit())
    first = row.order([range(3)], 3).blocks
    assert not row.is_due(3)
    row.truncate(44)
    assert not row.is_due(2)
    row.append(tokens[:4])
    assert row.is_due(3)
    again = row.order([range(3)], 3).blocks
    assert [block.number for block in again] == [2]
    assert again[0].key != first[2].key
    assert again[0].parent == first[1].key
    assert again[0].key == chain_key(first[1].key, again[0].tokens)


def test_a_destructor_inside_of_a_lock_does_not_wait_for_it():
    class Cache:
        def __init__(self) -> None:
            self.saved = False

        @property
        def nbytes(self) -> int:
            return 1

        def save(self, *, whole: bool) -> None:
            with lock:
                self.saved = whole

    lock, cache, ended = threading.Lock(), Cache(), EndedCaches(1)
    with lock:
        ended.put(cache)  # as the garbage collector does it, on the thread that holds the lock
        ended.put(Cache())  # which there is no room for
        assert ended.take() == ([cache], 1)
        ended.save(cache, whole=True)
        assert not cache.saved
    assert ended.wait(60)
    assert cache.saved
    ended.close(10)
    ended.put(cache)
    ended.save(cache, whole=True)
    assert ended.take() == ([], 0)
    assert ended.wait(0)


def test_no_error_of_a_save_ends_the_saving(caplog):
    class Broken:
        nbytes = 0

        def save(self, *, whole: bool) -> None:
            raise TypeError("keys are in another dtype than blocks")

    ended = EndedCaches(1)
    ended.save(Broken(), whole=True)
    assert ended.wait(60)
    assert "another dtype" in caplog.text
    assert ended.wait(60)
    ended.close(10)
