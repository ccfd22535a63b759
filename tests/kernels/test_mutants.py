"""Errors planted in the CUDA sources: each must be found by the tests on the shim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import test_shim_arena as arenas
import test_shim_copies as copies
import test_shim_ids as ids
import test_shim_tokens as tokens
import torch
from hypothesis import Phase, given, settings
from shim_library import ShimLibrary, Violation
from shim_runs import FEW, driver_of

from kvconnect.kernels.cuda import device
from kvconnect.kernels.cuda.compile.sources import source_text
from kvconnect.kernels.cuda.launch import tokens as token_launches

HUNT = settings(FEW, max_examples=60, phases=[Phase.generate])
"""Until something is wrong; the smallest example is not needed."""


@dataclass(frozen=True)
class Mutant:
    """An edit of a source, and a test that finds it."""

    name: str
    file: str
    old: str
    new: str
    found_by: Callable
    slow: bool = False


def hunt(cases, check):
    return lambda shim: HUNT(given(cases())(lambda case: check(shim, case)))()


def in_arena(test):
    def run(shim):
        arena = arenas.make_arena()
        driver, policy = driver_of(shim, 2, writes=[arena])
        with device.driven_by(driver, policy):
            test(arena, driver)

    return run


gather = hunt(copies.gathers, copies.check_gather)
copy = hunt(copies.mappings, copies.check_copy)
update = hunt(tokens.updates, tokens.check_update)
append = hunt(tokens.appends, tokens.check_append)


def wrong_sources(shim):
    ids.test_ids_on_the_device_that_are_no_blocks_are_skipped_and_counted(shim, torch.int64, 3)


def wrong_targets(shim):
    ids.test_a_target_id_on_the_device_never_touches_another_block(shim)


MUTANTS = [
    Mutant(
        "32-bit offset of a block",
        "copy_runs",
        "source_id * p.source_stride",
        "(int)(source_id * p.source_stride)",
        in_arena(arenas.test_blocks_beyond_4_gib_are_gathered_scattered_and_copied),
    ),
    Mutant("the last vector is left out", "copy_runs", "index <= last ?", "index < last ?", gather),
    Mutant("the tail is dropped", "update", "begin <= last;", "begin + TILE <= last;", update),
    Mutant(
        "the grid strides too far",
        "copy_runs",
        "(i64)gridDim.x * TILE)",
        "(i64)gridDim.x * TILE * 2)",
        hunt(copies.mappings, copies.check_copy),
        slow=True,
    ),
    Mutant("padding is a block", "copy_runs", "(id >= 0)", "(id >= -1)", wrong_sources),
    Mutant("a block too many", "copy_runs", "(id < ids.limit)", "(id <= ids.limit)", wrong_targets),
    Mutant("half of an id", "copy_runs", "ids.width == 8 ?", "false ?", wrong_targets, slow=True),
    Mutant(
        "a token too many", "copy_runs", "offset < pairs.prefix", "offset <= pairs.prefix", copy
    ),
    Mutant(
        "a sequence one token too long fits",
        "update",
        "p.write_indices.limit - p.tokens)",
        "p.write_indices.limit - p.tokens + 1)",
        lambda shim: tokens.test_padded_sequences_that_do_not_fit_are_not_written_and_counted(
            shim, 1
        ),
    ),
    Mutant("slot 0 of each block", "append", "in_block * side", "0 * side", append),
    Mutant(
        "threads overlap",
        "append",
        "(u32)begin + k * THREADS + threadIdx.x",
        "(u32)begin + k + threadIdx.x",
        append,
        slow=True,
    ),
    Mutant(
        "tokens of earlier runs are forgotten",
        "copy_runs",
        " - load_word(run, SKIPPED)",
        "",
        copy,
        slow=True,
    ),
    Mutant(
        "the sequence before",
        "update",
        "load_id(p.lengths, next) <= token",
        "load_id(p.lengths, next) < token",
        update,
        slow=True,
    ),
    Mutant("the wrong plane", "append", "p.sides[of.remainder]", "p.sides[0]", append, slow=True),
    Mutant(
        "32-bit offset of a token",
        "update",
        "(sequence.start + token) * p.cache_token",
        "(int)((sequence.start + token) * p.cache_token)",
        in_arena(
            lambda arena, driver: arenas.test_caches_of_more_than_4_gib_are_updated(
                arena, driver, packed=False
            )
        ),
        slow=True,
    ),
    Mutant(
        "padding is counted",
        "copy_runs",
        "!is_valid(id, ids) && id != -1",
        "!is_valid(id, ids)",
        wrong_sources,
        slow=True,
    ),
]


def named(mutant):
    marks = [pytest.mark.slow] if mutant.slow else []
    return pytest.param(mutant, id=mutant.name.replace(" ", "-"), marks=marks)


@pytest.mark.parametrize("mutant", [named(mutant) for mutant in MUTANTS])
def test_a_planted_error_is_found(shim_folder: Path, mutant: Mutant):
    source = source_text(mutant.file)
    assert source.count(mutant.old) >= 1, "the source has changed; so must the mutant"
    planted = ShimLibrary(
        shim_folder, flags=("-O0",), edit=lambda text: text.replace(mutant.old, mutant.new)
    )
    with pytest.raises((AssertionError, Violation)) as found:
        mutant.found_by(planted)
    assert "no kernel" not in str(found.value)
    assert "error:" not in str(found.value), "it must compile"


def test_too_wide_an_access_is_found(shim, monkeypatch):
    monkeypatch.setattr(token_launches, "vector_nbytes", lambda *numbers: 16)
    cache, update = (tokens.tensor_of((2, 2, 3, 24), torch.uint8, seed) for seed in (1, 2))
    with pytest.raises(Violation, match="MISALIGNED"):
        tokens.check_update(shim, (cache, update, [0, 0], None, torch.int64, 2))
