"""Decides which tokens to compute beside a load, so that a hit is never slower than computing.

A load fills a prompt's blocks from the end of the match towards its beginning, computing fills them
from the beginning on. The two meet where the later of them is earliest. The functions are pure, but
for the counter of `LoadPace.explores`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvconnect.pace import LoadPace, RunningLoad, StepPace

_SILENT_S = 0.04
"""The silence at the start of an unmeasured load after which an unmeasured model computes a block.

On a CPU this block slows the load down, by more than it saves if the store is fast.
"""
_LOADED_SOON_S = 0.25
"""The predicted rest of a load beside which an unmeasured model computes nothing; halved with each
earlier load, so that a model that only loads is measured."""
_SOONEST_S = 0.001
"""The shortest time after which a silent load is checked again."""
_WORTH = 0.12
"""The share of computing's time that a load must save."""
_SHARE, _SHARE_OF_SLOW = 0.1, 0.2
"""The share of the time since a load's start that a step may take beside an engine that computes
the same prompt; and beside one that is less than half as fast."""
_LEAST, _LEAST_OF_SLOW = 12, 40
"""The same as multiples of a step's fixed time, if that is longer."""
_LATE_BESIDE_OTHERS = 1.25
"""The factor by which that engine has to be late before others' steps compute its tokens, too."""
_LOOK = 0.1
"""Beside other requests, the share of a load's rest after which the load is checked again."""


class Decision(StrEnum):
    """The fastest way to the first token."""

    COMPUTE = "compute"
    LOAD = "load"
    BOTH = "both"


class FirstToken(NamedTuple):
    """The predicted seconds to the first token of a prompt that is alone on the engine.

    Attributes:
        computed_s: seconds if all tokens are computed.
        loaded_s: seconds if the whole stored part is loaded.
        both_s: the least of these two and, where loads may overlap, of a load that meets the
            computing.
        decision: the choice that takes `both_s`.
    """

    computed_s: float
    loaded_s: float
    both_s: float
    decision: Decision


@dataclass(frozen=True, slots=True)
class LoadingPrompt:
    """A prompt of which a store has a part; in tokens.

    Attributes:
        position: the computed tokens.
        loaded_from: the tokens from here to `match_end` are loaded. A multiple of
            `tokens_per_block`; or `match_end` itself: nothing is loaded yet.
        match_end: the end of the store's part.
        prompt_end: the end of the prompt; tokens from `match_end` on are computed in any case.
        tokens_per_block: at least 1.
    """

    position: int
    loaded_from: int
    match_end: int
    prompt_end: int
    tokens_per_block: int

    @property
    def num_blocks(self) -> int:
        """Returns the number of blocks that are neither computed nor loaded to their end."""
        first = self.position // self.tokens_per_block
        return -(-self.loaded_from // self.tokens_per_block) - first

    def end_of(self, num_blocks: int) -> int:
        """Returns the position once `num_blocks` more blocks are computed."""
        last = self.position // self.tokens_per_block + num_blocks
        return min(last * self.tokens_per_block, self.loaded_from)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of a loading prompt to compute in the next step.

    Attributes:
        tokens: 0: none. The chunk ends at the end of a block, if so many tokens may be computed, at
            ``loaded_from``, or behind the match: then the load is not needed any more.
        look_again_after: seconds after which to ask again, or as soon as the load brings news;
            ``None``: after the step. Never ``None`` while only the load runs.
        predicted: seconds from now, to compare with the real ones; ``None``: model or load are
            unmeasured.
    """

    tokens: int
    look_again_after: float | None = None
    predicted: FirstToken | None = None


def meeting(
    num_blocks: int, computed_s: Callable[[int], float], loaded_s: Callable[[int], float]
) -> tuple[int, float]:
    """Returns how many blocks to compute, at least one, and the seconds until all are there.

    Args:
        num_blocks: blocks that may be computed, at least 1.
        computed_s: returns the seconds until so many blocks are computed; an increasing function.
        loaded_s: returns the seconds until all other blocks are loaded; a decreasing function.
    """
    # The best number is where the two cross, or one before.
    crossing = 1 + bisect_left(
        range(1, num_blocks + 1), x=True, key=lambda count: computed_s(count) >= loaded_s(count)
    )
    seconds, count = min(
        (max(computed_s(count), loaded_s(count)), count)
        for count in (crossing - 1, crossing)
        if 0 < count <= num_blocks
    )
    return count, seconds


def next_chunk(
    prompt: LoadingPrompt,
    model: StepPace,
    load: RunningLoad,
    *,
    seconds: float,
    max_tokens: int,
    alone: bool = True,
) -> Chunk:
    """Returns what to compute of `prompt` in the next step, beside its load.

    The chunk leads to the predicted meeting, or is the first of several to it. It ends with a
    block, unless `max_tokens` are less than one. Nothing is computed if that takes longer than the
    load's predicted rest. Steps grow by a factor of four at most beyond the largest that was
    measured.

    Args:
        prompt: its state.
        model: the pace of the engine's steps.
        load: its load, in tokens, with all reported progress.
        seconds: since the load's start.
        max_tokens: the step's tokens that no other request uses.
        alone: no other request runs. Beside others no token is computed, unless the load's
            predicted rest is longer than computing all.
    """
    left = prompt.loaded_from - prompt.position
    first = min(prompt.end_of(1) - prompt.position, max_tokens)
    if first <= 0:
        return Chunk(0)
    rest_s = load.rest(left, seconds)
    limit = min(max_tokens, model.reach)
    if limit < first:
        alive = load.is_measured or load.amount > 0
        block_s = _LOADED_SOON_S * 0.5**load.num_earlier if alive else _SILENT_S
        if rest_s < block_s:
            return Chunk(0, max(_SOONEST_S, load.silence_for(block_s, left, seconds)))
        return Chunk(first)
    predicted, end = _predict(prompt, model, load, seconds, limit)
    shown = predicted if load.is_measured else None
    if predicted.decision is Decision.LOAD:
        block_s = _seconds(model, prompt.position, prompt.position + first, limit)
        return Chunk(0, max(_SOONEST_S, load.silence_for(block_s, left, seconds)), shown)
    if not alone and predicted.loaded_s <= predicted.computed_s:
        return Chunk(0, max(_SOONEST_S, _LOOK * rest_s), shown)
    if end > prompt.position + limit:
        end = prompt.position + limit
        if end < prompt.match_end:
            end = max(prompt.position + first, end - end % prompt.tokens_per_block)
    return Chunk(end - prompt.position, None, shown)


def next_chunk_behind(
    prompt: LoadingPrompt,
    model: StepPace,
    *,
    begun: int,
    seconds: float,
    head: int,
    max_tokens: int,
    step_tokens: int,
    alone: bool = True,
) -> Chunk:
    """Returns what to compute of `prompt` while another engine computes it, too.

    The chunk is empty while `prompt.position` is ahead of what this engine would have computed by
    now. Tokens that the other engine has brought count as part of the position. A step that is
    under way delays what comes meanwhile, so it takes a small share of the time that has passed.
    Beside an engine of less than half the speed steps are so long that their fixed time does not
    count.

    Args:
        prompt: its state.
        model: the pace of the engine's steps.
        begun: the computed tokens at the start of the load.
        seconds: since the load's start.
        head: the end of the tokens that the other engine has brought; `begun` if it has none.
        max_tokens: the step's tokens that no other request uses.
        step_tokens: the most tokens of a step.
        alone: no other request runs. Beside others the other engine has to be late by a fourth.
    """
    first = min(prompt.end_of(1) - prompt.position, max_tokens)
    if first <= 0:
        return Chunk(0)
    limit = min(max_tokens, model.reach)
    if limit < first:
        return Chunk(first) if seconds >= _SILENT_S else Chunk(0, _SILENT_S - seconds)
    due_s = _seconds(model, begun, prompt.position + first, step_tokens)
    due_s *= 1.0 if alone else _LATE_BESIDE_OTHERS
    if seconds < due_s:
        return Chunk(0, max(_SOONEST_S, due_s - seconds))
    slow = _seconds(model, begun, head, step_tokens) < seconds / 2
    share, least = (_SHARE_OF_SLOW, _LEAST_OF_SLOW) if slow else (_SHARE, _LEAST)
    most_s = max(share * seconds, least * model.coefficients[0])
    count = bisect_right(
        range(1, prompt.num_blocks + 1),
        most_s,
        key=lambda count: _seconds(model, prompt.position, prompt.end_of(count), limit),
    )
    end = min(prompt.end_of(max(1, count)), prompt.position + limit)
    if prompt.match_end <= end and prompt.prompt_end <= prompt.position + limit:
        end = prompt.prompt_end
    elif end < prompt.loaded_from:
        end = max(prompt.position + first, end - end % prompt.tokens_per_block)
    return Chunk(end - prompt.position)


def _predict(
    prompt: LoadingPrompt,
    model: StepPace,
    load: RunningLoad,
    seconds: float,
    limit: int,
    num_prompts: int = 1,
) -> tuple[FirstToken, int]:
    """Returns the seconds from now to the first token, and up to where to compute by then."""

    def computed_s(count: int) -> float:
        return num_prompts * _seconds(model, prompt.position, prompt.end_of(count), limit)

    def rest_s(count: int) -> float:
        return load.rest(prompt.loaded_from - prompt.end_of(count), seconds)

    # Tokens after the match are computed in a step of their own, unless none is loaded.
    tail_s = num_prompts * _seconds(model, prompt.match_end, prompt.prompt_end, limit)
    count, met_s = meeting(prompt.num_blocks, computed_s, rest_s)
    both_s = met_s + tail_s
    loaded_s = load.rest(prompt.loaded_from - prompt.position, seconds) + tail_s
    alone_s = computed_s(prompt.num_blocks) + tail_s
    if prompt.loaded_from == prompt.match_end:
        alone_s = num_prompts * _seconds(model, prompt.position, prompt.prompt_end, limit)
        if alone_s < min(both_s, loaded_s):
            found = FirstToken(alone_s, loaded_s, alone_s, Decision.COMPUTE)
            return found, prompt.prompt_end
    # Without a prediction for the load, the computing continues.
    if loaded_s < both_s:
        return FirstToken(alone_s, loaded_s, loaded_s, Decision.LOAD), prompt.position
    return FirstToken(alone_s, loaded_s, both_s, Decision.BOTH), prompt.end_of(count)


def _seconds(model: StepPace, start: int, end: int, chunk: int) -> float:
    """Returns `StepPace.seconds_for_prompt` of a model that is measured."""
    return model.seconds_for_prompt(start, end, chunk) or 0.0


def should_start(
    prompt: LoadingPrompt,
    model: StepPace,
    pace: LoadPace,
    *,
    max_tokens: int,
    num_prompts: int = 1,
) -> bool:
    """Returns whether a load of `prompt` is predicted to justify its memory and processor time.

    It also returns true for a few other loads, so that a store that became fast is noticed; and for
    all while model or store are unmeasured.

    Args:
        prompt: the prompt, of which no token is loaded yet.
        model: the pace of the engine's steps.
        pace: the pace of the store, in tokens.
        max_tokens: the most tokens of a step.
        num_prompts: prompts that the model computes in turns, this one included. As many loads are
            assumed to share the store.
    """
    limit = min(max_tokens, model.reach)
    if not pace.coefficients or limit < prompt.tokens_per_block:
        return True
    load = RunningLoad(pace, prompt.match_end - prompt.position)
    found = _predict(prompt, model, load, 0.0, limit, num_prompts)[0]
    computed_s = num_prompts * _seconds(model, prompt.position, prompt.prompt_end, limit)
    return found.both_s <= (1 - _WORTH) * computed_s or pace.explores(soon=True)


def load_is_faster(predicted: FirstToken | None, pace: LoadPace) -> bool:
    """Returns whether to load by `predict_alone`, for engines that park a request meanwhile.

    It also returns true for one in a hundred loads that are predicted to be slower, and for all
    without a prediction.
    """
    return predicted is None or predicted.decision is Decision.LOAD or pace.explores()


def predict_alone(
    prompt: LoadingPrompt, model: StepPace, pace: LoadPace, *, amount: float, max_tokens: int
) -> FirstToken | None:
    """Returns the seconds to load all of `prompt` and to compute all; ``None``: unmeasured.

    `amount` is the size of the load, in the unit of `pace`; a step has `max_tokens` at most.
    """
    limit = min(max_tokens, model.reach)
    loaded_s = pace.predict(amount)
    if loaded_s is None or limit < prompt.tokens_per_block:
        return None
    loaded_s += _seconds(model, prompt.match_end, prompt.prompt_end, limit)
    computed_s = _seconds(model, prompt.position, prompt.prompt_end, limit)
    if loaded_s < computed_s:
        return FirstToken(computed_s, loaded_s, loaded_s, Decision.LOAD)
    return FirstToken(computed_s, loaded_s, computed_s, Decision.COMPUTE)
